# SPDX-License-Identifier: Apache-2.0
"""low_latency_dispatch and low_latency_combine: rows of each local expert, and sums with weights.

They use the routing of a MoECCL layer in the ExpertMajor layout: a token crosses each level of the topology once,
however many experts it chose there. Rows arrive densely, expert after expert, and are copied to their places in V1's
tensor [local experts, ranks * max tokens, hidden]. combine sets the routing's weights, because V1 passes them only
then."""
import torch

from . import _native
from ._check import check_shape, require


class State:
    """What is behind a handle: the choices, their routing, and the places of its rows."""

    def __init__(self, choices, most, hidden, n_experts, n_ranks):
        self.choices, self.most, self.hidden, self.n_experts = choices, most, hidden, n_experts
        self.index, self.kept = _fold(choices)
        self.n_ranks, self.n_local, self.room = n_ranks, n_experts // n_ranks, most * n_ranks
        self.counts, self.offsets = [], []  # rows of each local expert, and where they begin
        self.scaled = (0, 0)  # bytes of a row that travels with scales, and of its scales
        self.routings = {}  # by communicator: that of each Buffer that uses the handle
        self.members = list(range(n_ranks))  # the ranks that took part in the dispatch
        self.sources = None  # int32 [dense rows], the rank that each came from
        self.event = None  # of the dispatch

    def missing(self):
        """Returns the ranks that took no part in the dispatch, because they were masked."""
        return frozenset(range(self.n_ranks)) - frozenset(self.members)

    def index_on(self, comm):
        """Returns the choices as numbers of the experts of this communicator's ranks; -1 for those of other ranks."""
        if comm.size == self.n_ranks:
            return self.index
        places = self.index.new_full((self.n_ranks, ), -1)
        places[comm.members] = torch.arange(comm.size, dtype=torch.int32, device=places.device)
        place = places[self.index.clamp(min=0) // self.n_local]
        return torch.where((self.index < 0) | (place < 0), -1, place * self.n_local + self.index % self.n_local).int()

    def layer_on(self, comm):
        """Returns the layer of this communicator's ranks. The call is collective if the layer is new."""
        return comm.layer(_native.Shape(
            2 * self.hidden, _native.TYPES[torch.bfloat16], self.index.size(1), self.n_local * comm.size, self.most, _native.EXPERT_MAJOR,
            self.scaled[1], self.scaled[0]))

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
        self.source = torch.empty((state.n_local, state.room), dtype=torch.int32, device=device)
        self.range = torch.empty((state.n_local, n_ranks), dtype=torch.int64, device=device)


def buffers(state, form):
    """Makes the tensors for received rows and their scales."""
    with torch.inference_mode(False):  # later calls, in whatever mode, return them too
        return form.buffers(state.n_local, state.room, state.hidden, state.index.device)


def dispatch(comm, state, x, out, form):
    """Fills the outputs with the rows of x[T, hidden] that this rank's experts get. The call is collective."""
    x, scales = form.quantise(x)
    state.members = comm.members
    state.scaled = (0, 0) if scales is None else (x.size(1) * x.element_size(), scales.size(1) * scales.element_size())
    routing = state.routings[comm] = state.layer_on(comm).routing(state.index_on(comm))
    info = routing.info()
    state.counts = info.expert_counts[:state.n_local]
    state.offsets = info.expert_offsets[:state.n_local]
    dense, dense_scales = comm.scratch(info.n_rows, x.size(1), x.dtype, x.device), None
    if scales is None:
        routing.dispatch(x, dense)
    else:
        dense_scales = scales.new_empty((info.n_rows, scales.size(1)))
        routing.dispatch_scaled(x, scales, dense, dense_scales)
    for expert, begin, end in state.blocks():
        form.place(out.rows, out.scales, expert, dense[begin:end], dense_scales[begin:end] if dense_scales is not None else None)
    out.count.copy_(torch.tensor(state.counts, dtype=torch.int32, device="cpu"))
    _places(state, info, out)


def _places(state, info, out):
    """Records where each row of the outputs comes from."""
    device, n_ranks = out.count.device, state.n_ranks
    token, source = (_native.int32_tensor(rows, info.n_rows, device) for rows in (info.row_token, info.row_source))
    state.sources = source
    if len(state.members) < n_ranks:
        state.sources = torch.tensor(state.members, dtype=torch.int32, device=device)[source.long()]
    expert = torch.repeat_interleave(torch.arange(state.n_local, device=device), out.count.long())
    out.source.zero_()
    for local, begin, end in state.blocks():
        out.source[local, :end - begin] = token[begin:end]
    counts = torch.bincount(expert * n_ranks + state.sources, minlength=state.n_local * n_ranks).view(-1, n_ranks)
    out.range.copy_((counts.cumsum(1) - counts << 32) | counts)


def pack(state, x, dense):
    """Copies the rows of x[local experts, room, hidden] to dense[rows, hidden], expert after expert, and returns dense."""
    for expert, begin, end in state.blocks():
        dense[begin:end].copy_(x[expert, :end - begin])
    return dense


def combine(comm, state, x, weights, out):
    """out[T, hidden] = for each token the sum over its choices of weight * row, without those of experts of ranks that are not in comm.
    x: as the dispatch's rows, or packed. The call is collective."""
    require(len(comm.members) <= len(state.members), ValueError, "handle is of a dispatch that ranks {} took no part in: combine on a Buffer with "
            "enable_shrink", sorted(state.missing()))
    dense = x if x.dim() == 2 else pack(state, x, comm.scratch(sum(state.counts), state.hidden, torch.bfloat16, x.device))
    if len(comm.members) < len(state.members):
        dense = dense[torch.isin(state.sources, torch.tensor(comm.members, dtype=torch.int32, device=dense.device))]
    routing, index = state.routings.get(comm), state.index_on(comm)
    if routing is None:  # the handle comes from another Buffer, or from before a rank was masked
        routing = state.routings[comm] = state.layer_on(comm).routing(index, weights)
    else:
        routing.update(index, weights)
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
