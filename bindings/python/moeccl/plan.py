# SPDX-License-Identifier: Apache-2.0
"""Plans: which algorithm runs an operation, why, and how to force another one (include/moeccl/plan.h).

Operations have the names that messages use ("allreduce", "reduce_scatter", "dispatch"), or their numbers. count and type are those of
the operation's own call."""
import ctypes
import json
import os
from typing import Any, Dict, List, Optional, Union

from . import _abi
from ._abi import PlanInfo
from ._arrays import record
from ._buffers import type_size
from ._errors import SIZE, check, number, text
from ._library import lib
from ._pages import page
from .comm import Comm
from .constants import FLOAT32

OPS: Dict[str, int] = {lib.moecclOpName(n).decode(): n for n in range(_abi.MOECCL_NUM_OPS)}


def op_number(op: Union[str, int]) -> int:
    """Returns the moecclOp_t for a name; numbers stay as they are."""
    if isinstance(op, str):
        if op not in OPS:
            raise ValueError(f"op is {op!r}: there are {', '.join(OPS)}")
        return OPS[op]
    return number("op", op)


def algorithms(op: Union[str, int]) -> List[str]:
    """Lists the algorithms that force() knows for an operation."""
    listed = page(lambda *room: lib.moecclPlanList(op_number(op), *room))
    return listed.split(",") if listed else []


def query(comm: Comm, op: Union[str, int], count: int, type: int = FLOAT32) -> PlanInfo:
    """Returns the plan that would run the operation: algorithm, predicted and measured time, bytes, steps. This call is not collective."""
    info = _abi.moecclPlanInfo_t()
    type_size(type)
    comm._check(lib.moecclPlanQuery(comm._handle, op_number(op), number("count", count, SIZE), type, ctypes.byref(info)))
    return record(PlanInfo, info)


def explain(comm: Comm, op: Union[str, int], count: int, type: int = FLOAT32) -> str:
    """Returns a page for a person: candidates and predicted times, the choice, bytes per level, this rank's steps. This call is not
    collective."""
    type_size(type)
    return page(lambda *room: lib.moecclPlanExplain(comm._handle, op_number(op), number("count", count, SIZE), type, *room), comm)


def prove(comm: Comm, op: Union[str, int], count: int, type: int = FLOAT32) -> None:
    """Proves that the plan ends with the right bytes on every rank; an Error (moecclInternalError) names rank, lane and step."""
    type_size(type)
    comm._check(lib.moecclPlanProve(comm._handle, op_number(op), number("count", count, SIZE), type))


def force(comm: Comm, op: Union[str, int], algorithm: Optional[str]) -> None:
    """Forces an algorithm for every call that it applies to; None or "auto" returns to the choice by price. All ranks must force the
    same algorithm."""
    comm._check(lib.moecclPlanForce(comm._handle, op_number(op), text("algorithm", algorithm)))


def calibrate(comm: Comm, budget_ms: float = 0, max_bytes: int = 0) -> None:
    """Measures plans and links for about budget_ms milliseconds (0: 20000) and uses the result. The call is collective and blocks."""
    comm._check(lib.moecclCalibrate(comm._handle, float(budget_ms), number("max_bytes", max_bytes, SIZE)))


def load_profile(comm: Comm, path: Any) -> None:
    """Uses a profile file from the next operation on. The call is collective: all ranks read the same profile."""
    comm._check(lib.moecclProfileLoad(comm._handle, text("path", os.fspath(path))))


def save_profile(comm: Comm, path: Any = None) -> None:
    """Writes the profile in use as JSON; None: into the user's cache, where MOECCL_CALIBRATE looks. This call is not collective."""
    comm._check(lib.moecclProfileSave(comm._handle, text("path", None if path is None else os.fspath(path))))


def describe_topology(source: Optional[str] = None, format: str = "text") -> str:
    """Describes a topology. source: None discovers this host; otherwise a file or a synthetic text ("node:2 gpu:8").

    format: "text", "json", "svg" or "levels"; for a synthetic text only "text" and "levels"."""
    formats = {"text": _abi.moecclTopologyText, "json": _abi.moecclTopologyJson, "svg": _abi.moecclTopologySvg,
               "levels": _abi.moecclTopologyLevels}
    if format not in formats:
        raise ValueError(f"format is {format!r}: there are {', '.join(formats)}")
    return page(lambda *room: lib.moecclTopologyDescribe(text("source", source), formats[format], *room))


def doctor(n_ranks: int = 0) -> str:
    """Returns a page for a person: the hardware found, the transport that each pair of ranks would use, each problem with its fix.

    It starts two short-lived processes and initializes CUDA if it is present, so call it from a separate program."""
    room = ctypes.create_string_buffer(1 << 20)
    check(lib.moecclDoctor(number("n_ranks", n_ranks), room, len(room), None, None))
    return room.value.decode(errors="replace")


def status(pid: int = 0) -> Dict[str, Any]:
    """Returns what the communicators of a process on this host, even a hung one, are doing and waiting for; 0: the calling process.

    The keys are those of moecclStatus (include/moeccl/status.h). Raises Error with code moecclRemoteError if there is no such process, if
    the caller may not read it, or if it has made no communicator."""
    answer: Dict[str, Any] = json.loads(page(lambda *room: lib.moecclStatus(number("pid", pid), *room)))
    return answer


def simulate(topology: str, op: Union[str, int] = "dispatch", **options: Any) -> str:
    """Returns a page, or JSON with json=1, about the time of an operation on a cluster that is not at hand. All times are simulated.

    Options: profile, algorithm, json, count, type, one_host, hidden_bytes, tokens_per_rank, top_k, n_experts, routing, seed, layout,
    expert_rank, domain (lists), as in moecclSimulateConfig_t (include/moeccl/simulate.h)."""
    from ._arrays import set_array
    from .comm import fill
    config, keep = _abi.moecclSimulateConfig_t(), []  # type: ignore[var-annotated]
    for name in ("expert_rank", "domain"):
        values = options.pop(name, None)
        if values is not None:
            values = list(values)
            if name == "domain":
                config.n_levels = len(values)
            elif len(values) != options.get("n_experts", len(values)):
                raise ValueError(f"expert_rank has {len(values)} ranks for {options['n_experts']} experts: give one for each")
            else:
                config.n_experts = len(values)
            set_array(config, keep, name, values, ctypes.c_int32, None)
    fill(config, {"topology": topology, "op": op_number(op), **options}, ("reserved", "reserved2", "expert_rank", "domain", "n_levels"))
    return page(lambda *room: lib.moecclSimulate(ctypes.byref(config), *room))
