# SPDX-License-Identifier: Apache-2.0
"""pg_options of a group, and what they mean for its communicators."""
import warnings
from datetime import timedelta
from typing import Any, Optional, cast

import torch.distributed as dist

from .. import _abi
from ..comm import fill
from . import meeting
from .base import BaseOptions

_MEETING_MS = 60000.0  # the least time to form a group, however short its operations' timeout is: the library's own default
_FIELDS = ("deterministic", "pace", "topology", "staging_bytes", "priority", "cuda_sms")


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


def configured(options: Any, timeout_ms: float, name: str) -> _abi.moecclConfig_t:
    config = _abi.moecclConfig_t()
    fill(config, getattr(options, "config", {}))
    config.timeout_ms = meeting.clamp_ms(timeout_ms)
    config.init_timeout_ms = meeting.clamp_ms(max(timeout_ms, _MEETING_MS))
    config.name = name.encode()[:31]
    return config
