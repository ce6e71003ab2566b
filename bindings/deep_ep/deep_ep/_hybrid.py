# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine of HybridEPBuffer, with rows in two layouts.

Dense: a row for each token that this rank's experts get, in the order of source rank and token (MoECCL's Rows layout).
Permuted: a row for each pair of a token and one of this rank's experts, expert after expert, with padding (ExpertMajor
with align_rows). The library writes rows to their final places and reads them from there, so no call permutes them.
Both layouts use the routing of a layer with the real experts and without weights: combine is a plain sum, which is also
the gradient of dispatch.

Probabilities are one number for each pair. They travel in an AllToAllv of their own, sorted by expert and token: from
the tokens' ranks to the experts' ranks, and for combine back."""
import torch

from . import _native, _rows
from ._check import check_same
from ._rows import round_up

ONE_BYTE = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = tuple(_native.TYPES) + ONE_BYTE
_CALLS = ("dispatch", "dispatch_with_permute")
_SAME = {  # what all ranks pass alike, and how an error shows it
    "kind of call": lambda n: _CALLS[n], "dtype of hidden": lambda n: _DTYPES[n],
    "columns of hidden": str, "bytes of scaling_factor per row": str, "pad_multiple": str,
    "presence of probs": lambda n: ("None", "given")[n]}
_N_TOKENS, _FAN, _LIMIT = range(len(_SAME), len(_SAME) + 3)
_FIELDS = len(_SAME) + 3
_NO_LIMIT = 2**31 - 1


def _before(counts, dim=0):
    """Returns for each number the sum of those before it."""
    return counts.cumsum(dim) - counts


class Rows(_rows.Rows):
    """The rows of one dispatch: hidden[T, H], and scales[T, n] where they are quantized."""

    def __init__(self, hidden, scales=None):
        self.scales = scales.contiguous() if scales is not None else None
        super().__init__(hidden, (self.scales, ), scales.size(1) * scales.element_size() if scales is not None else None)

    def move(self, comm, state, outputs):
        """Fills the outputs; rows beyond those that the state keeps are zeros."""
        targets = outputs
        if outputs[0].size(0) < state.n_rows:
            targets = [None if out is None else out.new_empty((state.n_rows, out.size(1))) for out in outputs]
        if self.scales is None:
            self.routing(comm, state).dispatch(self.x, targets[0])
        else:
            self.routing(comm, state).dispatch_scaled(self.x, self.scales, *targets)
        for out, target in zip(outputs, targets):
            if out is None:
                continue
            if target is not out:
                _bytes(out[:state.kept]).copy_(_bytes(target[:state.kept]))
            _bytes(out[state.kept:]).zero_()


def _bytes(tensor):
    return tensor.view(torch.uint8)  # torch does not fill and copy fp8 everywhere


class State(_rows.Routed):
    """What is behind a handle: where this rank's tokens go, and where its experts' rows come from. Its sent and received count pairs of
    a token and an expert. routing_map: bool [T, experts], the same number of experts on all ranks."""
    call = None
    limit, drop = None, False

    def __init__(self, routing_map, n_ranks):
        n_tokens, n_experts = routing_map.shape
        super().__init__(n_tokens, n_ranks, n_experts)
        self.routing_map = routing_map  # until the routing is made
        self.n_experts, self.n_local = n_experts, n_experts // n_ranks
        self.expert, self.token = routing_map.t().contiguous().nonzero(as_tuple=True)  # of each pair, sorted by both
        self.kept = self.n_unique = 0  # rows that are not dropped, and tokens received
        self.counts = None  # int64 [ranks, local experts] on the CPU: pairs that arrive from each rank
        self.rank_tokens = None  # int64 [ranks] on the CPU: T of each rank
        self.place = None  # the slot of each pair that arrives; n_slots of them lie in the layout's order

    @property
    def n_out(self):
        """The rows of a dispatch's results."""
        return self.n_rows if self.limit is None else self.limit

    def choose(self, fan):
        """Sets index to the experts of each token, int32 [T, fan], -1 for none."""
        token, expert = self.routing_map.nonzero(as_tuple=True)
        column = torch.arange(token.numel(), device=token.device) - _before(self.routing_map.sum(dim=1))[token]
        self.index = torch.full((self.n_tokens, fan), -1, dtype=torch.int32, device=token.device)
        self.index[token, column] = expert.to(torch.int32)
        self.routing_map = None

    def places(self, first):
        """Returns where each pair that arrives lies, if its expert's pairs lie from first[local experts] on."""
        counts = self.counts
        shift = first + _before(counts) - _before(counts.view(-1)).view_as(counts)
        return shift.view(-1).repeat_interleave(counts.view(-1)) + torch.arange(int(counts.sum()), device="cpu")


class Dense(State):
    """A row for each token. Slots are the elements of a tensor [rows, local experts]. columns: those of the local
    experts in the tensors for probabilities."""
    call, layout = "dispatch", _native.ROWS

    def __init__(self, routing_map, n_ranks, columns):
        super().__init__(routing_map, n_ranks)
        self.columns = columns

    def learn(self, info):
        self.n_rows = self.kept = self.n_unique = info.n_rows

    def mark(self, info, local_map):
        """Sets local_map[tokens received, local experts] to True where a token chose an expert."""
        device = local_map.device
        ends = _native.copied(info.choice_offsets, self.n_rows + 1, torch.int64, device)
        expert = _native.copied(info.choice_expert, sum(self.received), torch.int32, device)
        row = torch.arange(self.n_rows, device=device).repeat_interleave(ends.diff())
        local_map[row, expert.long()] = True
        expert, row = local_map.t().contiguous().nonzero(as_tuple=True)
        self.place = (row * self.n_local + expert)[self.places(_before(self.counts.sum(dim=0))).to(device)]

    @property
    def n_slots(self):
        return self.n_rows * self.n_local

    def shape_of_probs(self, n_out, n_ranks):
        """Returns the shape of a dispatch's probabilities for n_out rows and the experts of n_ranks ranks."""
        return n_out, n_ranks * self.n_local

    def spread(self, slots, out):
        out.zero_()[:, self.columns] = slots.view(self.n_rows, self.n_local)

    def slots(self, probs):
        return probs[:, self.columns].reshape(-1)


class Permuted(State):
    """A row for each pair of a token and a local expert, each expert's group padded to a multiple of align. Slots are
    the rows.

    limit: the rows that the caller has room for, or None for all. With drop, rows beyond them are dropped."""
    call, layout = "dispatch_with_permute", _native.EXPERT_MAJOR

    def __init__(self, routing_map, n_ranks, align, limit, drop):
        super().__init__(routing_map, n_ranks)
        self.align, self.limit, self.drop = align, limit, drop

    def learn(self, info):
        self.n_rows, self.n_unique = info.n_rows, info.n_unique
        self.kept = self.n_rows if self.limit is None else min(self.n_rows, self.limit)

    def mark(self, info, local_map):
        """Sets local_map[tokens received, local experts] to True where a token chose an expert."""
        device, totals = local_map.device, self.counts.sum(dim=0)
        padded = round_up(totals, self.align)
        self.place = self.places(_before(padded)).to(device)
        source, token = (_native.copied(rows, self.n_rows, torch.int32, device).long()
                         for rows in (info.row_source, info.row_token))
        expert = torch.arange(self.n_local, device=device).repeat_interleave(padded.to(device))
        real = source >= 0
        whole = (_before(self.rank_tokens).to(device)[source] + token)[real]  # numbers of tokens over all ranks
        here = torch.zeros(int(self.rank_tokens.sum()), dtype=torch.bool, device=device)
        here[whole] = True
        local_map[(here.cumsum(0) - 1)[whole], expert[real]] = True

    @property
    def n_slots(self):
        return self.n_rows

    def shape_of_probs(self, n_out, n_ranks):
        return (n_out, )

    def spread(self, slots, out):
        out.zero_()[:self.kept] = slots[:self.kept]

    def slots(self, probs):
        if self.kept == self.n_rows:
            return probs[:self.n_rows]
        return torch.cat((probs[:self.kept], probs.new_zeros(self.n_rows - self.kept)))

    def kept_per_expert(self):
        """Returns int64 [local experts]: the pairs of each that are not dropped, without padding."""
        totals = self.counts.sum(dim=0)
        return totals.minimum((self.kept - _before(round_up(totals, self.align))).clamp(min=0))


def agree(comm, rows, state, with_probs):
    """Exchanges what ranks need from each other before rows move, and makes the routing. The call is collective."""
    fan = int(state.routing_map.sum(dim=1).max()) if state.n_tokens else 0
    limit = _NO_LIMIT if state.limit is None or state.drop else min(state.limit, _NO_LIMIT)
    header = [_CALLS.index(state.call), _DTYPES.index(rows.x.dtype), rows.x.size(1), rows.scale_bytes, state.align,
              int(with_probs), state.n_tokens, fan, limit]
    send = torch.empty((comm.size, _FIELDS + state.n_experts), dtype=torch.int32, device="cpu")
    send[:, :_FIELDS] = torch.tensor(header, dtype=torch.int32, device="cpu")
    send[:, _FIELDS:] = state.routing_map.sum(dim=0, dtype=torch.int32).cpu()
    recv = comm.all_to_all(send)
    headers = recv[:, :_FIELDS].tolist()
    check_same("dispatch", _SAME, headers)
    widest = max(theirs[_FAN] for theirs in headers)
    if widest > _native.MOST_CHOICES:
        raise ValueError(f"a token has {widest} experts: MoECCL sends one to at most {_native.MOST_CHOICES}")
    counts = recv[:, _FIELDS:].long().view(comm.size, comm.size, state.n_local)  # by source, owner and expert
    needed = round_up(counts.sum(dim=0), state.align).sum(dim=1).tolist()
    for rank, theirs in enumerate(headers):
        if theirs[_LIMIT] < needed[rank]:
            raise ValueError(
                f"num_permuted_tokens of rank {rank} is {theirs[_LIMIT]}, and {needed[rank]} rows go there, padding "
                "included: give as many or more, or non_blocking=True, which drops the last ones")
    state.counts = counts[:, comm.rank].contiguous()
    state.sent, state.received = counts[comm.rank].sum(dim=1).tolist(), state.counts.sum(dim=1).tolist()
    state.rank_tokens = recv[:, _N_TOKENS].long()
    state.max_tokens = comm.room_for(int(state.rank_tokens.max()))
    state.choose(min(state.n_experts, 1 << max(widest - 1, 0).bit_length()))
    state.learn(rows.routing(comm, state).info())


def mark(comm, rows, state, local_map):
    """Fills local_map, and lets the state know where pairs lie."""
    state.mark(rows.routing(comm, state).info(), local_map)


def dispatch_probs(comm, state, probs, out):
    """Fills out with the float32 probs[T, experts] of the pairs that arrive; the rest of it is zeros. The call is
    collective."""
    send = probs[state.token, state.expert].unsqueeze(1)
    recv = send.new_empty((sum(state.received), 1))
    comm.all_to_all_v(send, state.sent, recv, state.received)
    slots = recv.new_zeros(state.n_slots)
    slots[state.place] = recv.squeeze(1)
    state.spread(slots, out)


def combine_probs(comm, state, probs, out):
    """out[T, experts] = the numbers in probs, which has dispatch_probs' shape, of this rank's pairs; 0 for other pairs.
    The call is collective."""
    send = state.slots(probs)[state.place].unsqueeze(1)
    back = send.new_empty((sum(state.sent), 1))
    comm.all_to_all_v(send, state.received, back, state.sent)
    out.zero_()[state.token, state.expert] = back.squeeze(1)


def combine_rows(comm, state, x, out):
    """out[T, H] = for each token the sum over its rows of x; dropped rows count as zeros. The call is collective."""
    if state.kept < state.n_rows:
        whole = comm.scratch(state.n_rows, x.size(1), x.dtype, x.device)
        whole[:state.kept] = x[:state.kept]
        whole[state.kept:] = 0
        x = whole
    routing = state.routing(comm, x.size(1) * x.element_size(), _native.TYPES[x.dtype])
    routing.combine(x[:state.n_rows].contiguous(), out)
