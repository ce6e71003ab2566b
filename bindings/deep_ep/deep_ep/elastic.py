# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer: the calls of DeepEP's V2 interface."""
import torch

from . import _elastic, _handles, _sums, _throughput
from ._base import Base, call, event_of, hosts_of, ranks_per_host
from ._check import (check_choices, check_counts, check_distinct, check_group, check_same, check_shape, check_x, require,
                     unpack_bias)
from ._engram import Engram
from ._pipeline import Pipeline
from ._rows import round_up
from ._sessions import Sessions
from .handle import EPHandle
from .utils import EventHandle

_ALIGNMENT = 2 << 20  # of V2's buffer sizes
_MOST_TOPK = 32  # what V2's sizes count with where the caller does not tell num_topk
_N_SMS = 20  # V1's default
_SAME = dict.fromkeys(("deterministic", "allow_hybrid_mode", "allow_multiple_reduction"), bool)  # of the constructor's arguments


def _physical_domains(host_of):
    """Returns (hosts, ranks of each), or (ranks, 1) if hosts do not have equal numbers of consecutive ranks."""
    each = ranks_per_host(host_of) or 1
    return len(host_of) // each, each


def _logical_domains(physical, allow_hybrid_mode):
    return physical if allow_hybrid_mode else (1, physical[0] * physical[1])


def get_physical_domain_size(group):
    """Returns (number of hosts, ranks of each host). The call is collective over the torch.distributed process group. If hosts do not
    have equal numbers of consecutive ranks, each rank counts as a host."""
    return _physical_domains(hosts_of(check_group(group, None)[2]))


def get_logical_domain_size(group, allow_hybrid_mode=True):
    """Returns (scale-out ranks, scale-up ranks): the physical sizes, or without hybrid mode (1, all ranks). The call is collective."""
    return _logical_domains(get_physical_domain_size(group), allow_hybrid_mode)


class ElasticBuffer(Sessions, Pipeline, Engram, Base):
    """Expert-parallel dispatch and combine over MoECCL, and V2's experimental calls: all-gathers in sessions (agrs_..., all_gather),
    tensors between neighbours (pp_...) and a distributed table of rows (engram_...).

    The attributes are DeepEP's: group, rank_idx, num_ranks, allow_hybrid_mode, allow_multiple_reduction,
    prefer_overlap_with_compute, deterministic, num_bytes, num_cpu_bytes, num_max_tokens_per_rank, num_allocated_qps,
    explicitly_destroy, num_scaleout_ranks, num_scaleup_ranks, scaleout_rank_idx, scaleup_rank_idx, num_rdma_ranks,
    num_nvlink_ranks. One thread uses an ElasticBuffer at a time, and all ranks make the same calls in the same order. The tensors of
    a call are all CPU tensors, or all CUDA tensors of the device that was current when the ElasticBuffer was made. Bad arguments
    raise TypeError, ValueError or RuntimeError; failures between ranks raise moeccl.Error with MoECCL's error text."""

    def __init__(self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
                 use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
                 prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
                 num_gpu_timeout_secs=100, explicitly_destroy=False):
        """Makes the communicator. The call is collective. group: a torch.distributed process group of any backend.

        Give num_bytes, or num_max_tokens_per_rank and hidden, from which num_bytes is computed. dispatch and combine take what
        memory they need; num_bytes, of which num_cpu_bytes are for engram_write, limits what the pp_, agrs_ and engram_ calls
        reserve. num_max_tokens_per_rank is also the default of dispatch.
        deterministic: sums do not depend on MoECCL's plan either. dispatch always has the same order of rows.
        allow_hybrid_mode, allow_multiple_reduction: with both, and ranks on several hosts, combine forms sums on the way and rounds
        them; otherwise it rounds each sum once, or with do_expand also the sum over a rank's experts. Without
        allow_multiple_reduction it rounds only once with do_expand, too.
        num_cpu_timeout_secs: how long a call waits for other ranks before it raises moeccl.Error.
        explicitly_destroy: the communicator ends only at destroy(), and not with the ElasticBuffer.
        prefer_overlap_with_compute, sl_idx, num_allocated_qps and num_gpu_timeout_secs have no effect, because MoECCL chooses its
        transports and SMs itself."""
        members = check_group(group, None)
        self.group, self.rank_idx, self.num_ranks = group, members[0], members[1]
        require(num_cpu_bytes == 0 or num_bytes is not None, ValueError, "num_cpu_bytes is {} and num_bytes is None: give num_bytes, "
                "which includes num_cpu_bytes", num_cpu_bytes)
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                                                  allow_hybrid_mode, allow_multiple_reduction)
        for name, value in (("num_bytes", num_bytes), ("num_cpu_bytes", num_cpu_bytes)):
            require(value >= 0 and value % _ALIGNMENT == 0, ValueError, "{} is {}: give a multiple of {}, as the size hints do", name,
                    value, _ALIGNMENT)
        require(0 < num_bytes and num_cpu_bytes <= num_bytes, ValueError, "num_bytes is {} and num_cpu_bytes {}: give 1 or more, and no "
                "less than num_cpu_bytes", num_bytes, num_cpu_bytes)
        require(num_cpu_timeout_secs > 0, ValueError, "num_cpu_timeout_secs is {}: give 1 or more", num_cpu_timeout_secs)
        self.num_bytes, self.num_cpu_bytes, self.num_max_tokens_per_rank = num_bytes, num_cpu_bytes, num_max_tokens_per_rank
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)  # V2's defaults
        self._gather, self._timeout_ms = members[2], 1000 * num_cpu_timeout_secs
        check_same("ElasticBuffer", _SAME, self._gather([bool(getattr(self, name)) for name in _SAME]))
        super().__init__(members, explicitly_destroy, timeout_ms=self._timeout_ms, deterministic=int(bool(deterministic)))
        self._alone = _sums.Alone(self._stream)
        self._links.append(self._alone)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)

    @staticmethod
    def _aligned(n_bytes):
        return round_up(n_bytes, _ALIGNMENT)

    @classmethod
    def get_buffer_size_hint(cls, group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False,
                             allow_hybrid_mode=True, allow_multiple_reduction=True):
        """Returns a num_bytes for dispatch and combine of this shape: the bytes of the most rows that a dispatch brings or that return
        in combine. The call is not collective."""
        for name, value in (("num_max_tokens_per_rank", num_max_tokens_per_rank), ("hidden", hidden)):
            require(value > 0, ValueError, "{} is {}: give 1 or more, or num_bytes", name, value)
        top_k, n_ranks = num_topk or _MOST_TOPK, group.size()
        scales = -(-hidden // 32) * 4 if use_fp8_dispatch else 0
        brought = n_ranks * (hidden * (1 if use_fp8_dispatch else 2) + scales + 12 * top_k)
        back = (min(n_ranks, top_k) if allow_multiple_reduction else top_k) * (2 * hidden + 4 * top_k)
        return cls._aligned(num_max_tokens_per_rank * max(brought, back))

    def get_physical_domain_size(self):
        """Returns (number of hosts, ranks of each host). If hosts do not have equal numbers of consecutive ranks, each rank counts as a
        host."""
        return _physical_domains(self._host_of)

    def get_logical_domain_size(self):
        """Returns (scale-out ranks, scale-up ranks): the physical sizes, or without allow_hybrid_mode (1, all ranks)."""
        return _logical_domains(self.get_physical_domain_size(), self.allow_hybrid_mode)

    @staticmethod
    def capture():
        """Returns an EventHandle for the caller's work so far: that of the current CUDA stream, where CUDA is in use."""
        return EventHandle()

    def get_theoretical_num_sms(self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=200,
                                sm_write_gbs=50):
        """Returns a number to pass as num_sms, for callers that need one: it has no effect. MOECCL_CUDA_SMS limits the SMs of calls on
        CUDA tensors."""
        return _N_SMS

    def get_theoretical_num_qps(self, num_sms):
        """Returns a number to pass as num_qps, at most num_allocated_qps: it has no effect."""
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        """Returns when this rank's calls, and the work of the caller's CUDA stream, have finished and all ranks have called it. The
        arguments have no effect, because the host always waits."""
        if self._cuda is not None:
            with self._cuda.ordered(None, False, False, ()):  # after the caller's work
                pass
            self._cuda.finish()
        self._comm.raw  # raises if the ElasticBuffer was destroyed
        self._stream.run(self._comm.barrier)

    @call(reads=True, later=("async_with_compute_stream", ))
    def dispatch(self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
                 num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
                 previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None,
                 do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
                 use_tma_aligned_col_major_sf=False):
        """Sends each token to the ranks of its experts. The call is collective.

        x: [T, hidden] of bfloat16, float16, float32 or float64, or (rows [T, hidden] of fp8, scales [T, n]); T is at most
        num_max_tokens_per_rank, which is the same on all ranks.
        topk_idx: int64 (or int32) [T, k], -1 for no choice. topk_weights: float32 [T, k], or None on all ranks.
        cumulative_local_expert_recv_stats: int32 [local experts], to which the rows of each expert are added.
        expert_alignment: what the counts of local experts are rounded up to, and with do_expand their rows are padded to.
        previous_event: what the call waits for instead of the caller's CUDA stream. previous_event_before_epilogue: what it waits
        for when the rows have arrived, before it places them by expert and fills the other results; other ranks do not wait for it.
        handle: that of an earlier dispatch, whose routing is used again; then topk_idx is None, and topk_weights may be given.
        do_handle_copy: whether the handle has a copy of topk_idx, or topk_idx itself.
        do_cpu_sync: True (the default without a handle) waits for the other ranks' counts, and results have as many rows as
        arrive. False returns results of the worst case: num_max_tokens_per_rank rows of each rank, or with do_expand one for each
        choice that may be of a local expert; a token's experts must then be distinct.
        do_expand: a row for each pair of a token and a local expert, in groups by expert, which begin at multiples of
        expert_alignment; otherwise a row for each token.
        Rows are in the order of source rank and token, within each group with do_expand; all others are zeros, with -1 for choices,
        so do_zero_padding has no effect. num_sms, num_qps and allocate_on_comm_stream have none either.
        use_tma_aligned_col_major_sf: the scales lie column by column, each of a multiple of four.

        Returns (rows, or (rows, scales); local expert numbers [rows, k] with -1 for other experts, None with do_expand; weights
        [rows, k] with 0 for other experts, [rows] with do_expand, or None; EPHandle, the given one if there is one; event)."""
        n, first, epilogue = check_x(x), handle is None, event_of(previous_event_before_epilogue)
        require(do_expand or not do_zero_padding, ValueError, "do_zero_padding is {} and do_expand is {}: only rows of do_expand are "
                "padded", do_zero_padding, do_expand)
        if first:
            route = self._new_route(n, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand,
                                    cumulative_local_expert_recv_stats)
        else:
            route = self._known_route(n, handle, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand,
                                      cumulative_local_expert_recv_stats, do_cpu_sync)
        if topk_weights is not None:
            check_shape("topk_weights", topk_weights, (torch.float32, ), (n, route.top_k), f"float32 [{n}, {route.top_k}], as topk_idx")
        rows = _throughput.Rows(x, topk_idx, topk_weights)
        synchronous = first and (do_cpu_sync is None or do_cpu_sync)
        if first and do_expand and not synchronous:
            check_distinct(topk_idx)
        if first:
            handle = self._handle(route, topk_idx.clone() if do_handle_copy else topk_idx, num_sms)

        def prepare():
            _elastic.agree(self._comm, rows, route, topk_idx)
            _elastic.describe_counts(route, self.num_scaleup_ranks, handle)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            rows.routing(self._comm, route)

        def move():
            _elastic.move(self._comm, rows, route, out, epilogue)
            if first:
                _elastic.describe(self._comm, rows, route, self.num_scaleup_ranks, handle)

        def both():
            prepare()
            move()

        if synchronous:
            self._run(prepare, previous_event, False)
            handle.num_recv_tokens, handle.num_expanded_tokens = route.n_rows, route.n_expanded()
            handle.num_recv_tokens_per_expert_list = [round_up(c, route.alignment) for c in route.expert_counts]
        if first:
            handle.recv_src_metadata = torch.empty((handle.num_recv_tokens, 2 + route.top_k), dtype=torch.int32,
                                                   device=rows.x.device)
        out = _elastic.Outputs(rows, route, self._memory, handle.num_expanded_tokens if do_expand else handle.num_recv_tokens,
                               do_expand, use_tma_aligned_col_major_sf, handle.topk_idx.dtype)
        event = self._run(both if first and not synchronous else move, previous_event, async_with_compute_stream)
        return out.x if out.scales is None else (out.x, out.scales), out.idx, out.weights, handle, event

    def _new_route(self, n, topk_idx, num_experts, most, alignment, do_expand, stats):
        require(topk_idx is not None and num_experts is not None, ValueError, "topk_idx is {} and num_experts {}: give both, or a "
                "handle", "None" if topk_idx is None else "given", num_experts)
        check_shape("topk_idx", topk_idx, (torch.int64, torch.int32), (n, None), f"int64 [{n}, k], a row for each of x's")
        require(topk_idx.size(1) > 0, ValueError, "topk_idx has {} columns: give 1 or more", topk_idx.size(1))
        check_choices(topk_idx, num_experts, self.num_ranks)
        most = self.num_max_tokens_per_rank if most is None else most
        require(0 < most and most * self.num_ranks < 2**31, ValueError, "num_max_tokens_per_rank is {}: give it here or to the "
                "ElasticBuffer, 1 or more and less than 2^31 for all ranks together", most)
        alignment = 1 if alignment is None else alignment
        require(alignment >= 1, ValueError, "expert_alignment is {}: give 1 or more", alignment)
        if stats is not None:
            check_counts("cumulative_local_expert_recv_stats", stats, num_experts // self.num_ranks)
        return _elastic.Route(topk_idx, num_experts, self._comm, most, do_expand, alignment, self.num_scaleout_ranks == 1)

    def _known_route(self, n, handle, topk_idx, num_experts, most, alignment, do_expand, stats, do_cpu_sync):
        """Checks a dispatch with a handle and returns what is behind it."""
        route = self._state(handle, "dispatch")
        require(n == route.n_tokens, ValueError, "x has {} rows: the handle's dispatch had {}, give as many", n, route.n_tokens)
        for name, value in (("topk_idx", topk_idx), ("cumulative_local_expert_recv_stats", stats)):
            require(value is None, ValueError, "{} belongs to the dispatch that made the handle: leave it out", name)
        require(not do_cpu_sync, ValueError, "do_cpu_sync is {}: a dispatch with a handle has the counts already, leave it out",
                do_cpu_sync)
        for name, value, known in (("num_experts", num_experts, route.n_experts), ("num_max_tokens_per_rank", most, route.most),
                                   ("expert_alignment", alignment, route.alignment)):
            require(value is None or value == known, ValueError, "{} is {}: the handle's dispatch had {}, leave it out", name, value,
                    known)
        require(route.expand or not do_expand, ValueError, "do_expand is {}: the handle's dispatch was made without, which does not "
                "place rows by expert", do_expand)
        return route

    def _handle(self, route, topk_idx, num_sms):
        """Makes the EPHandle of a route, with the sizes of the worst case and tensors that are still to be filled."""
        device = topk_idx.device
        numbers = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)  # noqa: E731
        slots = torch.where(route.last, self.rank_idx * route.most + route.before, -1).int()
        _handles.keep(slots, route)
        return EPHandle(route.expand, route.n_experts, route.alignment, route.most, num_sms or _N_SMS, topk_idx, route.worst_rows(),
                        route.worst_expanded(), [], numbers(self.num_scaleup_ranks), numbers(route.n_local), numbers(route.n_local),
                        None, slots)

    def _state(self, handle, call):
        require(isinstance(handle, EPHandle), TypeError, "{}: handle is a {}: give the EPHandle that dispatch returned", call,
                type(handle).__name__)
        return _handles.state_of((handle.dst_buffer_slot_idx, ), _elastic.Route, self.num_ranks, call, "dispatch")

    @call(reads=False, later=("async_with_compute_stream", ))
    def combine(self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
                previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False):
        """Returns rows to their tokens' ranks and sums each token's rows, without weights. The call is collective.

        x: [rows of the handle's dispatch, hidden] of bfloat16, float16, float32 or float64; hidden and type may differ from
        dispatch's. Rows that no token fills are not read.
        topk_weights: float32 [rows, k], or [rows] if the dispatch had do_expand. bias: None, one tensor [T, hidden] or a tuple of two,
        each may be None. Both are given on all ranks or on none.
        previous_event: as in dispatch. previous_event_before_epilogue: what the call waits for when the rows have returned, before it
        reads the biases; other ranks do not wait for it.
        num_sms, num_qps and allocate_on_comm_stream have no effect.

        A sum is formed in fp32 (fp64 for fp64): the biases, then the token's rows in the order of its choices, those of a rank at
        the place of its last one; then it is rounded. With do_expand and allow_multiple_reduction, the rows of a rank's experts
        are summed and rounded first. The constructor tells when MoECCL forms sums on the way.

        Returns ([T, hidden], zeros for a token without experts and biases; float32 [T, k], the weight of each choice in the row of
        its rank, 0 without a choice, or None; event)."""
        route, epilogue = self._state(handle, "combine"), event_of(previous_event_before_epilogue)
        check_x(x, combine=True)
        biases = unpack_bias(bias, x, route.n_tokens)
        self._check_returned(route, handle, x)
        out = self._memory.empty((route.n_tokens, x.size(1)), x.dtype, x.device)
        out_weights = None
        if topk_weights is not None:
            shape = (x.size(0), ) if route.expand else (x.size(0), route.top_k)
            check_shape("topk_weights", topk_weights, (torch.float32, ), shape, f"float32 {list(shape)}, a row for each of x's")
            out_weights = topk_weights.new_empty((route.n_tokens, route.top_k))
        each_choice = route.expand and not self.allow_multiple_reduction
        planned = self.num_scaleout_ranks > 1 and self.allow_multiple_reduction

        def work():
            summed = planned or not biases and not each_choice and route.sums_in_order(self._comm, x)  # by MoECCL
            rows = _elastic.rows_to_send(self._comm, route, x, each_choice, self._alone)
            if summed:
                _throughput.combine_rows(self._comm, route, rows, out)
            else:
                rows = _elastic.return_rows(self._comm, route, rows, each_choice, len(biases))
            if topk_weights is not None:
                _elastic.combine_weights(self._comm, route, topk_weights, out_weights)
            if epilogue is not None:
                epilogue.current_stream_wait()
            if planned:
                _throughput.add_biases(biases, out)
            elif not summed:
                route.token_sums(each_choice).run(self._alone, rows, biases, out)

        return out, out_weights, self._run(work, previous_event, async_with_compute_stream)

    def destroy(self):
        """Waits for this rank's calls, ends the communicator, and lets go of the table and of the memory of sessions; an open session
        ends. The object cannot be used afterwards. This call is not collective."""
        super().destroy()
        self._session = self._memory_of_sessions = self._storage = self._scales = None

    def _check_returned(self, route, handle, x):
        """Checks that x has the rows that combine reads."""
        whole = handle.num_expanded_tokens if route.expand else handle.num_recv_tokens
        if x.size(0) == whole:
            return
        self._stream.drain()  # a dispatch without do_cpu_sync may not have counted its rows yet
        least = (route.expert_ends() or [0])[-1] if route.expand else route.n_rows
        require(least <= x.size(0) <= whole, ValueError, "x has {} rows: the handle's dispatch brought {} to {}, give as many",
                x.size(0), least, whole)

    def _submit(self, work):
        """Calls work() on this object's thread and returns its event."""
        self._comm.raw  # raises if the ElasticBuffer was destroyed
        return self._stream.run(work, None, True)
