# SPDX-License-Identifier: Apache-2.0
"""Failures as exceptions that torch's users expect, with the library's error text."""
from typing import Any, Optional

import torch.distributed as dist

from .. import _abi
from .._errors import Error as _Error
from .._library import lib

_Base: Any = getattr(dist, "DistBackendError", RuntimeError)


class BackendError(_Error, _Base):
    """A failed operation of the backend: a moeccl.Error (`code`, `name`) that is also torch's DistBackendError."""


def failure(what: str, code: int, comm: Optional[int]) -> BackendError:
    """Makes the error of a call that has just returned `code`."""
    passed = "the timeout passed: " if code == _abi.moecclTimeout else ""
    return BackendError(code, f"{what}: {passed}{lib.moecclGetLastError(comm).decode(errors='replace')}")


def expired(what: str, ms: float, remedy: str) -> BackendError:
    return BackendError(_abi.moecclTimeout, f"{what} did not finish within {ms:.0f} ms: {remedy}")


def overdue(what: str, ms: float) -> BackendError:
    """Makes the error of an operation that ends its group because its time has passed."""
    return expired(what, ms, "the group's timeout passed, so it is aborted; look for a rank that did not make this call")


def milliseconds(timeout: Any) -> Optional[float]:
    """Returns a timedelta in milliseconds; None for None and for values that stand for the group's own timeout."""
    if timeout is None:
        return None
    ms = timeout.total_seconds() * 1000
    return ms if ms > 0 else None


__all__ = ["BackendError", "expired", "failure", "milliseconds", "overdue"]
