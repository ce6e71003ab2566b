# SPDX-License-Identifier: Apache-2.0
"""What deep_ep_hybrid_test.py compares with: the inputs of all ranks and a dense reference, which every rank
computes."""
import torch

from deep_ep_support import DEEP_EP, DEVICE, close, same


def make(group, hidden_dim=64, n_experts=16, **more):
    """Returns this rank's HybridEPBuffer."""
    return DEEP_EP().HybridEPBuffer(group, hidden_dim, 64, n_experts // group.size(), **more)


def inputs(rank, n, hidden, n_experts, top_k, dtype=torch.bfloat16, holes=True, seed=0):
    """Returns (hidden, routing_map, probs) of a rank. With holes, tokens have fewer experts than top_k, and the first
    has none."""
    random = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    x = torch.randn((n, hidden), generator=random, device="cpu").to(dtype)
    scores = torch.rand((n, n_experts), generator=random, device="cpu")
    chosen = torch.zeros((n, n_experts), dtype=torch.bool, device="cpu")
    chosen.scatter_(1, scores.topk(top_k, dim=1).indices, True)
    if holes and n:
        chosen &= torch.rand((n, n_experts), generator=random, device="cpu") > 0.2
        chosen[0] = False
    return x.to(DEVICE), chosen.to(DEVICE), (scores * chosen).to(DEVICE)


def pick(tensor, index):
    """Returns tensor[index] for any type."""
    return tensor.view(torch.uint8)[index].view(tensor.dtype) if tensor.element_size() == 1 else tensor[index]


class Case:
    """A rank's view of one case: its own inputs, those of all ranks, and what a dispatch brings."""

    def __init__(self, buffer, n_tokens, hidden=64, n_experts=16, top_k=4, **more):
        self.buffer, self.rank, self.n_ranks, self.n_experts = buffer, buffer.rank, buffer.group_size, n_experts
        counts = n_tokens if isinstance(n_tokens, list) else [n_tokens] * self.n_ranks
        self.take([inputs(r, counts[r], hidden, n_experts, top_k, **more) for r in range(self.n_ranks)])

    def take(self, all_inputs):
        """Has these inputs of all ranks."""
        self.all = all_inputs
        self.x, self.map, self.probs = self.all[self.rank]
        self.n_local = self.n_experts // self.n_ranks
        self.first = self.rank * self.n_local
        own = slice(self.first, self.first + self.n_local)
        self.local_maps = [chosen[:, own] for _, chosen, _ in self.all]
        self.local_probs = [probs[:, own] for _, _, probs in self.all]
        return self

    def of(self, part):
        """Returns a part of each rank's inputs, from what a function makes of its tokens."""
        return [part(x) for x, _, _ in self.all]

    def dense(self, parts):
        """Returns the rows of these tensors, one for each rank, that dispatch brings here."""
        return torch.cat([pick(part, local.any(dim=1)) for part, local in zip(parts, self.local_maps)])

    def counts(self, align=1):
        """Returns the rows of each local expert, with padding."""
        totals = sum(local.sum(dim=0) for local in self.local_maps).tolist()
        return [-(-total // align) * align for total in totals]

    def permuted(self, parts, align=1):
        """Returns the rows of these tensors that dispatch_with_permute brings here."""
        groups = []
        for e, padded in enumerate(self.counts(align)):
            rows = torch.cat([pick(part, local[:, e]) for part, local in zip(parts, self.local_maps)])
            zeros = torch.zeros((padded - rows.size(0), *rows.shape[1:]), dtype=torch.uint8, device=rows.device)
            groups += [rows, zeros.to(rows.dtype)]
        return torch.cat(groups)

    def permuted_probs(self, align=1):
        columns = [[probs[:, e] for probs in self.local_probs] for e in range(self.n_local)]
        groups = []
        for e, padded in enumerate(self.counts(align)):
            rows = torch.cat([column[local[:, e]] for column, local in zip(columns[e], self.local_maps)])
            groups += [rows, rows.new_zeros(padded - rows.size(0))]
        return torch.cat(groups)

    def dispatch(self, **more):
        return self.buffer.dispatch(**{"hidden": self.x, "routing_map": self.map, "probs": self.probs, **more})

    def permute(self, **more):
        usual = {"hidden": self.x, "routing_map": self.map, "probs": self.probs}
        return self.buffer.dispatch_with_permute(**{**usual, **more})

    def check_dense(self, result):
        """Checks the result of a dispatch, and returns its handle."""
        rows, probs, scales, handle = result
        same(rows, self.dense(self.of(lambda x: x)))
        width = self.n_local * self.buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
        at = self.buffer.local_rank * self.n_local
        expected = torch.zeros((rows.size(0), width), dtype=torch.float32)
        expected[:, at:at + self.n_local] = self.dense(self.local_probs)
        same(probs, expected)
        assert scales is None and len(handle) == 7
        assert handle[3].tolist() == [rows.size(0)] and handle[5] == self.x.size(0)
        same(handle[4], self.dense(self.local_maps))
        return handle

    def check_permuted(self, result, align=1):
        """Checks the result of a dispatch_with_permute, and returns its handle."""
        rows, probs, scales, counts, handle = result
        same(rows, self.permuted(self.of(lambda x: x), align))
        same(probs, self.permuted_probs(align))
        assert scales is None and counts.dtype == torch.int64 and counts.tolist() == self.counts(align)
        assert len(handle) == 11 and handle[7].tolist() == self.counts()
        assert handle[8] == self.x.size(0) and handle[10].tolist() == [0]
        same(handle[4], self.dense(self.local_maps))
        assert handle[3].tolist() == [handle[4].size(0)]
        return handle

    def factors(self):
        """Returns for each of this rank's tokens the sum over its rows of the row's rank plus 1: (of dense rows, of
        permuted rows)."""
        owners = self.map.view(self.map.size(0), self.n_ranks, self.n_local).sum(dim=2)
        scale = torch.arange(1, self.n_ranks + 1)
        return [(per_rank * scale).sum(dim=1, keepdim=True).double() for per_rank in ((owners > 0).long(), owners)]

    def check_combine(self, handle, dtype=None, tolerance=0.02):
        """Checks combine of rows that each rank has multiplied by its number plus 1, with probs and without."""
        dtype = dtype or self.x.dtype
        rows = (self.dense(self.of(lambda x: x.to(dtype))) * (self.rank + 1)).to(dtype)
        width = self.n_local * self.buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
        probs = torch.zeros((rows.size(0), width), dtype=torch.float32)
        at = self.buffer.local_rank * self.n_local
        probs[:, at:at + self.n_local] = self.dense(self.local_probs)
        for given in (probs, None):
            out, back = self.buffer.combine(rows, given, handle)
            assert out.dtype == dtype
            close(out, self.x.to(dtype).double() * self.factors()[0], tolerance)
            assert back is None if given is None else torch.equal(back, self.probs)

    def check_unpermute(self, handle, align=1, dtype=None, tolerance=0.02):
        """Does the same for combine_with_unpermute; padding is not read."""
        dtype = dtype or self.x.dtype
        rows = self.permuted(self.of(lambda x: x.to(dtype)), align) * (self.rank + 1)
        rows[self.permuted([torch.ones(x.size(0)) for x, _, _ in self.all], align) == 0] = float("nan")
        for probs in (self.permuted_probs(align), None):
            out, back = self.buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle, pad_multiple=align)
            assert out.dtype == dtype
            close(out, self.x.to(dtype).double() * self.factors()[1], tolerance)
            assert back is None if probs is None else torch.equal(back, self.probs)
