# SPDX-License-Identifier: Apache-2.0
"""What deep_ep_elastic_test.py compares with: V2's results for the inputs of all ranks, computed densely on each rank."""
import os

import torch
from deep_ep_support import DEEP_EP, close, expected_dispatch, in_rank_of, inputs, same

MIB2 = 2 << 20


def make(group, **more):
    """Makes the ElasticBuffer of a test."""
    more = {"num_bytes": 8 * MIB2, "num_cpu_bytes": 4 * MIB2, "num_cpu_timeout_secs": 60, "explicitly_destroy": True, **more}
    return DEEP_EP().ElasticBuffer(group, **more)


def fp8_of(x, kind=torch.float32):
    """Returns rows of fp8 and scales."""
    return x.to(torch.float8_e4m3fn), (1000 * x[:, :7].float()).to(kind).contiguous()


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def several_hosts():
    return bool(os.environ.get("MOECCL_HOST_ID"))


def output_of(x, expert):
    """Returns what the experts, int64 [T], make of the tokens x[T, H]; no two do the same."""
    return (x.float() * (1 + expert.unsqueeze(1)) / 7).to(x.dtype)


class Case:
    """A rank's view of one case: its own inputs, those of all ranks, and the usual calls."""

    def __init__(self, buffer, n_tokens, hidden=64, n_experts=16, top_k=4, **more):
        self.buffer, self.rank, self.n_ranks, self.n_experts, self.top_k = buffer, buffer.rank_idx, buffer.num_ranks, n_experts, top_k
        self.n_local = n_experts // self.n_ranks
        counts = n_tokens if isinstance(n_tokens, list) else [n_tokens] * self.n_ranks
        self.most = max([*counts, 1]) + 3
        self.take([inputs(r, counts[r], hidden, n_experts, top_k, **more) for r in range(self.n_ranks)])

    def take(self, all_inputs):
        """Has these inputs of all ranks."""
        self.all = all_inputs
        self.x, self.idx, self.weights = all_inputs[self.rank]
        return self

    def dispatch(self, x=None, **more):
        more = {"topk_idx": self.idx, "topk_weights": self.weights, "num_experts": self.n_experts, "num_max_tokens_per_rank": self.most,
                **more}
        return self.buffer.dispatch(self.x if x is None else x, **more)

    def received(self):
        """Returns (rows, local choices, weights, source rank, token) of what arrives here, in order."""
        return expected_dispatch(self.all, self.rank, self.n_experts)

    def counts(self):
        local = self.received()[1]
        return [int((local == e).sum()) for e in range(self.n_local)]

    def places(self, align):
        """Returns int64 [rows, k], where expanded rows lie, -1 for choices that are no expert here; and the number of rows."""
        local = self.received()[1]
        slots, begin = torch.full_like(local, -1), 0
        for expert, count in enumerate(self.counts()):
            at = (local == expert).nonzero()
            slots[at[:, 0], at[:, 1]] = begin + torch.arange(count)
            begin += round_up(count, align)
        return slots, begin

    def expanded(self, rows, align):
        """Returns the expanded form of received rows[R, ...], or of values [R, k] for each choice; zeros in the gaps."""
        slots, n = self.places(align)
        row, choice = (slots >= 0).nonzero(as_tuple=True)
        values = rows[row, choice] if rows.dim() == 2 and rows.shape == slots.shape else rows[row]
        out = rows.new_zeros((n, *values.shape[1:]))
        out[slots[row, choice]] = values
        return out

    def outputs(self, align=None):
        """Returns what combine gets from this rank: the sum over its experts of their outputs, or with align each of them."""
        rows, local, _, _, _ = self.received()
        if align is None:
            return self._summed(rows, torch.where(local >= 0, local + self.rank * self.n_local, -1)).to(rows.dtype)
        slots, n = self.places(align)
        out = rows.new_full((n, rows.size(1)), float("nan"))  # gaps are not read
        for choice in range(self.top_k):
            here = slots[:, choice] >= 0
            out[slots[here, choice]] = output_of(rows[here], local[here, choice] + self.rank * self.n_local)
        return out

    @staticmethod
    def _summed(x, experts):
        """Returns the sums over these experts, int64 [T, k] with -1 for none, in their order and without rounding."""
        total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        for choice in range(experts.size(1)):
            here = experts[:, choice] >= 0
            total[here] += output_of(x[here], experts[here, choice])
        return total

    def combined(self, biases=(), each_choice=False):
        """Returns combine's result to the bit: biases, then the rows in the order of choices, a rank's at its last one."""
        total = torch.zeros(self.x.shape, dtype=torch.promote_types(self.x.dtype, torch.float32))
        for bias in biases:
            total += bias
        if each_choice:
            for choice in range(self.top_k):
                here = self.idx[:, choice] >= 0
                total[here] += output_of(self.x[here], self.idx[here, choice])
            return total.to(self.x.dtype)
        owner = torch.where(self.idx >= 0, self.idx // self.n_local, -1)
        for choice in range(self.top_k):
            last = (owner[:, choice] >= 0) & (owner[:, choice + 1:] != owner[:, choice:choice + 1]).all(1)
            of_rank = torch.where(owner == owner[:, choice:choice + 1], self.idx, -1)
            total[last] += self._summed(self.x[last], of_rank[last]).to(self.x.dtype)
        return total.to(self.x.dtype)

    def check(self, result, rows=None):
        """Checks the result of a dispatch without do_expand, and returns its handle."""
        got, idx, weights, handle, _ = result
        expected = self.received()
        same(got, expected[0] if rows is None else rows)
        same(idx, expected[1].to(idx.dtype))
        same(weights, expected[2])
        return handle

    def check_expanded(self, result, align=1):
        """Checks the result of a dispatch with do_expand, and returns its handle."""
        got, none, weights, handle, _ = result
        rows, _, given, _, _ = self.received()
        assert none is None
        same(got, self.expanded(rows, align))
        same(weights, self.expanded(given, align))
        return handle

    def check_combine(self, handle, align=None, each_choice=False, biases=None, tolerance=None):
        """Checks combine of the experts' outputs, and of the weights that arrived. tolerance: None for equal bits."""
        weights = self.received()[2]
        given = () if biases is None else tuple(b for b in (biases if isinstance(biases, tuple) else (biases, )) if b is not None)
        out, out_weights, _ = self.buffer.combine(
            self.outputs(align), handle, topk_weights=weights if align is None else self.expanded(weights, align), bias=biases)
        expected = self.combined(given, each_choice)
        planned = several_hosts() and self.buffer.allow_hybrid_mode and self.buffer.allow_multiple_reduction
        if tolerance is None and not planned:
            same(out, expected)
        else:
            close(out, expected, tolerance or {2: 0.06, 4: 1e-6, 8: 1e-14}[expected.element_size()])
        same(out_weights, torch.where(self.idx >= 0, self.weights, 0.0))


def rows_per_rank(case):
    """Returns the rows that each rank sends here."""
    return [int(in_rank_of(idx, case.n_experts, case.n_ranks)[:, case.rank].sum()) for _, idx, _ in case.all]
