# SPDX-License-Identifier: Apache-2.0
"""Buffer: the calls of DeepEP's V1 interface."""
import torch

from . import _handles, _low_latency, _native, _shrink, _throughput
from ._base import Base, call
from ._check import (check_choices, check_group, check_layout, check_low_latency, check_rows, check_shape, check_tensor, check_x,
                     form_of, require, unpack_bias)
from ._rows import round_up
from .config import Config
from .utils import EventHandle, EventOverlap


class Buffer(Base):
    """Expert-parallel dispatch and combine over MoECCL.

    The attributes are DeepEP's: rank, group_size, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode and
    explicitly_destroy; num_sms is shared by all Buffers. One thread uses a Buffer at a time, and all ranks make the same
    calls in the same order. The tensors of a call are all CPU tensors, or all CUDA tensors of the device that was current when
    the Buffer was made. Bad arguments raise TypeError, ValueError or RuntimeError before
    anything is sent; failures between ranks raise moeccl.Error with MoECCL's error text."""

    num_sms = 20

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
                 allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False,
                 enable_shrink=False, comm=None, *, use_fabric=False):
        """Makes the communicator. The call is collective. group is a torch.distributed process group; without one, comm
        is an mpi4py communicator, which may also be in enable_shrink's place, where DeepEP v1.2.1 has it.

        MoECCL reserves memory and chooses transports itself, so num_nvl_bytes, num_rdma_bytes, num_qps_per_rank,
        allow_nvlink_for_low_latency_mode, allow_mnnvl and use_fabric (by name) have no effect. The communicator ends with the
        Buffer, or at the interpreter's exit; with explicitly_destroy it ends only at destroy(), so that an exit after an
        exception waits for no call.
        enable_shrink: low-latency calls go on without ranks that are gone, and ranks may be masked (low_latency_update_mask_buffer). It
        needs low_latency_mode, and costs a barrier per call."""
        if comm is None and not isinstance(enable_shrink, bool):
            enable_shrink, comm = False, enable_shrink
        require(low_latency_mode or not enable_shrink, ValueError, "enable_shrink is True and low_latency_mode {}: only low-latency calls go on "
                "without ranks; give low_latency_mode=True", low_latency_mode)
        members = check_group(group, comm)
        self.rank, self.group_size, _ = members
        self.group = group if group is not None else comm
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        super().__init__(members, explicitly_destroy,
                         staging_bytes=_native.staging_of(self.group_size) if low_latency_mode else 0)
        self._participants = _shrink.Participants(self._comm, self._stream) if enable_shrink else None
        if enable_shrink:
            self._links.append(self._participants)
        self._two = {}  # low-latency results: two per shape
        self._next_combine = {}

    def destroy(self):
        """Waits for this rank's calls and ends the communicator. The Buffer cannot be used afterwards. This call is not
        collective."""
        self._two, self._next_combine = {}, {}
        super().destroy()

    @staticmethod
    def is_sm90_compiled():
        """Returns True, because rows may be fp8."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms):
        """Sets Buffer.num_sms, which configs use. Calls on CPU tensors use no SMs, and those on CUDA tensors what
        MOECCL_CUDA_SMS says."""
        require(new_num_sms % 2 == 0, ValueError, "new_num_sms is {}: give an even number", new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture():
        """Returns an event that stands for the caller's work so far: that of the current CUDA stream, where CUDA is in use."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        """Returns the bytes that low-latency calls of this shape hold on a rank: the two results, and MoECCL's tables
        and staging with up to 8 choices per token. Low-latency Buffers of many ranks get more staging than others."""
        check_low_latency(num_max_dispatch_tokens_per_rank, hidden, num_experts, num_ranks)
        results = 2 * num_experts * num_max_dispatch_tokens_per_rank * hidden * 2
        return results + _native.query_bytes(_native.Shape(
            2 * hidden, _native.TYPES[torch.bfloat16], min(8, num_experts), num_experts,
            num_max_dispatch_tokens_per_rank, _native.EXPERT_MAJOR), num_ranks)

    def get_local_buffer_tensor(self, dtype, size=None, offset=0, use_rdma_buffer=False):
        """Returns an empty tensor of this type, for callers that set the whole buffer to zero: no call reads what an earlier one left in
        MoECCL's staging. With a size or an offset it raises NotImplementedError, because callers cannot access the staging."""
        if size is None and offset == 0:
            return torch.empty(0, dtype=dtype, device=self._cuda.device if self._cuda is not None else "cpu")
        raise NotImplementedError("get_local_buffer_tensor: MoECCL's staging cannot be seen from outside; for low-latency "
                                  "combines without a copy use get_next_low_latency_combine_buffer")

    @staticmethod
    def get_dispatch_config(num_ranks):
        """Returns a Config for any number of ranks. MoECCL plans by the topology, not by the Config."""
        require(num_ranks >= 1, ValueError, "num_ranks is {}: give 1 or more", num_ranks)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @call(reads=True)
    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False,
                            allocate_on_comm_stream=False):
        """Computes where tokens go. topk_idx: [T, k] int64 (or int32), -1 for no choice. This call is not collective.

        Returns (tokens per rank int32 [ranks], per host int32 [hosts] or None for one host, per expert int32
        [num_experts], is_token_in_rank bool [T, ranks], event)."""
        check_tensor("topk_idx", topk_idx)
        check_choices(topk_idx, num_experts, self.group_size)
        n, ranks, device = topk_idx.size(0), self.group_size, topk_idx.device
        in_rank = torch.zeros((n, ranks), dtype=torch.bool, device=device)
        per_rank = torch.zeros(ranks, dtype=torch.int32, device=device)
        per_expert = torch.zeros(num_experts, dtype=torch.int32, device=device)
        per_host = torch.zeros(self._n_hosts, dtype=torch.int32, device=device) if self._n_hosts > 1 else None

        def work():
            index = topk_idx.long() + 1  # 0: no choice
            marked = torch.zeros((n, ranks + 1), dtype=torch.bool, device=device)
            marked.scatter_(1, (index + num_experts // ranks - 1) // (num_experts // ranks), True)
            in_rank.copy_(marked[:, 1:])
            per_rank.copy_(in_rank.sum(dim=0))
            per_expert.copy_(torch.bincount(index.reshape(-1), minlength=num_experts + 1)[1:])
            if per_host is not None:
                hosts = torch.tensor(self._host_of, device=device)
                for host in range(self._n_hosts):
                    per_host[host] = in_rank[:, hosts == host].any(dim=1).sum()

        event = self._run(work, previous_event, async_finish)
        return per_rank, per_host, per_expert, in_rank, event

    @call(reads=True)
    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
                 num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
                 config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        """Sends each token once to each rank that it goes to. The call is collective.

        x: [T, hidden] of bfloat16, float16, float32 or float64, or (rows [T, hidden] of fp8, scales [T, n]).
        num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: the results of get_dispatch_layout. topk_idx [T, k]
        and topk_weights float32 [T, k]: both or neither. handle: the handle of an earlier dispatch, on this Buffer or on
        another of the same ranks, whose routing is used again; no other argument then describes the routing.
        num_worst_tokens: the number of rows in the results, however many arrive; with async_finish the call then waits for
        no other rank.

        Returns (rows in the order of source rank and token, in the form of x; recv_topk_idx with this rank's expert
        numbers and -1 for others; recv_topk_weights, with 0 for others; tokens for each local expert, rounded up to
        expert_alignment, or [] with num_worst_tokens; handle; event). With a handle, all but the first and last are
        None."""
        rows = check_rows(x, topk_idx, topk_weights)
        if handle is not None:
            require(topk_idx is None and topk_weights is None, ValueError,
                    "topk_idx and topk_weights belong to the dispatch that made the handle: leave them out")
            return self._dispatch_again(rows, self._state(handle, "dispatch"), previous_event, async_finish)
        check_layout(rows, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, self.group_size)
        require(expert_alignment >= 1, ValueError, "expert_alignment is {}: give 1 or more", expert_alignment)
        require(num_worst_tokens >= 0, ValueError, "num_worst_tokens is {}: give 0 or more", num_worst_tokens)
        if topk_idx is not None:
            check_choices(topk_idx, num_tokens_per_expert.numel(), self.group_size)
        state = _throughput.State(is_token_in_rank)
        n_local = num_tokens_per_expert.numel() // self.group_size
        prefix = torch.empty((self.group_size, self.group_size), dtype=torch.int32, device=rows.x.device)
        per_expert = []

        def prepare():
            matrix, counts = _throughput.agree(self._comm, rows, state, num_tokens_per_expert, num_worst_tokens)
            prefix.copy_(matrix.cumsum(0))
            per_expert.extend(round_up(c, expert_alignment) for c in counts)
            rows.routing(self._comm, state)

        def move():
            rows.move(self._comm, state, outputs, n_local)
            _throughput.source_rows(self._comm, rows, state, source)

        def both():
            prepare()
            move()

        if not num_worst_tokens:
            self._run(prepare, previous_event, False)
        state.n_out = num_worst_tokens or state.n_rows
        outputs = rows.outputs(self._memory, state.n_out)
        source = torch.full((state.n_out, ), -1, dtype=torch.int32, device=rows.x.device)
        event = self._run(both if num_worst_tokens else move, previous_event, async_finish)
        received, scales, idx, weights = outputs
        made = self._handle(state, prefix, source, num_tokens_per_rank)
        return (received if scales is None else (received, scales), idx, weights,
                [] if num_worst_tokens else per_expert, made, event)

    def _dispatch_again(self, rows, state, previous_event, async_finish):
        require(rows.x.size(0) == state.n_tokens, ValueError,
                "x has {} rows: the handle's dispatch had {}, give as many", rows.x.size(0), state.n_tokens)
        outputs = rows.outputs(self._memory, state.n_out)
        event = self._run(lambda: rows.move(self._comm, state, outputs, 0), previous_event, async_finish)
        received, scales, _, _ = outputs
        return (received if scales is None else (received, scales)), None, None, None, None, event

    def _handle(self, state, prefix, source, num_tokens_per_rank):
        """Returns V1's tuple. On one host it is (rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix,
        recv_src_idx, is_token_in_rank, send_head). On several hosts it has ten items, of which the fourth from the end is
        recv_gbl_rank_prefix_sum. Items that only V1's kernels read are None."""
        _handles.keep(source, state)
        if self._n_hosts > 1:
            return state.is_token_in_rank, None, None, None, None, None, prefix[:, self.rank], source, None, None
        return prefix, num_tokens_per_rank.view(-1, 1), None, source, state.is_token_in_rank, None

    def _state(self, handle, call, kind=_throughput.State):
        return _handles.state_of(handle, kind, self.group_size, call, "dispatch" if kind is _throughput.State else "low_latency_dispatch")

    @call(reads=False)
    def combine(self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
                allocate_on_comm_stream=False):
        """Sums each token's rows, without weights. The call is collective.

        x: [rows of the handle's dispatch, hidden] of bfloat16, float16, float32 or float64; hidden and type may differ
        from dispatch's. topk_weights: float32 [rows, k] on all ranks, or None on all ranks. bias: None, one tensor
        [T, hidden] or a tuple of two, each may be None; they are added to the sums.

        Returns ([T, hidden], zeros for a token that went nowhere; the sums of topk_weights float32 [T, k] or None;
        event)."""
        state = self._state(handle, "combine")
        check_x(x, combine=True)
        biases = unpack_bias(bias, x, state.n_tokens)
        require(x.size(0) in (state.n_rows, state.n_out), ValueError,
                "x has {} rows: the handle's dispatch brought {}, give as many", x.size(0), state.n_rows)
        out = self._memory.empty((state.n_tokens, x.size(1)), x.dtype, x.device)
        out_weights = None
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights)
            require(topk_weights.dtype == torch.float32 and topk_weights.shape[:1] == x.shape[:1] and
                    topk_weights.dim() == 2, ValueError, "topk_weights is {} {}: give float32 [{}, k]",
                    topk_weights.dtype, list(topk_weights.shape), x.size(0))
            out_weights = topk_weights.new_empty((state.n_tokens, topk_weights.size(1)))

        def work():
            _throughput.combine_rows(self._comm, state, x, out)
            _throughput.add_biases(biases, out)
            if topk_weights is not None:
                out_weights.copy_(_throughput.combine_weights(self._comm, state, topk_weights))

        return out, out_weights, self._run(work, previous_event, async_finish)

    def internode_dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
                           is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None,
                           expert_alignment=1, config=None, previous_event=None, async_finish=False,
                           allocate_on_comm_stream=False, *, num_worst_tokens=0):
        """Calls dispatch: MoECCL plans for the hosts that are present."""
        return self.dispatch(x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
                             num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens, config,
                             previous_event, async_finish, allocate_on_comm_stream)

    def internode_combine(self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None,
                          async_finish=False, allocate_on_comm_stream=False):
        """Calls combine: MoECCL plans for the hosts that are present."""
        return self.combine(x, handle, topk_weights, bias, config, previous_event, async_finish,
                            allocate_on_comm_stream)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank, hidden, num_experts):
        """Frees the memory that the Buffer keeps for results; MoECCL does not need it to be zero. With enable_shrink the call is collective,
        and finds ranks that are gone."""
        check_low_latency(num_max_dispatch_tokens_per_rank, hidden, num_experts, self.group_size)
        (self._cuda or self._stream).finish()
        if self._participants is not None:
            self._comm.raw  # raises if the Buffer was destroyed
            self._stream.run(lambda: self._participants.run(lambda comm: None))
        self._memory.drop()
        self._two, self._next_combine = {}, {}

    @call(reads=False)
    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                             cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True,
                             round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False, *, x_global_scale=None,
                             use_nvfp4=False, use_ue8m0_for_sf=False):
        """Sends each token to its experts. The call is collective.

        x: bfloat16 [T, hidden], T at most num_max_dispatch_tokens_per_rank; topk_idx: int64 (or int32) [T, k], -1
        for no choice. A token that names an expert twice goes there once and counts once; low_latency_combine adds up the
        weights. cumulative_local_expert_recv_stats: int32 [local experts], to which the counts are added.
        use_nvfp4, x_global_scale, use_ue8m0_for_sf (by name): those of DeepEP's branch hybrid-ep. With use_nvfp4, and use_fp8=False, rows are
        NVFP4; x_global_scale, float32 of one element, is what scales are multiplied by, the same on all ranks. use_ue8m0_for_sf is refused.

        Returns (rows [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden] of bfloat16, or with use_fp8
        (rows of fp8, scales), or with use_nvfp4 (rows uint8 [ranks * num_max_dispatch_tokens_per_rank, hidden / 2, local experts], scales
        float8_e4m3fn [32, 4, tiles of 128 rows, 4, hidden / 64, local experts], where row t's scale k is at [t % 32, t % 128 // 32, t // 128,
        k % 4, k // 4]); rows of each expert int32 [local experts]; handle; event; hook). Each expert's rows are
        in the order of source rank and token; handle[0][expert, row] is the token, handle[1][expert, rank] is
        begin << 32 | count. Calls alternate between two buffers for the rows, so a call overwrites the results of the
        call before the previous one. With return_recv_hook the results are there after hook()."""
        self._low_latency("low_latency_dispatch", async_finish, return_recv_hook)
        most = num_max_dispatch_tokens_per_rank
        form = form_of(use_fp8, round_scale, use_ue8m0, use_nvfp4, use_ue8m0_for_sf, x_global_scale)
        check_low_latency(most, x.size(1) if x.dim() == 2 else 0, num_experts, self.group_size, x, topk_idx, form,
                          cumulative_local_expert_recv_stats)
        if dispatch_wait_recv_cost_stats is not None:
            raise NotImplementedError("dispatch_wait_recv_cost_stats: MoECCL does not measure waits by source; give None "
                                      "and see MOECCL_PROFILE's and the flight recorder's times")
        check_choices(topk_idx, num_experts, self.group_size)
        if return_recv_hook:
            x = x.detach().clone()  # the caller may write to it before hook()
        state = _low_latency.State(topk_idx.to(torch.int32, copy=True).contiguous(), most, x.size(1), num_experts, self.group_size)
        out = _low_latency.Outputs(state, self.group_size, *self._next_buffers(state, form))

        def work():
            self._with_participants(lambda comm: _low_latency.dispatch(comm, state, x.contiguous(), out, form), out.rows)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(out.count)

        event = self._run(work, None, async_finish or return_recv_hook)
        state.event = event.event
        # V1's recv_src_info, recv_layout_range, num_max_dispatch_tokens_per_rank, hidden and num_experts.
        handle = out.source, out.range, most, x.size(1), num_experts
        _handles.keep(out.source, state)
        return ((out.rows, out.scales) if out.scales is not None else out.rows, out.count, handle, *self._later(event, return_recv_hook))

    @call(reads=False)
    def low_latency_combine(self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False,
                            async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None):
        """Sums each token's rows, with weights. The call is collective.

        x: bfloat16, with the shape of low_latency_dispatch's rows; with zero_copy the tensor from
        get_next_low_latency_combine_buffer is used instead. topk_idx: dispatch's; a choice that is -1 only here has
        weight 0. topk_weights: float32 [T, k]. out: bfloat16 [T, hidden] for the result, or None. use_logfmt has no
        effect: rows travel as bfloat16.

        Returns ([T, hidden] bfloat16, event, hook)."""
        self._low_latency("low_latency_combine", async_finish, return_recv_hook)
        state = self._state(handle, "low_latency_combine", _low_latency.State)
        if combine_wait_recv_cost_stats is not None:
            raise NotImplementedError("combine_wait_recv_cost_stats: MoECCL does not measure waits by source; give None")
        if zero_copy:
            x = self.get_next_low_latency_combine_buffer(handle)
        weights = _low_latency.check_combine(state, x, topk_idx, topk_weights, out)
        if zero_copy:
            self._next_combine[tuple(x.shape), x.device].reverse()
        if return_recv_hook:  # the caller may write to x and topk_weights before hook()
            if state.event is not None:
                state.event.current_stream_wait()
            x = _low_latency.pack(state, x.detach(), x.new_empty((sum(state.counts), state.hidden)))
            weights = weights.clone()
        if out is None:
            out = self._memory.empty((state.index.size(0), state.hidden), torch.bfloat16, x.device)

        def work():
            self._with_participants(lambda comm: _low_latency.combine(comm, state, x, weights, out), out, state.missing)

        event = self._run(work, None, async_finish or return_recv_hook)
        return (out, *self._later(event, return_recv_hook))

    def _with_participants(self, work, out, missing=frozenset):
        """Calls work(communicator) with that of the ranks that take part. out: what it fills. missing: see Participants.run."""
        if self._participants is None:
            work(self._comm)
            return

        def until_done(comm):
            work(comm)
            _native.ready(out)
            comm.finish()  # a kernel that finds a rank gone ends as others do: the stream has no error, only the communicator

        self._participants.run(until_done, missing)

    def low_latency_update_mask_buffer(self, rank_to_mask, mask=False):
        """Masks a rank in later low-latency calls, or with mask=False takes it back. It needs enable_shrink. The call is not collective, but
        before the next low-latency call all other ranks that are not masked mask the same ranks.

        A masked rank gets no rows and brings none; its experts add nothing to sums. It makes no low-latency calls, or only with all ranks
        masked that do not mask it. A rank that is gone is masked again by the next dispatch. If calls have failed because a rank did not come,
        the first call with it raises a moeccl.Error on all ranks, and the next one works: low_latency_clean_mask_buffer avoids that."""
        participants = self._masks("low_latency_update_mask_buffer")
        require(0 <= rank_to_mask < self.group_size and rank_to_mask != self.rank, ValueError,
                "rank_to_mask is {}: give another rank, from 0 to {}", rank_to_mask, self.group_size - 1)
        participants.mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status):
        """Fills mask_status, int32 [ranks], with 1 for ranks that are masked or were found to be gone, and 0 for others. It needs
        enable_shrink and waits for the calls made so far."""
        participants = self._masks("low_latency_query_mask_buffer")
        check_shape("mask_status", mask_status, (torch.int32, ), (self.group_size, ), f"int32 [{self.group_size}]")
        mask_status.copy_(torch.tensor([int(r in participants.masked) for r in range(self.group_size)], dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self):
        """Takes all ranks back. It needs enable_shrink. The call is not collective, but before the next low-latency call all ranks make it.
        Ranks that are gone are masked again by the next dispatch; a combine leaves out those that its handle's dispatch left out."""
        self._masks("low_latency_clean_mask_buffer").unmask_all()

    def _masks(self, call):
        require(self.enable_shrink, RuntimeError, "{}: make the Buffer with enable_shrink=True", call)
        self._comm.raw  # raises if the Buffer was destroyed
        self._stream.drain()
        return self._participants

    def get_next_low_latency_combine_buffer(self, handle):
        """Returns the bfloat16 tensor, with the shape of low_latency_dispatch's rows, that the next low_latency_combine
        with zero_copy reads. There are two, which take turns."""
        state = self._state(handle, "get_next_low_latency_combine_buffer", _low_latency.State)
        shape, device = (state.n_local, state.room, state.hidden), state.index.device
        pair = self._next_combine.setdefault((shape, device), [None, None])
        if pair[0] is None:
            with torch.inference_mode(False):  # so that callers may write to it in whatever mode
                pair[0] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return pair[0]

    def _next_buffers(self, state, form):
        pair = self._two.setdefault((state.n_local, state.room, state.hidden, form.key, state.index.device), [])
        if len(pair) < 2:
            pair.append(_low_latency.buffers(state, form))
            return pair[-1]
        pair.reverse()
        return pair[1]

    def _low_latency(self, call, async_finish, return_recv_hook):
        require(self.low_latency_mode, RuntimeError, "{}: make the Buffer with low_latency_mode=True", call)
        require(not (async_finish and return_recv_hook), ValueError,
                "{}: give async_finish or return_recv_hook, not both", call)

    @staticmethod
    def _later(event, return_recv_hook):
        """Returns (event, hook) of a low-latency call."""
        return (EventOverlap(None), event.event.current_stream_wait) if return_recv_hook else (event, None)
