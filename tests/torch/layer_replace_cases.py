# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about sample re-placing by the clock."""
import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeccl
import moeccl.torch as mt
from layer_cases import gathered
from layer_checkpoint_cases import refuses
from moeccl.torch import _clock, replace
from moeccl.torch.functions import saved_gradients

EXPERTS, SAMPLE, SAMPLES = 8, 8, 16
TOKENS = SAMPLE * SAMPLES


class Elsewhere(nn.Module):
    """All tokens of a sample choose the two experts of one rank of the other node, so that samples had better move there."""

    def __init__(self, rank, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        chosen = (rank + n // 2 + torch.arange(SAMPLES) % (n // 2)) % n if n > 2 else torch.full((SAMPLES,), 1 - rank)
        first = (chosen * (EXPERTS // n)).repeat_interleave(SAMPLE)
        self.index = torch.stack([first, first + 1], 1)

    def forward(self, x):
        return 0.5 * self.scale.expand(self.index.shape), self.index, None


def layer_with(rank, n, hidden, options):
    torch.manual_seed(0)
    return mt.MoELayer(hidden, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, router=Elsewhere(rank, n), aux_loss_weight=0,
                       algorithm="hier:2" if n > 2 else "flat", comm_options=options)


def kept_in(layer, steps, hidden):
    kept = []
    for _ in range(steps):
        layer(torch.ones(TOKENS, hidden, requires_grad=True)).sum().backward()
        kept.append(layer.step.kept)
    same = gathered(torch.tensor(kept))
    assert all(one.equal(same[0]) for one in same), "ranks decide differently"
    return kept


def case_samples_move_over_slow_links(rank, n):
    if n < 4:
        return
    layer = layer_with(rank, n, 512, {"topology": f"node:2(bw=0.02GB/s) gpu:{n // 2}", "pace": 1})
    kept = kept_in(layer, 11, 512)
    assert kept == [False, True] * 4 + [False] * 3, kept
    with torch.no_grad():  # an evaluation goes on as training does
        layer(torch.ones(TOKENS, 512))
    assert not layer.step.kept and layer.step.moved > 0


def case_samples_stay_where_moving_does_not_pay(rank, n):
    """Between ranks of one host, the exchange of choices and the solver take longer than what a shorter way saves."""
    for _ in range(3):  # because the clock also counts what other programs do
        layer = layer_with(rank, n, 8, {"topology": f"node:2 gpu:{n // 2}"} if n > 2 else {})
        kept = kept_in(layer, 11, 8)
        if kept == [False, True] * 4 + [True] * 3:
            break
    else:
        raise AssertionError(kept)
    first = rank * SAMPLES
    assert (layer.step.local_samples, layer.step.n_samples, layer.step.moved) == (list(range(first, first + SAMPLES)), n * SAMPLES, 0)
    labels = torch.arange(TOKENS) + 1000 * rank
    assert layer.follow(labels).equal(labels)
    with torch.no_grad():
        x = torch.ones(TOKENS - (rank == 1), 8)
        layer.router.index = layer.router.index[:len(x)]
        refuses([f"rank 1 has {TOKENS - 1} tokens", f"sample_tokens, {SAMPLE}"], lambda: layer(x), moeccl.Error)


def case_a_deterministic_layer_does_not_ask_the_clock(rank, n):
    layer = layer_with(rank, n, 8, {"deterministic": 1, **({"topology": f"node:2 gpu:{n // 2}"} if n > 2 else {})})
    assert kept_in(layer, 10, 8) == [False] * 10


def case_the_clock_tries_again_now_and_then(rank, n):
    """As if passes took 100 us, and 150 or 50 where samples move."""
    class Step:
        pass

    def decisions(steps, moving_us):
        clock, found, steps_us = _clock.Clock(), [], {True: moving_us, False: 100}
        for i in range(steps):
            clock.decide(mt.comm_of())
            found.append(clock.moves)
            step, clock.ran = Step(), lambda begun: None
            clock.begin(step)
            clock._spent_us += steps_us[clock.moves] * (50 if i < 2 else 1)  # the first of each kind is cold
            clock.ran_backward(step, 0)
        return found

    turns = [True, False] * 4
    assert decisions(40, 150) == turns + [False] * 4 + [True] + [False] * 8 + [True] + [False] * 16 + [True] + [False]
    found = decisions(8 + 130, 50)
    assert found[:8] == turns and [i for i, moves in enumerate(found[8:]) if not moves] == [63, 127], found


def case_a_decision_lasts_while_passes_wait(rank, n):
    """Pipeline schedules interleave: the second pass recomputes after the third has begun."""
    hidden = 16

    def gradients(run, interleaved):
        layer, found = layer_with(rank, n, hidden, {"topology": f"node:2 gpu:{n // 2}"} if n > 2 else {}), []

        def forward(i):
            x = torch.randn((TOKENS, hidden), generator=torch.Generator().manual_seed(10 * i + rank)).requires_grad_()
            y = run(layer, x)
            factor = layer.follow(torch.arange(float(TOKENS)) / TOKENS + rank)
            return x, (y * factor[:, None] * torch.arange(float(hidden))).sum(), layer.step.kept

        for step in range(4):
            waiting = [forward(100 * step), forward(100 * step + 1)]
            for i in range(2, 5 if interleaved else 2):
                x, loss, kept = waiting.pop(0)
                loss.backward()
                found.append((kept, x.grad))
                waiting.append(forward(100 * step + i))
            for x, loss, kept in reversed(waiting):
                loss.backward()
                found.append((kept, x.grad))
        router = layer.router.scale.grad.clone()
        dist.all_reduce(router)
        return [kept for kept, _ in found], [grad for _, grad in found] + [w.grad for w in layer.experts.stacked()] + [router]

    for interleaved, passes, reentrant in ((True, 5, (False,)), (False, 2, (False, True))):
        kept, expected = gradients(lambda layer, x: layer(x), interleaved)
        assert kept == sum(([one] * passes for one in (False, True, False, True)), []), kept
        for how in reentrant:
            kept_again, got = gradients(lambda layer, x: checkpoint(layer, x, use_reentrant=how), interleaved)
            assert kept_again == kept, kept_again
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{interleaved}, {how}: {m}")


def case_follow_refuses_unequal_batches_on_all_ranks(rank, n):
    """One rank has as many samples as the ranks have on average."""
    layer = mt.MoELayer(8, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, trials=-1)
    samples = [1, 3, 2, 2][rank]
    for n_samples in (samples, samples, rank):  # moved or not; and a rank without samples
        with torch.no_grad():
            layer(torch.ones(SAMPLE * n_samples, 8))
        refuses(["follow() needs as many samples on every rank", f"{SAMPLE * n_samples}"], lambda: layer.follow(torch.arange(SAMPLE * n_samples)))
    with torch.no_grad():
        layer(torch.ones(0, 8))
    assert layer.follow(torch.empty(0, 3)).shape == (0, 3)


def case_ranks_whose_steps_ended_differently_go_on_after_renew(rank, n):
    """A failure comes behind combine's backward pass on some ranks and inside it on another, so that their clocks count other passes."""
    group = dist.new_group()
    layer = mt.MoELayer(8, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, group=group, comm_options={"timeout_ms": 5000})

    def forward():
        return layer(torch.ones(SAMPLE, 8, requires_grad=True)).sum()

    def fails(*arguments):
        raise RuntimeError("full")

    forward().backward()
    behind = layer.experts.register_full_backward_hook(fails)
    loss, in_combine = forward(), mock.patch.object(replace, "saved_gradients", lambda *a: fails(saved_gradients(*a)))
    with in_combine if rank == n - 1 else contextlib.nullcontext():
        refuses(["full"], loss.backward, RuntimeError)
    behind.remove()
    dist.barrier()
    mt.renew(layer)
    forward().backward()
    mt.close(group)
