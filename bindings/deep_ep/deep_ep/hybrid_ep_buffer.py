# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer: the calls of DeepEP's branch hybrid-ep, backend "hybridep" of Megatron-LM's flex dispatcher."""
import os
import warnings

import torch

from . import _handles, _hybrid
from ._base import Base, call, ranks_per_host
from ._check import check_group, check_shape, require
from ._hybrid_check import (Given, check_combined, check_hidden, check_padding, check_routing, check_same,
                            check_same_padding, from_choices)
from ._rows import round_up
from .hybrid_config import APP_TOKEN_DATA_TYPE, Configurer

# Arguments whose tensors may lie on host or device.
_ELSEWHERE = ("handle", "num_permuted_tokens", "num_dispatched_tokens", "num_dispatched_tokens_tensor")


def indices_to_map(topk_idx, topk_weights, num_of_tokens, num_of_experts):
    """Returns (routing_map, bool [num_of_tokens, num_of_experts]; probs, float32 of that shape, or None), as dispatch takes them.

    topk_idx: int64 (or int32) [num_of_tokens, k], -1 for no choice. topk_weights: float32 of that shape, or None."""
    return from_choices(topk_idx, topk_weights, num_of_tokens, num_of_experts)


class HybridEPBuffer(Base):
    """Expert-parallel dispatch and combine with probabilities as [tokens, experts], with or without rows grouped by
    expert.

    The attributes are DeepEP's: group, rank, group_size, local_rank, node_rank, num_of_nodes,
    num_of_hybrid_ep_ranks_per_nvlink_domain (the ranks per host, or what the environment variable
    NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN says) and configurer. Expert e belongs to rank e // num_local_experts. One
    thread uses a HybridEPBuffer at a time, and all ranks make the same calls in the same order. A call's tensors are
    all CPU tensors, or all CUDA tensors of the device that was current when the HybridEPBuffer was made. Calls on CPU
    tensors return when their results are there. Calls on CUDA tensors come after the work of the current stream, and
    that stream's further work comes after them. Bad arguments raise TypeError or ValueError before anything is sent;
    failures between ranks raise moeccl.Error with MoECCL's error text."""

    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False,
                 num_sms_dispatch_api=None, num_sms_combine_api=None, num_sms_preprocessing_api=None,
                 num_blocks_permute=None, num_blocks_unpermute=None, load_cached_kernels=False, use_shared_buffer=True,
                 enable_custom_allgather=False, num_of_hybrid_ep_ranks_per_nvlink_domain=None, use_mnnvl=None):
        """Makes the communicator. The call is collective. group is a torch.distributed process group.

        max_num_of_tokens_per_rank: up to as many tokens as any rank says here, steps use the same memory; more are
        possible. num_local_experts: the same on all ranks. use_fp8: whether dispatch takes rows of one byte per
        element, with scaling_factor, if the call does not say it. MoECCL plans by itself and builds no kernels, so
        hidden_dim and the arguments from num_sms_dispatch_api on have no effect."""
        require(hidden_dim >= 1, ValueError, "hidden_dim is {}: give 1 or more", hidden_dim)
        self.group = group
        members = self.rank, self.group_size, gather = check_group(group, None)
        super().__init__(members, explicitly_destroy=False)
        domain = int(os.environ.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN") or
                     ranks_per_host(self._host_of) or self.group_size)
        check_same(gather, num_local_experts=num_local_experts, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=domain)
        require(self.group_size % domain == 0, ValueError, "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN is {}: give a "
                "divisor of the group's {} ranks", domain, self.group_size)
        most = max(gather(max_num_of_tokens_per_rank))
        self.num_of_hybrid_ep_ranks_per_nvlink_domain, self.num_of_nodes = domain, self.group_size // domain
        self.local_rank, self.node_rank = self.rank % domain, self.rank // domain
        self.configurer = Configurer(hidden_dim, most, num_local_experts, domain, self.num_of_nodes, use_fp8,
                                     num_sms_dispatch_api, num_sms_combine_api, num_sms_preprocessing_api,
                                     num_blocks_permute, num_blocks_unpermute)
        self._comm.room_for(most)

    def empty_jit_cache(self):
        """Does nothing, because MoECCL builds no kernels at run time."""

    def update_template_config(self, hidden_dim=None, num_of_tokens_per_rank=None, num_local_experts=None,
                               pad_multiple=None, use_fp8=None, fuse_permute_dispatch=False, **kwargs):
        """Returns a HybridEpConfigInstance: the buffer's, with what is given changed. num_of_tokens_per_rank, rounded
        up to a multiple of 16, raises the buffer's maximum. kwargs: further fields. This call is not collective."""
        changes = dict(kwargs)
        if hidden_dim is not None:
            changes["hidden_dim"] = hidden_dim
        if num_of_tokens_per_rank is not None:
            changes["max_num_of_tokens_per_rank"] = max(round_up(num_of_tokens_per_rank, 16),
                                                        self.configurer.buffer_config.max_num_of_tokens_per_rank)
        if num_local_experts is not None:
            changes["num_of_experts_per_rank"] = num_local_experts
        if pad_multiple:
            changes["pad_multiple"] = pad_multiple
        if use_fp8 is not None:
            changes["token_data_type"] = APP_TOKEN_DATA_TYPE.UINT8 if use_fp8 else APP_TOKEN_DATA_TYPE.UINT16
        return self.configurer.updated_config(changes, fuse_permute_dispatch)

    @call(reads=True, elsewhere=_ELSEWHERE)
    def dispatch(self, hidden, scaling_factor=None, topk_idx=None, topk_weights=None, num_of_experts=None, probs=None,
                 routing_map=None, num_dispatched_tokens_tensor=None, num_dispatched_tokens=None, handle=None):
        """Sends each token once to each rank that has an expert of it. The call is collective.

        hidden: [T, H] of bfloat16, float16, float32 or float64, or of uint8 or fp8 with scaling_factor [T, n] of any
        type. The routing is routing_map, bool [T, experts], with probs, float32 of that shape, or None; or topk_idx,
        int64 or int32 [T, k] with -1 for no choice, with topk_weights, float32 of that shape, or None, and
        num_of_experts. handle: that of an earlier dispatch of this or another HybridEPBuffer of the same ranks, whose
        routing is used again; it needs no routing, but may come with probabilities. num_dispatched_tokens_tensor and
        num_dispatched_tokens have no effect: the exchange of the routing tells the number.

        Returns (rows in the order of source rank and token; probs float32 [rows, experts of this rank's NVLink domain]
        with zeros except for this rank's experts, or None; scaling factors of the rows, or None; handle). The handle is
        DeepEP's tuple of 7, of which the fourth is the number of rows, int32 [1] on the CPU, the fifth bool [rows,
        local experts], the sixth T and the last the config. Items that only DeepEP's kernels read are None."""
        given = Given(hidden, scaling_factor, probs, routing_map, topk_idx, topk_weights, num_of_experts)
        if handle is not None:
            return (*self._again(given, self._state(handle, "dispatch", _hybrid.Dense), None), handle)
        rows, routing_map, probs, config = self._arguments(given)
        n_local = config.num_of_experts_per_rank
        first = self.local_rank * n_local
        state = _hybrid.Dense(routing_map, self.group_size, slice(first, first + n_local))
        local_map = self._prepare(rows, state, probs)
        received = self._move(rows, state, probs, state.n_rows)
        count = torch.tensor([state.n_unique], dtype=torch.int32, device="cpu")
        return (*received, (None, None, None, count, local_map, state.n_tokens, config))

    @call(reads=True, elsewhere=_ELSEWHERE)
    def combine(self, hidden, probs=None, handle=None):
        """Sums each token's rows. The call is collective.

        hidden: [rows of the handle's dispatch, H] of bfloat16, float16, float32 or float64; H and type may differ from
        dispatch's. probs: float32 in the shape of dispatch's on all ranks, or None on all ranks; the columns of this
        rank's experts are read.

        Returns ([T, H], zeros for a token that went nowhere; float32 [T, experts] with each expert's number from its
        rank and zeros where a token did not choose it, or None)."""
        state = self._state(handle, "combine", _hybrid.Dense)
        if probs is not None:
            shape = state.shape_of_probs(state.n_rows, self.num_of_hybrid_ep_ranks_per_nvlink_domain)
            check_shape("probs", probs, (torch.float32, ), shape, f"float32 {list(shape)}, as dispatch's")
        return self._combine(hidden, probs, state)

    @call(reads=True, elsewhere=_ELSEWHERE)
    def dispatch_with_permute(self, *, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None,
                              num_of_experts=None, use_fp8=None, routing_map=None, probs=None, scaling_factor=None,
                              num_permuted_tokens=None, pad_multiple=None, handle=None, non_blocking=False,
                              fuse_permute_dispatch=False, num_dispatched_tokens=None, use_host_meta=None):
        """Sends each token to each of its experts; rows are grouped by local expert. The call is collective.

        hidden, scaling_factor, probs, routing_map, topk_idx, topk_weights, num_of_experts: as in dispatch.
        num_of_experts_per_rank, use_fp8: those of the call, where they differ from the HybridEPBuffer's. pad_multiple:
        each expert's rows are padded with zeros to a multiple of it; None or 0 for no padding. num_permuted_tokens: the
        rows of the results, an int or a tensor of one element, or None for as many as arrive; further rows are zeros.
        non_blocking needs num_permuted_tokens, in multiples of pad_multiple: rows for which there is no room are
        dropped, and combine_with_unpermute counts them as zeros. Without it, too small a number is an error on all
        ranks. non_blocking also puts counts into the memory of hidden's device; the host waits for the exchange of the
        routing all the same. handle: that of an earlier dispatch_with_permute, whose routing, padding and dropped rows
        hold again. fuse_permute_dispatch has no effect: rows always arrive at their final places. num_dispatched_tokens
        and use_host_meta are deprecated; use_host_meta stands for not non_blocking.

        Returns (rows, for each expert in the order of source rank and token; probs float32 [rows], with zeros for
        padding, or None; scaling factors of the rows, or None; rows of each local expert with padding, int64 [local
        experts] on the CPU, or with non_blocking on hidden's device, and None with a handle; handle). The handle is
        DeepEP's tuple of 11, of which the fourth is the number of tokens received, int32 [1], the fifth bool [tokens
        received, local experts], the eighth the rows of each expert without padding, int32 on hidden's device, the
        ninth T, the tenth the config and the last int32 [1] on hidden's device: 1 if rows were dropped."""
        if num_dispatched_tokens is not None:
            warnings.warn("num_dispatched_tokens is deprecated and has no effect: leave it out", stacklevel=3)
        if use_host_meta is not None:
            warnings.warn("use_host_meta is deprecated: give non_blocking, its opposite", stacklevel=3)
            non_blocking = not use_host_meta
        align, most = check_padding(pad_multiple, num_permuted_tokens, non_blocking)
        given = Given(hidden, scaling_factor, probs, routing_map, topk_idx, topk_weights, num_of_experts)
        if handle is not None:
            state = self._state(handle, "dispatch_with_permute", _hybrid.Permuted)
            check_same_padding(pad_multiple, state)
            return (*self._again(given, state, most), None, handle)
        rows, routing_map, probs, config = self._arguments(
            given, use_fp8, num_local_experts=num_of_experts_per_rank, pad_multiple=align)
        state = _hybrid.Permuted(routing_map, self.group_size, align, most, non_blocking)
        local_map = self._prepare(rows, state, probs)
        received = self._move(rows, state, probs, state.n_out)
        device, counts = hidden.device, state.kept_per_expert()
        near = device if non_blocking else torch.device("cpu")
        return (*received, round_up(counts, align).to(near), (
            None, None, None, torch.tensor([state.n_unique], dtype=torch.int32, device=near), local_map, None, None,
            counts.to(device, torch.int32), state.n_tokens, config,
            torch.tensor([state.kept < state.n_rows], dtype=torch.int32, device=device)))

    @call(reads=True, elsewhere=_ELSEWHERE)
    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None,
                               fuse_unpermute_combine=False, num_dispatched_tokens=None):
        """Sums each token's rows over its experts. The call is collective.

        hidden: [rows of the handle's dispatch_with_permute, H] of bfloat16, float16, float32 or float64; padding is not
        read. H and type may differ from dispatch's. probs: float32 [rows] on all ranks, or None on all ranks.
        pad_multiple: the dispatch's, or None. fuse_unpermute_combine has no effect; num_dispatched_tokens is
        deprecated.

        Returns what combine returns."""
        if num_dispatched_tokens is not None:
            warnings.warn("num_dispatched_tokens is deprecated and has no effect: leave it out", stacklevel=3)
        state = self._state(handle, "combine_with_unpermute", _hybrid.Permuted)
        check_same_padding(pad_multiple, state)
        if probs is not None:
            n = hidden.size(0)
            check_shape("probs", probs, (torch.float32, ), (n, ), f"float32 [{n}], one for each row of hidden")
        return self._combine(hidden, probs, state)

    def _arguments(self, given, use_fp8=None, **changes):
        """Checks what is given to a dispatch without a handle. Returns (Rows, routing map, probs, config)."""
        if use_fp8 is None:
            use_fp8 = self.configurer.buffer_config.token_data_type is APP_TOKEN_DATA_TYPE.UINT8
        rows = check_hidden(given, use_fp8)
        config = self.update_template_config(given.hidden.size(1), given.hidden.size(0), use_fp8=use_fp8, **changes)
        n_experts = config.num_of_experts_per_rank * self.group_size
        require(given.num_of_experts in (None, n_experts), ValueError, "num_of_experts is {}: the {} ranks have {} "
                "experts each", given.num_of_experts, self.group_size, config.num_of_experts_per_rank)
        routing_map, probs = check_routing(given, n_experts)
        require(routing_map is not None, ValueError,
                "routing_map and topk_idx are None: give one of them, or a handle")
        return rows, routing_map, probs, config

    def _prepare(self, rows, state, probs):
        """Makes the routing, and returns which of this rank's experts each received token chose, bool [tokens, local
        experts]."""
        self._run(lambda: _hybrid.agree(self._comm, rows, state, probs is not None), None, False)
        local_map = torch.zeros((state.n_unique, state.n_local), dtype=torch.bool, device=rows.x.device)
        self._run(lambda: _hybrid.mark(self._comm, rows, state, local_map), None, False)
        _handles.keep(local_map, state)
        return local_map

    def _move(self, rows, state, probs, n_out):
        """Returns (rows, probs or None, scaling factors or None) of a dispatch with room for n_out rows."""
        outputs, received = rows.outputs(self._memory, n_out), None
        if probs is not None:
            shape = state.shape_of_probs(n_out, self.num_of_hybrid_ep_ranks_per_nvlink_domain)
            received = self._memory.empty(shape, torch.float32, rows.x.device)

        def work():
            rows.move(self._comm, state, outputs)
            if probs is not None:
                _hybrid.dispatch_probs(self._comm, state, probs, received)

        self._run(work, None, False)
        return outputs[0], received, outputs[1]

    def _again(self, given, state, most):
        """Dispatches by a handle's routing, with room for `most` rows, or None for as many as the handle's dispatch
        had."""
        rows = check_hidden(given)
        require(given.hidden.size(0) == state.n_tokens, ValueError, "hidden has {} rows: the handle's dispatch had {}, "
                "give as many", given.hidden.size(0), state.n_tokens)
        _, probs = check_routing(given, state.n_experts)
        n_out = state.n_out if most is None else most
        require(n_out >= state.kept, ValueError, "num_permuted_tokens is {}: the handle's dispatch brought {} rows, "
                "give as many or more", n_out, state.kept)
        return self._move(rows, state, probs, n_out)

    def _combine(self, hidden, probs, state):
        check_combined(hidden, state.kept)
        out, back = self._memory.empty((state.n_tokens, hidden.size(1)), hidden.dtype, hidden.device), None
        if probs is not None:
            back = self._memory.empty((state.n_tokens, state.n_experts), torch.float32, hidden.device)

        def work():
            _hybrid.combine_rows(self._comm, state, hidden, out)
            if probs is not None:
                _hybrid.combine_probs(self._comm, state, probs, back)

        self._run(work, None, False)
        return out, back

    def _state(self, handle, call_, kind):
        require(handle is not None, ValueError, "{}: handle is None: give what the dispatch returned", call_)
        return _handles.state_of(handle, kind, self.group_size, call_, kind.call)
