# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine of V2, ElasticBuffer's.

dispatch is V1's: a row for each pair of a token and a rank, by a MoECCL routing whose "experts" are the ranks. With do_expand the
received rows are then copied to one row for each of this rank's experts that their tokens chose.

combine has V2's arithmetic: a token's rows are added in the order of its choices, in fp32 and beginning with the biases, and the
sum is rounded once. MoECCL's combine does that with routings in the order of choices. With biases, or where each choice's row returns by
itself, rows return to their tokens' ranks as they are and are added here. Where the ranks are on several hosts, ElasticBuffer lets MoECCL's
combine form sums on the way."""
import moeccl
import torch
from moeccl import _abi

from . import _native, _sums, _throughput
from ._check import check_same
from ._rows import by_column, round_up

_SAME = {**_throughput.SAME, "topk_weights": lambda n: ("None", "given")[n], "num_experts": str, "num_max_tokens_per_rank": str,
         "do_expand": bool}
_N_TOKENS, _FAN = len(_SAME), len(_SAME) + 1
_FIELDS = len(_SAME) + 2


class Route(_throughput.State):
    """What is behind a handle."""

    def __init__(self, topk_idx, n_experts, comm, most, expand, alignment, ordered):
        """ordered: whether the layers' sums are in the order of choices."""
        self.n_experts, self.n_local, self.top_k = n_experts, n_experts // comm.size, topk_idx.size(1)
        self.most, self.expand, self.alignment, self.ordered = most, expand, alignment, ordered
        choices = topk_idx.long().contiguous()
        self.choices = choices.int() if expand else None
        self.owner = torch.where(choices >= 0, choices // self.n_local, -1)  # the rank of each choice; -1 for none
        marked = torch.zeros((topk_idx.size(0), comm.size + 1), dtype=torch.bool, device=topk_idx.device)
        super().__init__(marked.scatter_(1, self.owner + 1, True)[:, 1:].contiguous())
        # The tokens before that go to the same rank, for each choice: the row's number among those to its rank.
        self.before = (self.is_token_in_rank.cumsum(0) - 1).gather(1, self.owner.clamp(min=0)).masked_fill_(self.owner < 0, -1)
        self.last = self.owner >= 0  # whether no later choice is of the same rank
        for j in range(self.top_k - 1):
            self.last[:, j] &= (self.owner[:, j + 1:] != self.owner[:, j:j + 1]).all(1)
        self.expert_counts = []  # rows of each of this rank's experts
        self.local = None  # int32 [n_rows, k]: this rank's expert numbers, -1 for others
        self.slots, self.sources, self.gaps = None, None, None  # of the expanded rows, see _place
        self._sums = {}

    def routing(self, comm, *kind):
        try:
            return super().routing(comm, *kind)
        except moeccl.Error as failure:
            if not self.ordered or failure.code != _abi.moecclOutOfMemory:
                raise
        self.ordered = False  # other plans need less staging than flat; all ranks see that alike
        return super().routing(comm, *kind)

    def sums_in_order(self, comm, x):
        """Returns whether MoECCL's combine adds the rows of x in the order of choices. The call is collective."""
        if self.ordered:
            self.routing(comm, x.size(1) * x.element_size(), _native.TYPES[x.dtype])
        return self.ordered

    def targets(self, fan):
        """Returns the ranks that each token goes to, in the order of its last choices there: int32 [T, fan], -1 for none."""
        return _sums.front(self.owner, self.last, fan)

    def worst_rows(self):
        return self.n_ranks * self.most

    def worst_expanded(self):
        rows = self.worst_rows() * min(self.top_k, self.n_local) + (self.alignment - 1) * self.n_local
        return round_up(rows, self.alignment)

    def n_expanded(self):
        return sum(round_up(c, self.alignment) for c in self.expert_counts)

    def expert_ends(self):
        """Returns psum_num_recv_tokens_per_expert as a list."""
        ends, begin = [], 0
        for count in self.expert_counts:
            whole = round_up(count, self.alignment)
            ends.append(begin + (count if self.expand else whole))
            begin += whole
        return ends

    def returned_rows(self):
        """Returns the number of the returned row, in the order of (rank, token), that holds each choice; -1 for none."""
        sent = self.is_token_in_rank.sum(0)
        base = (sent.cumsum(0) - sent)[self.owner.clamp(min=0)]
        return (base + self.before).masked_fill_(self.owner < 0, -1)

    def token_sums(self, each_choice):
        """Returns the Sums of this rank's tokens over the rows that return. each_choice: a row for each choice returns, in the order of
        (expert, token), and not one for each pair of a token and a rank, in that of (rank, token)."""
        if each_choice not in self._sums:
            if each_choice:
                index = self.choices if self.top_k <= self.n_experts else None
                self._sums[each_choice] = _sums.Sums(index, self.n_experts, self._rows_of_choices)
            else:
                rows = lambda: self.returned_rows().masked_fill_(~self.last, -1)  # noqa: E731
                self._sums[each_choice] = _sums.Sums(self.index, self.n_ranks, rows)
        return self._sums[each_choice]

    def _rows_of_choices(self):
        kept = (self.owner >= 0).view(-1).nonzero().view(-1)
        kept = kept[self.choices.view(-1)[kept].argsort(stable=True)]
        rows = torch.full_like(self.owner, -1)
        rows.view(-1)[kept] = torch.arange(kept.numel(), device=kept.device)
        return rows

    def expert_sums(self):
        """Returns the Sums of the received tokens over their expanded rows."""
        if "experts" not in self._sums:
            index = _sums.front(self.local, self.local >= 0, min(self.top_k, self.n_local))
            self._sums["experts"] = _sums.Sums(index, self.n_local, lambda: self.slots, self.alignment)
        return self._sums["experts"]


class Outputs:
    """The tensors that a dispatch fills."""

    def __init__(self, rows, route, memory, n_rows, expand, column_major, index_type):
        """n_rows: of each tensor. column_major: whether scales lie column by column, each of a multiple of four."""
        device, self.expand = rows.x.device, expand
        self.x = memory.empty((n_rows, rows.x.size(1)), rows.x.dtype, device)
        self.scales = self.idx = self.weights = None
        if rows.scales is not None:
            width, kind = rows.scales.size(1), rows.scales.dtype
            if column_major:
                self.scales = by_column(n_rows, width, kind, device)
            else:
                self.scales = memory.empty((n_rows, width), kind, device)
        if not expand:
            self.idx = memory.empty((n_rows, route.top_k), index_type, device)
        if rows.topk_weights is not None:
            self.weights = memory.empty((n_rows, ) if expand else (n_rows, route.top_k), torch.float32, device)


def agree(comm, rows, route, topk_idx):
    """Exchanges the counts that ranks need from each other before rows move. The call is collective."""
    counts = route.is_token_in_rank.sum(dim=0, dtype=torch.int32).cpu()
    fan = int(route.is_token_in_rank.sum(dim=1).max()) if route.n_tokens else 0
    *same, n_tokens, _, _ = rows.header(0, 0)
    mine = [*same, int(rows.topk_weights is not None), route.n_experts, route.most, int(route.expand),
            n_tokens, fan]
    send = torch.empty((comm.size, _FIELDS + comm.size), dtype=torch.int32, device="cpu")
    send[:, :_FIELDS] = torch.tensor(mine, dtype=torch.int32, device="cpu")
    send[:, _FIELDS:] = counts
    recv = comm.all_to_all(send)
    told = recv[:, :_FIELDS].tolist()
    check_same("dispatch", _SAME, told)
    for rank, (*_, n_tokens, _) in enumerate(told):
        if n_tokens > route.most:
            raise ValueError(f"rank {rank} brings {n_tokens} tokens, and num_max_tokens_per_rank is {route.most}: give the most of any "
                             "rank")
    route.set_counts(comm, max(t[_FAN] for t in told), max(t[_N_TOKENS] for t in told), counts.tolist(),
                     recv[:, _FIELDS + comm.rank].tolist())
    per_expert = torch.bincount(topk_idx.reshape(-1).long() + 1, minlength=route.n_experts + 1)[1:]
    told = comm.all_to_all(per_expert.to("cpu", torch.int32).view(comm.size, route.n_local))
    route.expert_counts = told.sum(0).tolist()


def move(comm, rows, route, out, epilogue):
    """Sends the rows, waits for `epilogue`, an EventHandle or None, and fills the outputs. Rows that no token fills are zeros, without
    choices."""
    received = out.x if not out.expand else comm.scratch(route.n_rows, out.x.size(1), out.x.dtype, out.x.device, "rows")
    pieces = rows.receive(comm, route, received)
    if epilogue is not None:
        epilogue.current_stream_wait()
    scales = pieces.pop(0).view(rows.scales.dtype) if rows.scales is not None else None
    if rows.topk_idx is not None:
        route.local, _ = _throughput.own_choices(pieces.pop(0).view(torch.int32), comm.rank, route.n_local)
        if route.expand:
            _place(route)
    weights = pieces.pop(0).view(torch.float32) if rows.topk_weights is not None else None
    (_expand if out.expand else _keep)(route, received, scales, weights, out)


def _keep(route, received, scales, weights, out):
    n = route.n_rows
    _throughput.fill(received[n:], 0)
    out.idx[:n].copy_(route.local)
    out.idx[n:].fill_(-1)
    for target, part in ((out.scales, scales), (out.weights, weights)):
        if target is not None:
            target[:n].copy_(part)
            target[n:].fill_(0)
    if weights is not None:
        out.weights[:n].masked_fill_(route.local < 0, 0)


def _expand(route, received, scales, weights, out):
    n = route.sources.numel()
    for target, part in ((out.x, received), (out.scales, scales)):
        if target is None:
            continue
        if target.element_size() == 1:  # torch up to 2.8 has no index_select of float8
            target, part = target.view(torch.uint8), part.view(torch.uint8)
        if n and target.is_contiguous():
            torch.index_select(part, 0, route.sources, out=target[:n])
        elif n:
            target[:n].copy_(part.index_select(0, route.sources))
        target[n:].fill_(0)
        target.index_fill_(0, route.gaps, 0)
    if weights is not None:
        out.weights.fill_(0)
        filled = route.slots >= 0
        out.weights[route.slots[filled]] = weights[filled]


def _place(route):
    """Finds the expanded rows: slots[n_rows, k] has the row for each choice, -1 for none; sources[n] the received row that each
    expanded row is a copy of; gaps the rows between experts' groups, whose source is any received row."""
    local = route.local.long()
    kept = (local >= 0).view(-1).nonzero().view(-1)
    expert, order = local.view(-1)[kept].sort(stable=True)
    kept = kept[order]  # in the order of (expert, source rank, token)
    counts = torch.tensor(route.expert_counts, dtype=torch.long, device=local.device)
    whole = round_up(counts, route.alignment)
    shift = (whole.cumsum(0) - whole) - (counts.cumsum(0) - counts)  # padding before each expert's group
    slot = torch.arange(kept.numel(), device=local.device) + shift[expert]
    route.slots = torch.full_like(local, -1)
    route.slots.view(-1)[kept] = slot
    sources = torch.full((int(whole.sum()), ), -1, dtype=torch.long, device=local.device)
    sources[slot] = kept // max(route.top_k, 1)
    route.gaps = (sources < 0).nonzero().view(-1)
    route.sources = sources.clamp_(min=0)


def describe(comm, rows, route, n_scaleup_ranks, handle):
    """Fills the handle's tensors about received rows."""
    info, n = rows.routing(comm, route).info(), route.n_rows
    if info.n_rows != n:
        raise RuntimeError(f"the routing has {info.n_rows} rows, the ranks announced {n}")
    about, device = handle.recv_src_metadata, handle.recv_src_metadata.device
    about.fill_(-1)
    if n:
        source, token = (_native.int32_tensor(numbers, n, device) for numbers in (info.row_source, info.row_token))
        about[:n, 0] = source * route.most + token
        column = torch.arange(route.top_k, dtype=torch.int32, device=device)
        last = torch.where(route.local >= 0, column, -1).amax(1)
        about[:n, 1] = source % n_scaleup_ranks * route.top_k + last
        if route.expand:
            about[:n, 2:] = route.slots


def describe_counts(route, n_scaleup_ranks, handle):
    """Fills the handle's tensors about counts."""
    per_peer = torch.tensor(route.received, dtype=torch.int32, device="cpu").view(-1, n_scaleup_ranks).sum(0)
    handle.psum_num_recv_tokens_per_scaleup_rank.copy_(per_peer.cumsum(0))
    handle.psum_num_recv_tokens_per_expert.copy_(torch.tensor(route.expert_ends(), dtype=torch.int32, device="cpu"))
    handle.num_unaligned_recv_tokens_per_expert.copy_(torch.tensor(route.expert_counts, dtype=torch.int32, device="cpu"))


def return_rows(comm, route, rows, each_choice, n_biases):
    """Returns what token_sums adds, behind the room for the biases: sends rows_to_send's rows to their tokens' ranks. The call is
    collective."""
    received, sent = route.received, route.sent
    if each_choice:
        received = [int(part.sum()) for part in (route.slots >= 0).sum(1).split(route.received)]
        sent = torch.bincount(route.owner.view(-1) + 1, minlength=route.n_ranks + 1)[1:].tolist()
    room = n_biases * route.n_tokens
    whole = comm.scratch(room + sum(sent), rows.size(1), rows.dtype, rows.device, "returned rows")
    comm.all_to_all_v(rows, received, whole[room:], sent)
    return whole


def rows_to_send(comm, route, x, each_choice, alone):
    """Returns the rows of x that combine sends. each_choice: the rows of a token's experts return one by one, and not as their sum (only
    with do_expand). alone: an Alone."""
    if not route.expand:
        return x[:route.n_rows].contiguous()
    if not each_choice:
        rows = comm.scratch(route.n_rows, x.size(1), x.dtype, x.device, "rows")
        route.expert_sums().run(alone, x.contiguous(), (), rows)
        return rows
    filled = route.slots >= 0
    slots = route.slots[filled]
    source = torch.arange(route.n_ranks, device=slots.device).repeat_interleave(torch.tensor(route.received, device=slots.device))
    slots = slots[(source.unsqueeze(1).expand_as(filled)[filled] * (x.size(0) + 1) + slots).argsort()]  # by (source, expert, token)
    rows = comm.scratch(slots.numel(), x.size(1), x.dtype, x.device, "rows")
    if slots.numel():
        torch.index_select(x, 0, slots, out=rows)
    return rows


def combine_weights(comm, route, weights, out):
    """out[T, k] = for each choice its weight in the row of its rank, 0 for no choice. The call is collective.

    weights: float32 [rows, k], or with do_expand [rows]."""
    if route.expand:
        filled = route.slots >= 0
        rows = weights.new_zeros(route.slots.shape)
        rows[filled] = weights[route.slots[filled]]
    else:
        rows = weights[:route.n_rows].contiguous()
    back = weights.new_empty((sum(route.sent), route.top_k))
    comm.all_to_all_v(rows, route.received, back, route.sent)
    out.fill_(0)
    chosen = route.owner >= 0
    token, choice = chosen.nonzero(as_tuple=True)
    out[token, choice] = back[route.returned_rows()[chosen], choice]
