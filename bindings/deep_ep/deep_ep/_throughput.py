# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine of V1's high-throughput calls: one row for each pair of a token and a rank that it goes to.

They use the routing of a MoECCL layer in the Rows layout whose "experts" are the ranks; is_token_in_rank determines it
completely. So experts and top-k have no limits, tokens cross each level of the topology once, and sums are formed on
the way back. Scales of fp8 rows, choices and their weights travel with their rows, as the layer's scales."""
import torch

from . import _native, _rows
from ._check import check_same

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
SAME = {  # what all ranks pass alike, and how an error shows it
    "dtype of x": lambda n: _DTYPES[n], "columns of x": str, "bytes of scales a row": str,
    "columns of topk_idx": lambda n: n if n >= 0 else "None"}
_N_TOKENS, _FAN, _WORST = range(len(SAME), len(SAME) + 3)
_FIELDS = len(SAME) + 3


class State(_rows.Routed):
    """What is behind a handle; its "experts" are the ranks."""

    def __init__(self, is_token_in_rank):
        super().__init__(*is_token_in_rank.shape, is_token_in_rank.size(1))
        self.is_token_in_rank = is_token_in_rank
        self.n_out = 0  # rows of the tensors that hold the received ones

    def set_counts(self, comm, fan, most_tokens, sent, received):
        """Takes the largest number of ranks that a token goes to and of tokens on a rank, and the rows to and from each rank."""
        if fan > _native.MOST_CHOICES:
            raise ValueError(f"a token goes to {fan} ranks: MoECCL sends one to at most {_native.MOST_CHOICES}")
        self.index = self.targets(min(self.n_ranks, _power_of_two(fan)))
        self.max_tokens = comm.room_for(most_tokens)
        self.sent, self.received, self.n_rows = sent, received, sum(received)

    def targets(self, fan):
        """Returns the ranks that each token goes to, int32 [T, fan]; -1 for none."""
        ranks = torch.arange(self.n_ranks, dtype=torch.int32, device=self.is_token_in_rank.device)
        index = torch.where(self.is_token_in_rank, ranks, ranks.new_full((), -1))
        return (index if fan == self.n_ranks else index.topk(fan, dim=1).values).contiguous()


def _power_of_two(n):
    """Returns the power of two that is n or the next larger one."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


class Rows(_rows.Rows):
    """The rows of one dispatch: x, and the parts that travel with each row packed into one tensor of bytes."""

    def __init__(self, x, topk_idx=None, topk_weights=None):
        x, self.scales = x if isinstance(x, tuple) else (x, None)
        self.topk_idx, self.topk_weights = topk_idx, topk_weights
        self.parts = []
        if self.scales is not None:
            self.parts.append(self.scales.contiguous())
        if topk_idx is not None:
            self.parts.append(topk_idx.to(torch.int32).contiguous())
        if topk_weights is not None:
            self.parts.append(topk_weights.contiguous())
        self.widths = [p.size(1) * p.element_size() for p in self.parts]
        super().__init__(x, (self.scales, topk_idx, topk_weights), sum(self.widths) if self.parts else None)

    def header(self, fan, worst):
        top_k = self.topk_idx.size(1) if self.topk_idx is not None else -1
        scales = self.widths[0] if self.scales is not None else 0
        return [_DTYPES.index(self.x.dtype), self.x.size(1), scales, top_k, self.x.size(0), fan, worst]

    def receive(self, comm, state, out):
        """Sends the rows and fills out[:n_rows]. Returns the parts that travel with them, each as bytes [n_rows, width]."""
        routing = self.routing(comm, state)
        if not self.parts:
            routing.dispatch(self.x, out)
            return []
        beside = torch.cat([_dense(p).view(torch.uint8) for p in self.parts], dim=1)
        received = comm.scratch(state.n_rows, self.scale_bytes, torch.uint8, self.x.device)
        routing.dispatch_scaled(self.x, beside, out, received)
        return [_dense(p) for p in received.split(self.widths, dim=1)]

    def move(self, comm, state, outputs, n_local):
        """Sends the rows and fills the outputs; rows beyond those received are zeros without choices."""
        n = state.n_rows
        out, scales, idx, weights = outputs
        pieces = self.receive(comm, state, out)
        if scales is not None:
            scales[:n].copy_(pieces.pop(0).view(scales.dtype))
        if idx is not None:
            local, elsewhere = own_choices(pieces[0].view(torch.int32), comm.rank, n_local)
            idx[:n].copy_(local)
            weights[:n].copy_(pieces[1].view(torch.float32).masked_fill_(elsewhere, 0))
        for tensor, rest in ((out, 0), (scales, 0), (idx, -1), (weights, 0)):
            if tensor is not None:
                fill(tensor[n:], rest)


def own_choices(idx, rank, n_local):
    """Returns (this rank's expert numbers of the choices idx, with -1 for the experts of others; which ones those are)."""
    local = idx - rank * n_local
    elsewhere = (local < 0) | (local >= n_local)
    return local.masked_fill_(elsewhere, -1), elsewhere


def fill(tensor, value):
    """Fills contiguous rows of any type with this value."""
    if tensor.size(0):
        tensor.view(torch.uint8 if value == 0 else tensor.dtype).fill_(value)


def _dense(part):
    """Returns a copy that .view() takes for another type. contiguous() leaves a part of one row, one column or none where it is."""
    return part.clone(memory_format=torch.contiguous_format)


def agree(comm, rows, state, num_tokens_per_expert, worst):
    """Exchanges the counts that ranks need from each other before rows move. The call is collective.

    Returns (int32 [ranks, ranks] on the CPU: tokens from each rank to each rank, tokens for each of this rank's experts)."""
    counts = state.is_token_in_rank.sum(dim=0, dtype=torch.int32).cpu()
    fan = int(state.is_token_in_rank.sum(dim=1).max()) if state.n_tokens else 0
    n_local = num_tokens_per_expert.numel() // comm.size
    send = torch.empty((comm.size, _FIELDS + comm.size + n_local), dtype=torch.int32, device="cpu")
    send[:, :_FIELDS] = torch.tensor(rows.header(fan, worst), dtype=torch.int32, device="cpu")
    send[:, _FIELDS:_FIELDS + comm.size] = counts
    send[:, _FIELDS + comm.size:] = num_tokens_per_expert.cpu().view(comm.size, n_local)
    recv = comm.all_to_all(send)
    headers = recv[:, :_FIELDS].tolist()
    check_same("dispatch", SAME, headers)
    matrix = recv[:, _FIELDS:_FIELDS + comm.size].contiguous()
    totals = matrix.sum(dim=0).tolist()
    for rank, header in enumerate(headers):
        if 0 < header[_WORST] < totals[rank]:
            raise ValueError(f"num_worst_tokens of rank {rank} is {header[_WORST]}, and {totals[rank]} tokens go there: "
                             "give the tokens of all ranks together")
    state.set_counts(comm, max(header[_FAN] for header in headers), max(header[_N_TOKENS] for header in headers), counts.tolist(),
                     matrix[:, comm.rank].tolist())
    return matrix, recv[:, _FIELDS + comm.size:].sum(dim=0, dtype=torch.int32).tolist()


def source_rows(comm, rows, state, out):
    """out[:n_rows] = the index of each row's token on its source rank."""
    info = rows.routing(comm, state).info()
    if info.n_rows != state.n_rows:
        raise RuntimeError(f"the routing has {info.n_rows} rows, the ranks announced {state.n_rows}")
    if state.n_rows:
        out[:state.n_rows] = _native.int32_tensor(info.row_token, state.n_rows, out.device)


def combine_weights(comm, state, weights):
    """Returns float32 [T, k]: for each token the sum over its rows of weights[n_rows, k]. The call is collective."""
    weights = weights[:state.n_rows].contiguous()
    back = weights.new_empty((sum(state.sent), weights.size(1)))
    comm.all_to_all_v(weights, state.received, back, state.sent)
    tokens = state.is_token_in_rank.t().nonzero()[:, 1]  # in the order of (rank, token), the order of arrival
    return weights.new_zeros((state.n_tokens, weights.size(1))).index_add_(0, tokens, back)


def combine_rows(comm, state, x, out):
    """out[T, H] = for each token the sum over its rows of x. The call is collective."""
    x = x[:state.n_rows].contiguous()
    state.routing(comm, x.size(1) * x.element_size(), _native.TYPES[x.dtype]).combine(x, out)


def add_biases(biases, out):
    """Adds each of the biases[T, H] to out, in fp32 (fp64 for fp64), and rounds once."""
    if biases:
        total = out.to(torch.promote_types(out.dtype, torch.float32))
        for bias in biases:
            total += bias.to(total.dtype)
        out.copy_(total)
