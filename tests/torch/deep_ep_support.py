# SPDX-License-Identifier: Apache-2.0
"""What deep_ep_test.py compares with: the inputs of all ranks, a dense reference, and streams that stand in for CUDA's."""
import contextlib
import functools
import os

import torch

DEVICE = os.environ.get("DEEP_EP_TEST_DEVICE", "cpu")
STAND_IN = DEVICE == "stand-in"  # whose gradients torch makes as CPU tensors
if STAND_IN:
    import cuda_stand_in
    cuda_stand_in.install()
    DEVICE = "cuda"


def use_device():
    """Lets this process make its tensors on DEVICE."""
    if DEVICE != "cpu":
        torch.cuda.set_device(0)
        torch.cuda.init()
        torch.set_default_device(DEVICE)


def inputs(rank, n, hidden, n_experts, top_k, dtype=torch.bfloat16, holes=True, seed=0):
    """Returns the inputs of a rank; every rank can compute those of all others."""
    random = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    draw = functools.partial(torch.rand, generator=random, device="cpu")
    x = torch.randn((n, hidden), generator=random, device="cpu").to(dtype)
    idx = draw((n, n_experts)).topk(top_k, dim=1).indices
    if holes and n:
        idx[draw((n, top_k)) < 0.2] = -1
        idx[0] = -1
    return x.to(DEVICE), idx.to(DEVICE), draw((n, top_k)).to(DEVICE)


def in_rank_of(idx, n_experts, n_ranks):
    owner = torch.where(idx >= 0, idx // (n_experts // n_ranks), -1)
    return torch.stack([(owner == r).any(dim=1) for r in range(n_ranks)], dim=1)


def expected_dispatch(all_inputs, rank, n_experts):
    """Returns (rows, local choices, weights, source rank, token) that this rank receives, in order."""
    n_ranks, n_local = len(all_inputs), n_experts // len(all_inputs)
    parts = [[], [], [], [], []]
    for source, (x, idx, weights) in enumerate(all_inputs):
        here = in_rank_of(idx, n_experts, n_ranks)[:, rank]
        local = idx[here] - rank * n_local
        own = (local >= 0) & (local < n_local)
        tokens = here.nonzero()[:, 0]
        rows = x.view(torch.uint8)[here].view(x.dtype) if x.element_size() == 1 else x[here]  # torch up to 2.8 cannot index float8
        for part, value in zip(parts, (rows, torch.where(own, local, -1), torch.where(own, weights[here], 0.0),
                                       torch.full_like(tokens, source), tokens)):
            part.append(value)
    return [torch.cat(part) for part in parts]


def close(got, expected, tolerance):
    assert got.shape == expected.shape, f"{got.shape} and {expected.shape}"
    if got.numel():
        worst = ((got.double() - expected.double()).abs() / (1 + expected.double().abs())).max().item()
        assert worst <= tolerance, f"differs by {worst}, {tolerance} is allowed"


def same(got, expected):
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{got.dtype} {got.shape}, {expected.dtype} {expected.shape}"
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def raises(kind, words, call):
    try:
        call()
    except kind as failure:
        assert words in str(failure), f"{failure} does not say {words!r}"
        return
    raise AssertionError(f"{kind.__name__} with {words!r} was not raised")


class Case:
    """A rank's view of one case: its own inputs, those of all ranks, and the usual calls."""

    def __init__(self, buffer, n_tokens, hidden=64, n_experts=16, top_k=4, **more):
        self.buffer, self.rank, self.n_ranks, self.n_experts = buffer, buffer.rank, buffer.group_size, n_experts
        counts = n_tokens if isinstance(n_tokens, list) else [n_tokens] * self.n_ranks
        self.all = [inputs(r, counts[r], hidden, n_experts, top_k, **more) for r in range(self.n_ranks)]
        self.x, self.idx, self.weights = self.all[self.rank]

    def layout(self):
        per_rank, per_host, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.idx, self.n_experts)
        return {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_host, "is_token_in_rank": in_rank,
                "num_tokens_per_expert": per_expert}

    def dispatch(self, x=None, **more):
        return self.buffer.dispatch(self.x if x is None else x, topk_idx=self.idx, topk_weights=self.weights, **self.layout(),
                                    **more)

    def expected(self):
        return expected_dispatch(self.all, self.rank, self.n_experts)

    def expected_counts(self):
        n_local = self.n_experts // self.n_ranks
        idx = torch.cat([i.reshape(-1) for _, i, _ in self.all])
        return [(idx == e).sum().item() for e in range(self.rank * n_local, (self.rank + 1) * n_local)]

    def check(self, result):
        """Checks the result of a dispatch, and returns its handle."""
        rows, idx, weights, counts, handle, _ = result
        expected = self.expected()
        same(rows, expected[0])
        same(idx, expected[1])
        same(weights, expected[2])
        assert counts == self.expected_counts(), f"{counts} and {self.expected_counts()}"
        return handle

    def check_combine(self, handle, dtype=None, tolerance=0.02):
        """Checks combine of rows that each rank has multiplied by its number plus 1."""
        dtype = dtype or self.x.dtype
        rows, idx, weights, _, _ = self.expected()
        out, out_weights, _ = self.buffer.combine((rows * (self.rank + 1)).to(dtype), handle, topk_weights=weights)
        factor = (in_rank_of(self.idx, self.n_experts, self.n_ranks) * torch.arange(1, self.n_ranks + 1)).sum(1, keepdim=True)
        close(out, (self.x.to(dtype) * factor).to(dtype), tolerance)
        same(out_weights, torch.where(self.idx >= 0, self.weights, 0.0))


class Streams:
    """Stands in for torch.cuda: streams whose work runs at once, and that know which streams' work theirs comes after."""

    class Stream:
        def __init__(self, device=None):
            self.after = set()

        def wait_stream(self, other):
            self.after |= other.after

        def wait_event(self, event):
            self.after |= event.after

        def synchronize(self):
            pass

    class Event:
        def record(self, stream):
            self.after = set(stream.after)

    def __init__(self):
        self._current = [self.Stream()]

    def is_initialized(self):
        return True

    def current_stream(self, device=None):
        return self._current[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def device(self, device):
        return contextlib.nullcontext()


def on_streams(buffer):
    """Lets calls take the way of CUDA tensors. Returns the streams, and what was recorded on which stream."""
    from deep_ep._stream import CudaStream
    recorded = []

    class Recording(CudaStream):
        def _record(self, tensor, stream):
            recorded.append((tensor.data_ptr(), stream))

    streams = Streams()
    way = Recording(torch.device("cpu"), buffer._stream, streams)
    buffer._stream_for = lambda device: way
    return streams, recorded


def DEEP_EP():
    import deep_ep
    return deep_ep


def reused(dispatch):
    """Expects that a result's memory is used again when neither it nor a view of it is there any more, and no sooner. dispatch: makes the
    call and returns its results, rows first. Returns the last ones."""
    rows = dispatch()[0]
    address, part = rows.data_ptr(), rows[3:5]
    kept = part.clone()
    del rows
    second = dispatch()[0]
    assert second.data_ptr() != address and torch.equal(part, kept)  # a view is enough to keep it
    del part
    third = dispatch()
    assert third[0].data_ptr() == address
    return third
