# SPDX-License-Identifier: Apache-2.0
"""low_latency_dispatch and low_latency_combine: rows of each local expert, and sums with weights.

They use the routing of a MoECCL layer in the ExpertMajor layout: a token crosses each level of the topology once,
however many experts it chose there. Rows arrive densely, expert after expert, and are copied to their places in V1's
tensor [local experts, ranks * max tokens, hidden]. combine sets the routing's weights, because V1 passes them only
then."""
import torch

from . import _fp8, _native
from ._check import check_shape, require


class Handle(tuple):
    """V1's five items, (recv_src_info, recv_layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts), with
    their routing in `state`."""
    state = None


class State:
    """The routing behind a handle, and the places of its rows."""

    def __init__(self, index, most, hidden, n_experts, n_ranks):
        self.index, self.most, self.hidden, self.n_experts = index, most, hidden, n_experts
        self.n_local, self.room = n_experts // n_ranks, most * n_ranks
        self.routing, self.counts, self.offsets = None, [], []
        self.event = None  # of the dispatch

    def blocks(self):
        """Yields (expert, first dense row, one past the last) for each local expert that has rows."""
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, self.offsets[expert], self.offsets[expert] + count


class Outputs:
    """The tensors that a dispatch fills: rows and scales are one of the Buffer's two pairs, the others are new."""

    def __init__(self, state, n_ranks, rows, scales):
        self.rows, self.scales = rows, scales
        device = state.index.device
        self.count = torch.empty(state.n_local, dtype=torch.int32, device=device)
        self.source = torch.zeros((state.n_local, state.room), dtype=torch.int32, device=device)
        self.range = torch.zeros((state.n_local, n_ranks), dtype=torch.int64, device=device)


def buffers(state, use_fp8, use_ue8m0):
    """Makes tensors for received rows and their scales, [local experts, room, ...]; scales are column-major."""
    with torch.inference_mode(False):  # later calls, in whatever mode, return them too
        return _buffers(state, use_fp8, use_ue8m0)


def _buffers(state, use_fp8, use_ue8m0):
    n, room, hidden, device = state.n_local, state.room, state.hidden, state.index.device
    rows = torch.zeros((n, room, hidden), dtype=torch.uint8 if use_fp8 else torch.bfloat16, device=device)
    if not use_fp8:
        return rows, None
    rows = rows.view(torch.float8_e4m3fn)  # torch 2.4 has no zeros of this type
    width = hidden // _fp8.GROUP // (4 if use_ue8m0 else 1)
    kind = torch.int32 if use_ue8m0 else torch.float32
    columns = torch.zeros((n, width, room), dtype=kind, device=device)
    # A single column gets a stride of 1, so that it can be viewed as bytes.
    return rows, columns.transpose(1, 2) if width > 1 else columns.view(n, room, 1)


def dispatch(comm, state, x, out, round_scale):
    """Fills the outputs with the rows of x[T, hidden] that this rank's experts get. The call is collective."""
    fp8 = out.scales is not None
    scales, width = None, 0
    if fp8:
        x, scales = _fp8.quantise(x, round_scale, out.scales.dtype == torch.int32)
        width = scales.size(1)
    layer = comm.layer(_native.Shape(
        2 * state.hidden, _native.TYPES[torch.bfloat16], state.index.size(1), state.n_experts, state.most,
        _native.EXPERT_MAJOR, 4 * width, state.hidden if fp8 else 0))
    state.routing = layer.routing(state.index)
    info = state.routing.info()
    state.counts = info.expert_counts[:state.n_local]
    state.offsets = info.expert_offsets[:state.n_local]
    dense = comm.scratch(info.n_rows, state.hidden, x.dtype, x.device)
    if fp8:
        dense_scales = scales.new_empty((info.n_rows, width))
        state.routing.dispatch_scaled(x, scales, dense, dense_scales)
    else:
        state.routing.dispatch(x, dense)
    for expert, begin, end in state.blocks():
        out.rows[expert, :end - begin].copy_(dense[begin:end])
        if fp8:
            out.scales[expert, :end - begin].copy_(dense_scales[begin:end])
    out.count.copy_(torch.tensor(state.counts, dtype=torch.int32, device="cpu"))
    if info.n_rows:
        _places(comm, state, info, out)


def _places(comm, state, info, out):
    """Records where each row of the outputs comes from."""
    token, source = (_native.int32_tensor(rows, info.n_rows, out.count.device) for rows in (info.row_token, info.row_source))
    expert = torch.repeat_interleave(torch.arange(state.n_local, device=out.count.device), out.count.long())
    for local, begin, end in state.blocks():
        out.source[local, :end - begin] = token[begin:end]
    counts = torch.bincount(expert * comm.size + source, minlength=state.n_local * comm.size).view(-1, comm.size)
    out.range.copy_((counts.cumsum(1) - counts << 32) | counts)


def pack(state, x, dense):
    """Copies the rows of x[local experts, room, hidden] to dense[rows, hidden], expert after expert, and returns dense."""
    for expert, begin, end in state.blocks():
        dense[begin:end].copy_(x[expert, :end - begin])
    return dense


def combine(comm, state, x, weights, out):
    """out[T, hidden] = for each token the sum over its choices of weight * row. x: as the dispatch's rows, or packed. The
    call is collective."""
    dense = x if x.dim() == 2 else pack(state, x, comm.scratch(sum(state.counts), state.hidden, torch.bfloat16, x.device))
    state.routing.update(state.index, weights)
    state.routing.combine(dense, out)


def check_combine(state, x, topk_idx, topk_weights, out):
    """Checks the arguments and returns the weights of the handle's choices; 0 for a choice that topk_idx dropped."""
    n, k = state.index.shape
    for name, tensor, kinds, shape in (
            ("x", x, (torch.bfloat16, ), (state.n_local, state.room, state.hidden)),
            ("topk_idx", topk_idx, (torch.int64, torch.int32), (n, k)),
            ("topk_weights", topk_weights, (torch.float32, ), (n, k)),
            ("out", out, (torch.bfloat16, ), (n, state.hidden))):
        if name == "out" and out is None:
            continue
        check_shape(name, tensor, kinds, shape, f"{str(kinds[0]).split('.')[1]} {list(shape)}, as the handle's dispatch")
    require(out is None or out.is_contiguous(), ValueError, "out is not contiguous: give a contiguous tensor")
    differs = topk_idx != state.index
    if not differs.any():
        return topk_weights.contiguous()
    token, choice = (differs & (topk_idx != -1)).nonzero()[:1].flatten().tolist() or (None, None)
    require(token is None, ValueError, "topk_idx[{}][{}] is {}: it was {} in the handle's dispatch; give the same, or -1",
            token, choice, topk_idx[token, choice] if token is not None else 0,
            state.index[token, choice] if token is not None else 0)
    return topk_weights.masked_fill(differs, 0)
