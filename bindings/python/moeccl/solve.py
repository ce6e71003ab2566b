# SPDX-License-Identifier: Apache-2.0
"""Placement solvers for samples, experts and replicas (include/moeccl/solve.h). They need no communicator and may run on any thread.

Arrays are int32 or float64 buffers, or (nested) lists; answers are flat array.arrays with the shape that each function names. Times are
in microseconds, bandwidths in bytes per second, and volumes in tokens unless a name says bytes. An answer's `keep` is 1 if nothing gains
more than min_gain; the array is then the current placement. An omitted option has the default of the structure of the same name."""
import array
import ctypes
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _abi
from ._abi import ChunkAnswer, DomainAnswer, Layout, LayoutCost, ReplicaAnswer, SampleAnswer, SwapAnswer
from ._arrays import Given, made, record, set_array
from ._errors import INT32, INT64, check, number
from ._library import lib
from ._owned import OfThisProcess, Owned
from .comm import fill

_byref = ctypes.byref
_I32, _I64, _F64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class Problem:
    """A problem's structure and the arrays that it points to."""

    def __init__(self, struct: Any, options: Any, arrays: Sequence[Tuple[str, Any, Any, Any]]) -> None:
        self.struct, self.keep = struct, []  # type: Any, List[Any]
        fill(struct, {name: value for name, value in options.items() if value is not None})
        for name, values, kind, shape in arrays:
            set_array(struct, self.keep, name, values, kind, shape)

    @property
    def ref(self) -> Any:
        """The structure as an argument of a call."""
        return _byref(self.struct)


def sample_problem(n_samples: int, n_experts: int, n_devices: int, n_nodes: int, num_gather: Any, num_scatter: Any = None,
                   expert_device: Any = None, device_node: Any = None, current: Any = None,
                   inner_group: Any = None, inner_alpha_us: Any = (), inner_beta_us: Any = (), **options: Any) -> Problem:
    """Describes a placement of samples (NetMoE). num_gather, num_scatter: [n_samples, n_experts] tokens; expert_device: [n_experts];
    device_node: [n_devices]; current: [n_samples]; inner_group: [levels, n_devices], with one figure per level in inner_alpha_us and
    inner_beta_us.

    Options: alpha_intra_us, alpha_inter_us, beta_intra_us, beta_inter_us, min_gain, refine_pairs."""
    table, inner = (n_samples, n_experts), len(inner_alpha_us)
    return Problem(_abi.moecclSampleProblem_t(), {"n_samples": n_samples, "n_experts": n_experts, "n_devices": n_devices,
                                                  "n_nodes": n_nodes, "n_inner": inner, **options},
                   [("num_gather", num_gather, _I32, table), ("num_scatter", num_scatter, _I32, table if num_scatter is not None else None),
                    ("expert_device", expert_device, _I32, (n_experts,) if expert_device is not None else None),
                    ("device_node", device_node, _I32, (n_devices,) if device_node is not None else None),
                    ("current", current, _I32, (n_samples,) if current is not None else None),
                    ("inner_group", inner_group, _I32, (inner, n_devices) if inner_group is not None else None),
                    ("inner_alpha_us", inner_alpha_us if inner else None, _F64, None),
                    ("inner_beta_us", inner_beta_us if inner else None, _F64, (inner,) if inner else None)])


def samples(problem: Problem) -> Tuple["array.array[int]", SampleAnswer]:
    """Returns placement[n_samples], the new device of each sample, which is never worse than the current one, and its gain."""
    answer, placement = _abi.moecclSampleAnswer_t(), made(_I32, problem.struct.n_samples)
    check(lib.moecclSolveSamples(problem.ref, placement.buffer_info()[0], _byref(answer), None, 0))
    return placement, record(SampleAnswer, answer)


def evaluate_samples(problem: Problem, placement: Any) -> SampleAnswer:
    """Returns the cost of placement[n_samples]."""
    answer, given = _abi.moecclSampleAnswer_t(), Given("placement", placement, _I32, (problem.struct.n_samples,))
    check(lib.moecclEvaluateSamples(problem.ref, given.address, _byref(answer)))
    return record(SampleAnswer, answer)


def assignment(cost: Any, capacity: Any, n_items: int, n_bins: int) -> Tuple["array.array[int]", int]:
    """Returns bin[n_items] with the least sum of cost[n_items, n_bins] (0 to 2**30 - 1) where bin b gets capacity[b] items, and the sum."""
    costs, room = Given("cost", cost, _I32, (n_items, n_bins)), Given("capacity", capacity, _I32, (n_bins,))
    bins, total = made(_I32, number("n_items", n_items)), _I64()
    check(lib.moecclSolveAssignment(costs.address, room.address, n_items, number("n_bins", n_bins), bins.buffer_info()[0],
                                    _byref(total), None, 0))
    return bins, total.value


class Predictor:
    """Predicts the next layer's routing from decayed counts of pairs (expert in this layer, expert in the next) of the same token."""

    def __init__(self, n_now: int, n_next: int, decay: float) -> None:
        self.n_now, self.n_next, self.decay = number("n_now", n_now, (1, INT32[1])), number("n_next", n_next, (1, INT32[1])), decay
        self.joint: "array.array[float]" = made(_F64, self.n_now * self.n_next)

    def update(self, topk_now: Any, topk_next: Any, top_k: int) -> None:
        """Adds the pairs of topk_now and topk_next, int32 [tokens, top_k] of the same tokens."""
        now = Given("topk_now", topk_now, _I32)
        after = Given("topk_next", topk_next, _I32, (now.count,))
        if number("top_k", top_k, (1, INT32[1])) and now.count % top_k:
            raise ValueError(f"topk_now has {now.count} numbers: give [tokens, {top_k}]")
        check(lib.moecclPredictorUpdate(self.joint.buffer_info()[0], self.n_now, self.n_next, self.decay, now.address, after.address,
                                        now.count // top_k, top_k))

    def apply(self, num_now: Any, n_samples: int) -> "array.array[int]":
        """Returns [n_samples, n_next] from num_now[n_samples, n_now]; each row keeps its sum."""
        now = Given("num_now", num_now, _I32, (n_samples, self.n_now))
        out = made(_I32, n_samples * self.n_next)
        check(lib.moecclPredictorApply(self.joint.buffer_info()[0], self.n_now, self.n_next, now.address, n_samples, out.buffer_info()[0]))
        return out


class SampleSolver(OfThisProcess):
    """Runs samples() on its own thread. Use it from one thread at a time."""
    SOURCES = ("fresh", "last", "current")

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        check(lib.moecclSampleSolverCreate(_byref(handle)))
        self._handle: Optional[int] = handle.value
        self._owned = Owned(handle.value, lib.moecclSampleSolverDestroy)
        self._n = 0

    def submit(self, problem: Problem) -> None:
        """Copies the problem and returns at once. It replaces a problem whose solve has not begun."""
        check(lib.moecclSampleSolverSubmit(self._handle, problem.ref))
        self._n = problem.struct.n_samples

    def fetch(self, deadline_us: float = -1) -> Tuple["array.array[int]", SampleAnswer, str]:
        """Returns placement, answer, and source: "fresh", or after deadline_us "last" or "current". 0 does not wait, below 0 waits
        to the end."""
        answer, placement, source = _abi.moecclSampleAnswer_t(), made(_I32, self._n), ctypes.c_int()
        check(lib.moecclSampleSolverFetch(self._handle, deadline_us, placement.buffer_info()[0], _byref(answer), _byref(source)))
        return placement, record(SampleAnswer, answer), self.SOURCES[source.value]

    def close(self) -> None:
        """Ends the thread; the end of the last object that uses the solver does the same."""
        self._owned.close()
        self._handle = None


def swap_problem(n_experts: int, top_k: int, n_groups: Sequence[int], group_of_slot: Any = None, placement: Any = None,
                 inter_alpha_us: Any = None, inter_beta_us: Any = None, intra_alpha_us: Any = None, intra_beta_us: Any = None,
                 **options: Any) -> Problem:
    """Describes an expert swap (HierMoE). n_groups: [levels] groups of each level, outermost first; group_of_slot: [levels, n_experts];
    placement: [n_experts] slot of each expert; the four figures: float64 [levels], all or none.

    Options: row_bytes, dimension, max_function (0 smooth, 1 plain, 2 log-sum-exp), gamma, count_duplicates, migrate_us, horizon,
    min_gain."""
    levels = len(n_groups)
    figures = (("inter_alpha_us", inter_alpha_us), ("inter_beta_us", inter_beta_us), ("intra_alpha_us", intra_alpha_us),
               ("intra_beta_us", intra_beta_us))
    return Problem(_abi.moecclSwapProblem_t(), {"n_experts": n_experts, "top_k": top_k, "n_levels": levels, **options},
                   [("n_groups", list(n_groups), _I32, None),
                    ("group_of_slot", group_of_slot, _I32, (levels, n_experts) if group_of_slot is not None else None),
                    ("placement", placement, _I32, (n_experts,) if placement is not None else None),
                    *[(name, values, _F64, (levels,) if values is not None else None) for name, values in figures]])


def _tokens(problem: Problem, topk: Any) -> Tuple[Given, int]:
    given, k = Given("topk", topk, _I32), problem.struct.top_k
    if k < 1 or given.count % k:
        raise ValueError(f"topk has {given.count} numbers: give [tokens, {k}]")
    return given, given.count // k


def _joined(problem: Problem, counts: Any) -> Given:
    n = ctypes.c_size_t()
    check(lib.moecclSwapCountsLength(problem.ref, _byref(n)))
    return Given("counts", counts, _I32, (n.value,))


def swap_count(problem: Problem, topk: Any) -> "array.array[int]":
    """Returns this rank's counts of topk[tokens, top_k]; an all_reduce (sum) joins the counts of all ranks."""
    n, (given, n_tokens) = ctypes.c_size_t(), _tokens(problem, topk)
    check(lib.moecclSwapCountsLength(problem.ref, _byref(n)))
    counts = made(_I32, n.value)
    check(lib.moecclSwapCount(problem.ref, given.address, n_tokens, counts.buffer_info()[0], None, 0))
    return counts


def swap_table(problem: Problem, counts: Any, level: int) -> "array.array[int]":
    """Returns z[n_experts, n_experts, groups of the level]: tokens of each group after swapping two experts (Eq. 9), for inspection."""
    levels = problem.struct.n_levels
    level = number("level", level, (0, levels - 1))
    z = made(_I32, problem.struct.n_experts**2 * problem.struct.n_groups[level])
    check(lib.moecclSwapTable(problem.ref, _joined(problem, counts).address, level, z.buffer_info()[0]))
    return z


def swap(problem: Problem, counts: Any) -> Tuple[Tuple[int, int], SwapAnswer]:
    """Returns the best pair of experts to swap, from the joined counts; (-1, -1) if the answer is keep."""
    pair, answer = (ctypes.c_int32 * 2)(), _abi.moecclSwapAnswer_t()
    check(lib.moecclSolveSwap(problem.ref, _joined(problem, counts).address, pair, _byref(answer), None, 0))
    return (pair[0], pair[1]), record(SwapAnswer, answer)


def swap_sequence(problem: Problem, topk: Any, max_swaps: int) -> Tuple["array.array[int]", "array.array[int]", SwapAnswer]:
    """Returns pairs[swaps, 2], each the best after those before it, and placement[n_experts] afterwards, for tokens that are all here."""
    answer, (given, n_tokens) = _abi.moecclSwapAnswer_t(), _tokens(problem, topk)
    pairs, placement = made(_I32, 2 * number("max_swaps", max_swaps, (0, INT32[1]))), made(_I32, problem.struct.n_experts)
    check(lib.moecclSolveSwapSequence(problem.ref, given.address, n_tokens, max_swaps, pairs.buffer_info()[0], placement.buffer_info()[0],
                                      _byref(answer)))
    return pairs[:2 * answer.n_swaps], placement, record(SwapAnswer, answer)


def replica_counts(popularity: Any, n_slots: int, capacity_factor: Optional[float] = None) -> "array.array[int]":
    """Returns the replicas of each expert, each at least 1 and n_slots in all: proportional to popularity or, with capacity_factor,
    those that drop the fewest tokens."""
    given = Given("popularity", popularity, _F64)
    counts = made(_I32, given.count)
    front = (given.address, given.count, number("n_slots", n_slots))
    if capacity_factor is None:
        check(lib.moecclReplicaCounts(*front, counts.buffer_info()[0]))
    else:
        check(lib.moecclReplicaCountsFewestDrops(*front, capacity_factor, counts.buffer_info()[0]))
    return counts


def replica_drops(popularity: Any, counts: Any, n_slots: int, capacity_factor: float) -> float:
    """Returns the number of tokens above the capacity of their expert's counts[n_experts] replicas."""
    given, dropped = Given("popularity", popularity, _F64), ctypes.c_double()
    replicas = Given("counts", counts, _I32, (given.count,))
    check(lib.moecclReplicaDrops(given.address, replicas.address, given.count, number("n_slots", n_slots), capacity_factor,
                                 _byref(dropped)))
    return dropped.value


def replica_problem(n_experts: int, n_ranks: int, slots_per_rank: int, n_nodes: int, demand: Any, counts: Any = None,
                    rank_node: Any = None, **options: Any) -> Problem:
    """Describes a placement of replicas on slots. demand: [n_ranks, n_experts] tokens; counts: [n_experts] replicas; rank_node: [n_ranks].

    Options: beta_inter_us, compute_us, min_gain."""
    return Problem(_abi.moecclReplicaProblem_t(), {"n_experts": n_experts, "n_ranks": n_ranks, "slots_per_rank": slots_per_rank,
                                                   "n_nodes": n_nodes, **options},
                   [("demand", demand, _I32, (n_ranks, n_experts)), ("counts", counts, _I32, (n_experts,) if counts is not None else None),
                    ("rank_node", rank_node, _I32, (n_ranks,) if rank_node is not None else None)])


def replicas(problem: Problem) -> Tuple["array.array[int]", ReplicaAnswer]:
    """Returns slot_expert[n_ranks, slots_per_rank] with less traffic on the busiest node and less load on the fullest rank."""
    answer, s = _abi.moecclReplicaAnswer_t(), problem.struct
    slots = made(_I32, s.n_ranks * s.slots_per_rank)
    check(lib.moecclSolveReplicas(problem.ref, slots.buffer_info()[0], _byref(answer)))
    return slots, record(ReplicaAnswer, answer)


def replica_split(problem: Problem, slot_expert: Any) -> "array.array[int]":
    """Returns split[slots, n_ranks]: how many tokens of each rank each slot serves."""
    s = problem.struct
    given = Given("slot_expert", slot_expert, _I32, (s.n_ranks, s.slots_per_rank))
    split = made(_I32, given.count * s.n_ranks)
    check(lib.moecclReplicaSplit(problem.ref, given.address, split.buffer_info()[0]))
    return split


def gradient_sources(slot_expert: Any, n_experts: int, n_ranks: int, slots_per_rank: int) -> Tuple["array.array[int]", "array.array[int]"]:
    """Returns source[n_experts, n_ranks], the rank that sends each expert's gradient shard to each rank, and sends[n_ranks], the shards
    that each rank sends."""
    given = Given("slot_expert", slot_expert, _I32, (n_ranks, slots_per_rank))
    source, sends = made(_I32, number("n_experts", n_experts) * n_ranks), made(_I64, n_ranks)
    check(lib.moecclGradSources(given.address, n_experts, n_ranks, slots_per_rank, source.buffer_info()[0], sends.buffer_info()[0]))
    return source, sends


def replica_comm_time(n_ranks: int, n_experts: int, slots_per_rank: int, **figures: float) -> Tuple[float, float]:
    """Returns the seconds of gradient plus weight communication per rank, with static and with adaptive replication. Figures: grad_bytes,
    weight_bytes (of one expert), pci_bandwidth, net_bandwidth."""
    problem = Problem(_abi.moecclReplicaCost_t(), {"n_ranks": n_ranks, "n_experts": n_experts, "slots_per_rank": slots_per_rank, **figures}, [])
    static, adaptive = ctypes.c_double(), ctypes.c_double()
    check(lib.moecclReplicaCommTime(problem.ref, _byref(static), _byref(adaptive)))
    return static.value, adaptive.value


def domain_problem(bandwidth: Any, scale: Any = None, sizes: Any = None, latency_s: Any = None, **options: Any) -> Problem:
    """Describes expert domains (HybridEP). bandwidth: float64 [levels], outermost first; scale: [levels], or sizes for an uneven tree:
    level by level, the number of sub-workers of each worker.

    Options: data_bytes, expert_bytes, pre_expert_s, compression, min_gain. With top_k, for a whole step on this library: top_k,
    n_experts, expert_s, backward_s, gradient_bytes, encode_bandwidth, decode_bandwidth,
    gradient_ratio, forward_only; latency_s: float64 [levels]."""
    figures = Given("bandwidth", bandwidth, _F64)
    if scale is None and sizes is None:
        raise TypeError("give scale or sizes")
    if sizes is not None:
        _uneven(Given("sizes", sizes, _I32), figures.count)
    return Problem(_abi.moecclDomainProblem_t(), {"n_levels": figures.count, **options},
                   [("bandwidth", bandwidth, _F64, None), ("scale", scale, _I32, (figures.count,) if scale is not None else None),
                    ("sizes", sizes, _I32, None), ("latency_s", latency_s, _F64, (figures.count,) if latency_s is not None else None)])


def compute_latency(**shape: float) -> Tuple[float, float]:
    """Returns the seconds of computation before the experts and of the experts themselves (HybridEP Eq. 1 and 2). Shape: throughput,
    tokens, sequence, hidden, n_dense, matrices, ffn, expert_ffn, top_k."""
    problem = Problem(_abi.moecclComputeShape_t(), dict(shape), [])
    before, experts = ctypes.c_double(), ctypes.c_double()
    check(lib.moecclComputeLatency(problem.ref, _byref(before), _byref(experts)))
    return before.value, experts.value


def _uneven(given: Given, levels: int) -> None:
    """Checks that sizes has a number for each worker of each level."""
    values = ctypes.cast(given.address or 0, ctypes.POINTER(_I32))
    at, workers = 0, 1
    for _ in range(levels):
        if at + workers > given.count:
            raise ValueError(f"sizes has {given.count} numbers: level by level there are more workers")
        below = sum(max(0, values[at + n]) for n in range(workers))
        at, workers = at + workers, below
    if at != given.count:
        raise ValueError(f"sizes has {given.count} numbers: {levels} levels of it have {at}")


def domain_proportion(n_workers: int, bandwidth: float, pre_expert_s: float, data_bytes: float, expert_bytes: float) -> Tuple[float, float]:
    """Returns the p that minimizes Eq. 10 on one level of n_workers GPUs, and its latency in seconds."""
    p, seconds = ctypes.c_double(), ctypes.c_double()
    check(lib.moecclDomainProportion(number("n_workers", n_workers), bandwidth, pre_expert_s, data_bytes, expert_bytes, _byref(p),
                                     _byref(seconds)))
    return p.value, seconds.value


def domains(problem: Problem) -> Tuple["array.array[int]", DomainAnswer]:
    """Returns domain[levels], the size of the expert domains at each level, and the answer."""
    answer, domain = _abi.moecclDomainAnswer_t(), made(_I32, problem.struct.n_levels)
    check(lib.moecclSolveDomains(problem.ref, domain.buffer_info()[0], _byref(answer)))
    return domain, record(DomainAnswer, answer)


def _domain(problem: Problem, domain: Any) -> Given:
    return Given("domain", domain, _I32, (problem.struct.n_levels,))


def domain_latency(problem: Problem, domain: Any) -> float:
    """Returns the seconds with domain[levels] (Eq. 2 to 9 summed over levels; with top_k, of a whole step)."""
    seconds = ctypes.c_double()
    check(lib.moecclDomainLatency(problem.ref, _domain(problem, domain).address, _byref(seconds)))
    return seconds.value


def domain_locate(problem: Problem, gpu: int) -> "array.array[int]":
    """Returns location[levels] of a GPU."""
    location = made(_I32, problem.struct.n_levels)
    check(lib.moecclDomainLocate(problem.ref, number("gpu", gpu, INT64), location.buffer_info()[0]))
    return location


def domain_link(problem: Problem, domain: Any, level: int, gpu_m: int, gpu_n: int) -> str:
    """Returns how two GPUs communicate at a level: "none", "all_gather" or "all_to_all" (Algorithm 1)."""
    link = ctypes.c_int()
    check(lib.moecclDomainLink(problem.ref, _domain(problem, domain).address, number("level", level), number("gpu_m", gpu_m, INT64),
                               number("gpu_n", gpu_n, INT64), _byref(link)))
    return ("none", "all_gather", "all_to_all")[link.value]


Curve = Sequence[Tuple[float, float]]
STRATEGIES = {"baseline": _abi.moecclChunkBaseline, "o1": _abi.moecclChunkO1, "o2": _abi.moecclChunkO2, "o3": _abi.moecclChunkO3}


def chunk_problem(inter: Curve = (), intra: Curve = (), copy: Curve = (), o2: Optional[Dict[str, Any]] = None,
                  o3: Optional[Dict[str, Any]] = None, **options: Any) -> Problem:
    """Describes pipeline chunks (MoNTA). inter, intra, copy: points (bytes, efficiency) of each link's curve, ascending; none: 1
    everywhere. o2, o3: other curves for these strategies, {"inter": ..., "intra": ..., "copy": ..., "chunk_us": fixed cost of a chunk}.

    Options: bytes, tensor, expert, inter_bandwidth, intra_bandwidth, copy_bandwidth, min_bytes, max_chunks, start_us, min_gain."""
    problem = Problem(_abi.moecclChunkProblem_t(), options, [])
    sets = [(problem.struct, {"inter": inter, "intra": intra, "copy": copy}), (problem.struct.o2, o2 or {}), (problem.struct.o3, o3 or {})]
    for holder, given in sets:
        if "chunk_us" in given:
            holder.chunk_us = given["chunk_us"]
        for name in ("inter", "intra", "copy"):
            points, curve = given.get(name, ()), getattr(holder, name)
            curve.n_points = len(points)
            set_array(curve, problem.keep, "bytes", [float(p[0]) for p in points], _F64, None)
            set_array(curve, problem.keep, "efficiency", [float(p[1]) for p in points], _F64, None)
    return problem


def chunks(problem: Problem) -> ChunkAnswer:
    """Returns the strategy (a number of STRATEGIES), its number of chunks, and the chunks and times of all four strategies."""
    answer = _abi.moecclChunkAnswer_t()
    check(lib.moecclSolveChunks(problem.ref, _byref(answer)))
    return record(ChunkAnswer, answer)


def chunk_time(problem: Problem, strategy: str, n_chunks: int = 1) -> float:
    """Returns the microseconds of a strategy with n_chunks chunks (1 for "baseline" and "o1")."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: there are {', '.join(STRATEGIES)}")
    us = ctypes.c_double()
    check(lib.moecclChunkTime(problem.ref, STRATEGIES[strategy], number("n_chunks", n_chunks), _byref(us)))
    return us.value


def layouts(max_layouts: int = 16, **problem: Any) -> List[Layout]:
    """Returns at most max_layouts feasible layouts of a model on a cluster, ascending by step time, with long bubbles last.

    Arguments: the fields of moecclLayoutProblem_t: n_gpus, gpus_per_node, gpu_bytes, intra_bandwidth, inter_bandwidth, n_layers, n_heads,
    n_experts, top_k, hidden, sequence, micro_batch, global_batch, dense_parameters, moe_parameters, zero_stage, sequence_parallel,
    recompute (0 none, 1 selective, 2 full), gpu_flops, compute_efficiency, switch_ranks, max_bubble."""
    given, n = Problem(_abi.moecclLayoutProblem_t(), problem, []), ctypes.c_int32()
    room = (_abi.moecclLayout_t * number("max_layouts", max_layouts, (1, 1 << 20)))()
    check(lib.moecclSolveLayout(given.ref, room, max_layouts, _byref(n)))
    return [record(Layout, one) for one in room[:min(n.value, max_layouts)]]


def price_layout(layout: Layout, **problem: Any) -> LayoutCost:
    """Returns the bubble, computation, time and MFU of a step of one of layouts(). The other arguments are those of layouts()."""
    given, cost, one = Problem(_abi.moecclLayoutProblem_t(), problem, []), _abi.moecclLayoutCost_t(), _abi.moecclLayout_t()
    cost.size = ctypes.sizeof(cost)
    for field, *_ in one._fields_:
        setattr(one, field, getattr(layout, field))
    check(lib.moecclPriceLayout(given.ref, _byref(one), _byref(cost)))
    return record(LayoutCost, cost)
