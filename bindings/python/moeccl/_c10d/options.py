# SPDX-License-Identifier: Apache-2.0
"""pg_options of a group, and what they mean for its communicators."""
import warnings
from datetime import timedelta
from typing import Any, Dict, Optional, cast

import torch.distributed as dist

from .. import _abi
from ..comm import fill
from . import meeting
from .base import BaseOptions

_MEETING_MS = 60000.0  # the least time to form a group, however short its operations' timeout is: the library's own default
_FIELDS = ("deterministic", "pace", "topology", "staging_bytes", "priority", "cuda_sms")


def config_of(options: Any) -> Dict[str, Any]:
    """Returns the fields of moecclConfig_t of pg_options. Those of another backend have none: nccl's `config` is not a dict."""
    config = getattr(options, "config", None)
    return config if isinstance(config, dict) else {}


def warn_of_others(options: Any) -> None:
    """Warns if the pg_options of a group that moeccl alone serves are another backend's."""
    if not isinstance(options, Options):
        warnings.warn(f"pg_options are {type(options).__qualname__}, of another backend: moeccl takes nothing from them; give "
                      "moeccl.distributed.Options", stacklevel=3)


class Options(BaseOptions):  # type: ignore[misc]
    """pg_options of a group: its timeout, if the call that makes the group gives none, and the fields of moecclConfig_t
    (include/moeccl/comm.h) by name, as in Options(topology="node:2 gpu:4", deterministic=1).

    With direct False, every call goes through torch's C++ side, where torch's hooks and flight recorder see it. This costs tens of
    microseconds, and works then offer only wait() and get_future()."""

    def __init__(self, timeout: Optional[timedelta] = None, direct: bool = True, **config: Any) -> None:
        if timeout is None:
            super().__init__("moeccl")
        else:
            super().__init__("moeccl", timeout=timeout)
        for name in config:
            if name not in _FIELDS:
                raise TypeError(f"unknown option {name}: there are timeout, direct, " + ", ".join(_FIELDS))
        self.asked, self.direct, self.config = timeout, direct, config
        self.copy_of: Optional[Options] = None

    def __deepcopy__(self, memo: Any) -> "Options":
        """For torch 2.11 to 2.14, which copy the options of the group above for a split without options: see Backend.split()."""
        made = Options(self._timeout, self.direct, **self.config)
        made.asked, made.copy_of = self.asked, self
        return made


def timeout_of(given: timedelta, options: Any) -> timedelta:
    """Returns a new group's timeout: that of the call, or that of its pg_options if the call has torch's default."""
    asked = getattr(options, "asked", None)
    if asked is None or asked == given:
        return given
    if given == dist.distributed_c10d.default_pg_timeout:
        return cast(timedelta, asked)
    warnings.warn(f"the group's timeout is {given}, as the call says, and not the {asked} of its pg_options: give one of them",
                  stacklevel=3)
    return given


def options_of_split(above: Any, given: Any, timeout: Optional[timedelta]) -> Options:
    """Returns the options of a group that is split from one with the options `above`; given: those of the call, or None."""
    if getattr(given, "copy_of", None) is above:  # none were given
        given = None
    if given is not None:
        warn_of_others(given)
    timeout = timeout_of(timeout, given) if timeout else getattr(given, "_timeout", None) or above._timeout
    made = Options(timeout, getattr(given, "direct", True))
    inherited = {name: value for name, value in config_of(above).items() if name not in ("topology", "pace")}
    made.config = {**inherited, **config_of(given)}
    return made


def configured(options: Any, timeout_ms: float, name: str) -> _abi.moecclConfig_t:
    config = _abi.moecclConfig_t()
    fill(config, config_of(options))
    config.timeout_ms = meeting.clamp_ms(timeout_ms)
    config.init_timeout_ms = meeting.clamp_ms(max(timeout_ms, _MEETING_MS))
    config.name = name.encode()[:31]
    return config
