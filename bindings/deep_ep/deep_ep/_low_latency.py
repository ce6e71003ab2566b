# SPDX-License-Identifier: Apache-2.0
"""low_latency_dispatch and low_latency_combine: rows of each local expert, and sums with weights.

They use the routing of a MoECCL layer in the ExpertMajor layout: a token crosses each level of the topology once,
however many experts it chose there. Rows arrive densely, expert after expert, and are copied to their places in V1's
tensor [local experts, ranks * max tokens, hidden]. combine sets the routing's weights, because V1 passes them only
then."""
import torch

from . import _fp8, _native
from ._check import check_shape, require


class State:
    """What is behind a handle: the choices, their routing, and the places of its rows."""

    def __init__(self, choices, most, hidden, n_experts, n_ranks):
        self.choices, self.most, self.hidden, self.n_experts = choices, most, hidden, n_experts
        self.index, self.kept = _fold(choices)
        self.n_ranks, self.n_local, self.room = n_ranks, n_experts // n_ranks, most * n_ranks
        self.shape, self.counts, self.offsets = None, [], []
        self.routings = {}  # by communicator: that of each Buffer that uses the handle
        self.event = None  # of the dispatch

    def blocks(self):
        """Yields (expert, first dense row, one past the last) for each local expert that has rows."""
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, self.offsets[expert], self.offsets[expert] + count


def _fold(choices):
    """MoECCL sends a token to an expert once. Returns (choices[T, k] with -1 for those that name an expert again, and the first
    column that names each choice's expert, or None where no token names one twice)."""
    ordered = choices.sort(1).values
    if not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        return choices, None
    first = (choices.unsqueeze(2) == choices.unsqueeze(1)).byte().argmax(2)
    again = first != torch.arange(choices.size(1), device=choices.device)
    return choices.masked_fill(again, -1), first


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
    state.shape, routing = layer.shape, layer.routing(state.index)
    state.routings[comm] = routing
    info = routing.info()
    state.counts = info.expert_counts[:state.n_local]
    state.offsets = info.expert_offsets[:state.n_local]
    dense = comm.scratch(info.n_rows, state.hidden, x.dtype, x.device)
    if fp8:
        dense_scales = scales.new_empty((info.n_rows, width))
        routing.dispatch_scaled(x, scales, dense, dense_scales)
    else:
        routing.dispatch(x, dense)
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
    routing = state.routings.get(comm)
    if routing is None:  # the handle comes from another Buffer
        routing = state.routings[comm] = comm.layer(state.shape).routing(state.index, weights)
    else:
        routing.update(state.index, weights)
    routing.combine(dense, out)


def check_combine(state, x, topk_idx, topk_weights, out):
    """Checks the arguments and returns the weights of the routing's choices; 0 for a choice that topk_idx dropped."""
    n, k = state.choices.shape
    for name, tensor, kinds, shape in (
            ("x", x, (torch.bfloat16, ), (state.n_local, state.room, state.hidden)),
            ("topk_idx", topk_idx, (torch.int64, torch.int32), (n, k)),
            ("topk_weights", topk_weights, (torch.float32, ), (n, k)),
            ("out", out, (torch.bfloat16, ), (n, state.hidden))):
        if name == "out" and out is None:
            continue
        check_shape(name, tensor, kinds, shape, f"{str(kinds[0]).split('.')[1]} {list(shape)}, as the handle's dispatch")
    require(out is None or out.is_contiguous(), ValueError, "out is not contiguous: give a contiguous tensor")
    differs = topk_idx != state.choices
    if not differs.any():
        return _fold_weights(state, topk_weights)
    token, choice = (differs & (topk_idx != -1)).nonzero()[:1].flatten().tolist() or (None, None)
    require(token is None, ValueError, "topk_idx[{}][{}] is {}: it was {} in the handle's dispatch; give the same, or -1",
            token, choice, topk_idx[token, choice] if token is not None else 0,
            state.choices[token, choice] if token is not None else 0)
    return _fold_weights(state, topk_weights.masked_fill(differs, 0))


def _fold_weights(state, weights):
    """Adds the weights of choices that name an expert again to that of the first."""
    if state.kept is None:
        return weights.contiguous()
    return torch.zeros_like(weights, memory_format=torch.contiguous_format).scatter_add_(1, state.kept, weights.detach())
