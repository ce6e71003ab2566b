# SPDX-License-Identifier: Apache-2.0
"""Expert load balance with the interface of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): replicas of experts on GPUs, from the load of
each expert. `from moeccl.eplb import rebalance_experts` replaces `from eplb import rebalance_experts`.

weight and current are torch tensors on any device, NumPy arrays or nested lists. The maps have the library of weight: int64 torch tensors
on the CPU, int64 NumPy arrays or nested lists. Neither library is needed. The functions need no communicator, may run on any thread and
release the interpreter lock. They give the same answer for the same input on all ranks whose machines are of one kind; otherwise solve on
one rank and broadcast."""
import array
import ctypes
import sys
from itertools import chain
from typing import Any, List, NamedTuple, Tuple

from . import _abi
from ._abi import BalanceAnswer
from ._arrays import made, record
from ._errors import Error, check, number
from ._library import lib
from .comm import fill

__all__ = ["Rebalanced", "rebalance", "rebalance_experts"]

_I32 = ctypes.c_int32
_MOST = 65536  # slots
_OPTIONS = ("tolerance", "max_work")
# This module's names for the structure's fields, in errors.
_NAMES = {"problem.load": "weight", "problem.n_slots": "num_replicas", "problem.n_groups": "num_groups", "problem.n_nodes": "num_nodes",
          "problem.n_gpus": "num_gpus", "problem.": "", "n_slots": "num_replicas", "n_groups": "num_groups", "n_nodes": "num_nodes",
          "n_gpus": "num_gpus", "n_experts": "weight's experts"}


class Rebalanced(NamedTuple):
    """A placement of L layers' experts, E in each, on S slots of G GPUs, and what it gains. Slot s is on GPU s * G // S."""
    physical_to_logical_map: Any  # [L, S] the expert in each slot
    logical_to_physical_map: Any  # [L, E, X] the slots of each expert, ascending, then -1; X: the most replicas of an expert
    logical_count: Any  # [L, E] the replicas of each expert
    answer: BalanceAnswer  # balances, and how many experts GPUs have to receive (moecclBalanceAnswer_t in moeccl/solve.h)


def rebalance_experts(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Tuple[Any, Any, Any]:
    """Returns physical_to_logical_map [layers, num_replicas], logical_to_physical_map [layers, experts, X] with -1 behind an expert's last
    slot, and logical_count [layers, experts], for the loads weight [layers, experts].

    As in EPLB, the replicas of a group of experts stay on one node if num_nodes divides num_groups, and may be on any GPU otherwise.
    The fullest GPU of a layer never has more load than with EPLB's own method. EPLB lists the slots of an expert in the order in which
    it made the replicas, this module lists them in ascending order."""
    return rebalance(weight, num_replicas, num_groups, num_nodes, num_gpus)[:3]


def rebalance(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, current: Any = None,
              move_cost: float = 0.0, **options: Any) -> Rebalanced:
    """Like rebalance_experts(), from the current placement: current [layers, num_replicas] is the expert in each slot now, -1 for none.
    Each expert that a GPU has to receive must take move_cost, in weight's unit, off the fullest GPU; with 0 moves only decide among
    placements that are equally good. Experts that stay on a GPU keep their slots.

    Options: tolerance (relative, 0.001: the search ends so near to the lower bound), max_work (bounds the time; below 0: EPLB's
    placement)."""
    for name in options:
        if name not in _OPTIONS:  # a field of the structure that follows from the arguments is none
            raise TypeError(f"unknown option {name}: there are current, move_cost, {', '.join(_OPTIONS)}")
    loads, n_experts = _table("weight", weight, "experts", "d")
    problem, answer = _abi.moecclBalanceProblem_t(), _abi.moecclBalanceAnswer_t()
    sizes = {"num_replicas": num_replicas, "num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    num_replicas, num_groups, num_nodes, num_gpus = (number(name, value, (1, _MOST)) for name, value in sizes.items())
    n_layers = len(loads) // n_experts
    fill(problem, {"n_layers": n_layers, "n_experts": n_experts, "n_slots": num_replicas, "n_groups": num_groups, "n_nodes": num_nodes,
                   "n_gpus": num_gpus, "move_cost": move_cost, **options})
    problem.load = _pointer(loads, ctypes.c_double)
    if current is not None:
        slots, width = _table("current", current, "num_replicas", "i")
        if len(slots) != n_layers * num_replicas or width != num_replicas:
            raise ValueError(f"current has {len(slots) // width} layers of {width} slots: give [{n_layers}, {num_replicas}]")
        problem.current = _pointer(slots, _I32)
    placed = made(_I32, n_layers * num_replicas)
    try:
        check(lib.moecclSolveBalance(ctypes.byref(problem), placed.buffer_info()[0], ctypes.byref(answer)))
    except Error as error:
        if error.code != _abi.moecclInvalidArgument:
            raise
        sentence = str(error).partition(": ")[2]
        for field, name in _NAMES.items():
            sentence = sentence.replace(field, name)
        raise ValueError(sentence) from None
    return Rebalanced(*_maps(weight, placed, n_layers, n_experts), record(BalanceAnswer, answer))


def _pointer(numbers: "array.array[Any]", kind: Any) -> Any:
    return ctypes.cast(numbers.buffer_info()[0], ctypes.POINTER(kind))


def _table(name: str, given: Any, columns: str, letter: str) -> Tuple["array.array[Any]", int]:
    """Returns the numbers of a table, row by row, and the length of a row."""
    rows = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(rows, (list, tuple)) or not rows or not all(isinstance(row, (list, tuple)) and row for row in rows):
        found = f"has shape {tuple(given.shape)}" if hasattr(given, "shape") else f"is {type(given).__name__} {given!r:.60}"
        raise ValueError(f"{name} {found}: give [layers, {columns}], such as [[...], ...]")
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{name} has rows of {min(widths)} and of {max(widths)} numbers: give [layers, {columns}]")
    try:
        return array.array(letter, chain.from_iterable(rows)), widths.pop()
    except (TypeError, OverflowError) as error:
        raise TypeError(f"{name} holds something else than {'numbers' if letter == 'd' else 'numbers of experts'}: {error}") from None


def _maps(weight: Any, placed: "array.array[int]", n_layers: int, n_experts: int) -> Tuple[Any, Any, Any]:
    n_slots = len(placed) // n_layers
    counts = array.array("q", bytes(8 * n_layers * n_experts))
    slots: List[List[int]] = [[] for _ in range(n_layers * n_experts)]
    for at, expert in enumerate(placed):
        layer, slot = divmod(at, n_slots)
        slots[layer * n_experts + expert].append(slot)
    most = 0
    for at, of in enumerate(slots):
        counts[at] = len(of)
        most = max(most, len(of))
    inverse = array.array("q", chain.from_iterable(of + [-1] * (most - len(of)) for of in slots))
    return (_like(weight, array.array("q", placed), (n_layers, n_slots)), _like(weight, inverse, (n_layers, n_experts, most)),
            _like(weight, counts, (n_layers, n_experts)))


def _like(weight: Any, numbers: "array.array[int]", shape: Tuple[int, ...]) -> Any:
    """Returns the numbers as what weight is: a torch tensor, a NumPy array or nested lists."""
    owner = type(weight).__module__.partition(".")[0] if hasattr(weight, "tolist") else ""
    if hasattr(weight, "data_ptr") or owner == "torch":
        torch: Any = sys.modules["torch"]
        return torch.frombuffer(numbers, dtype=torch.int64).reshape(shape)
    if owner == "numpy":
        return sys.modules["numpy"].frombuffer(numbers, dtype="int64").reshape(shape)
    rows: List[Any] = numbers.tolist()
    for extent in reversed(shape[1:]):
        rows = [rows[at:at + extent] for at in range(0, len(rows), extent)]
    return rows
