# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about what a layer keeps or repeats: recomputed steps, copies, generators, and handles that end; and what
may change in place."""
import copy
import gc
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeccl.torch as mt
from moeccl.torch.experts import Experts
from layer_model_cases import alone

HIDDEN, EXPERTS, SAMPLE, SAMPLES = 8, 4, 4, 16
TOKENS = SAMPLE * SAMPLES


def gradients_of_steps(rank, n, shared, behind, run, steps=10):
    """Trains on one batch. Returns the gradients of x, router, experts and the layer behind, of each step, and how many samples moved."""
    torch.manual_seed(0)
    options = {"topology": "node:2 gpu:%d" % (n // 2)} if n > 2 else {}
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=16, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, norm=nn.LayerNorm(HIDDEN),
                        shared_expert=shared, aux_loss_weight=0, comm_options=options)
    head = nn.Linear(HIDDEN, HIDDEN)
    every, moved = [], 0
    with torch.no_grad():
        layer(torch.randn(TOKENS, HIDDEN))  # an evaluation must not shift the decisions of later steps either
    for _ in range(steps):
        g = torch.Generator().manual_seed(rank)
        like = torch.randn((SAMPLES, 1, HIDDEN), generator=g).expand(-1, SAMPLE, -1)  # so that a sample's tokens choose the same experts
        x = (like.reshape(TOKENS, HIDDEN) + 0.1 * torch.randn((TOKENS, HIDDEN), generator=g)).requires_grad_()
        y = run((lambda given: head(torch.tanh(layer(given)))) if behind else layer, x)
        moved += layer.step.moved
        factor = layer.follow(torch.arange(float(TOKENS)) / TOKENS + rank)
        (y * factor[:, None] * torch.arange(float(HIDDEN))).sum().backward()
        sums = [head.weight.grad] if behind else []
        for module in (layer.router, layer.norm, layer.shared_expert):  # of the samples that are here, so summed over ranks
            sums += [] if module is None else [p.grad for p in module.parameters()]
        for grad in sums:
            dist.all_reduce(grad)
        every.append([g.clone() for g in (x.grad, *(w.grad for w in layer.experts.stacked()), *sums)])
        layer.zero_grad()
        head.zero_grad()
    return every, moved


def case_a_recomputed_step_moves_the_same_samples(rank, n):
    for shared, behind in ((None, False), (None, True), (8, True)):
        expected, moved = gradients_of_steps(rank, n, shared, behind, lambda work, x: work(x))
        # Between two ranks, the residual's own row costs what a move saves.
        assert moved > 0 or shared and n == 2, "no sample moved, so nothing could differ"
        for reentrant in (False, True):
            got, _ = gradients_of_steps(rank, n, shared, behind, lambda work, x: checkpoint(work, x, use_reentrant=reentrant))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{shared}, {behind}, {reentrant}: {m}")


class Fixed(nn.Module):
    """A router that chooses experts in turn, with weights that need no gradient."""

    def __init__(self, n_experts):
        super().__init__()
        self.n_experts = n_experts

    def forward(self, x):
        return torch.ones(len(x), 1), torch.arange(len(x))[:, None] % self.n_experts, None


class Shift(nn.Module):
    """An expert whose backward pass needs no tensor of the forward pass."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        return x + self.by


def case_all_ranks_recompute_at_the_same_point(rank, n):
    """Also one without experts, and where experts save nothing, so that nothing behind the dispatch would need a recomputation."""
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank))
    for n_experts, expert in ((1, lambda: nn.Linear(HIDDEN, HIDDEN)), (1, Shift), (n, Shift)):
        for options in ({}, {"domains": [1]}, {"sample_tokens": SAMPLE}):
            layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), mt.MoELayer(HIDDEN, n_experts, 1, expert=expert, max_tokens=TOKENS, seed=1,
                                                                         router=Fixed(n_experts), **options))
            got = []
            for run in (layer, lambda given: checkpoint(layer, given, use_reentrant=False)):
                given = x.clone().requires_grad_()
                run(run(given)).square().sum().backward()
                got.append([given.grad, *(p.grad.clone() for p in layer.parameters())])
                layer.zero_grad()
            torch.testing.assert_close(got[0], got[1], msg=lambda m: f"{n_experts}, {expert}, {options}: {m}")


def case_a_layer_leaves_all_generators_as_they_were(rank, n):
    """A generator that stands for a GPU's makes the experts' first values."""
    device = torch.Generator().manual_seed(7)
    before = device.get_state()

    def expert():
        made = nn.Linear(HIDDEN, HIDDEN)
        with torch.no_grad():
            made.bias.copy_(torch.rand(HIDDEN, generator=device))
        return made

    values = []
    with mock.patch("torch.cuda.is_initialized", lambda: True), mock.patch("torch.cuda.default_generators", (device,)), \
            mock.patch("torch.cuda.manual_seed_all") as seeds:
        for _ in range(2):
            layer = mt.MoELayer(HIDDEN, 2 * n, 1, expert=expert, max_tokens=4, seed=100)
            values.append(layer.experts.bias.detach())
        mt.MoELayer(HIDDEN, 2 * n, 1, expert=expert, max_tokens=4, seed=100, domains="auto")
        cpu = torch.get_rng_state()
        Experts(expert, [0, 1], 5)
        assert not seeds.called, "a layer seeds the generators of all devices"
    assert values[0].equal(values[1]) and not values[0][0].equal(values[0][1])
    assert device.get_state().equal(before) and torch.get_rng_state().equal(cpu)
    for slot, number in enumerate(layer.ep.local_experts):  # the values on CPU are those that its number seeds
        torch.manual_seed(100 + number)
        assert layer.experts.weight[slot].equal(nn.Linear(HIDDEN, HIDDEN).weight)


def case_the_first_expert_may_start_a_device(rank, n):
    device, on, drawn = torch.Generator().manual_seed(7), [], []

    def expert():
        on[:] = [True]  # as the first tensor on a GPU does
        made = nn.Linear(HIDDEN, HIDDEN)
        drawn.append(torch.rand(1, generator=device).item())
        return made

    with mock.patch("torch.cuda.is_initialized", lambda: bool(on)), mock.patch("torch.cuda.default_generators", (device,)):
        Experts(expert, [0, 1], 5)
    torch.manual_seed(5)
    assert len(drawn) == 3 and drawn[1] == torch.rand(1).item(), drawn


def case_a_copy_shares_the_expert_data_group(rank, n):
    group = dist.new_group()
    layer = mt.MoELayer(HIDDEN, EXPERTS, 1, ffn=8, max_tokens=4, seed=1, group=alone(), expert_data_group=group, average=False)
    x, grads = torch.randn((4, HIDDEN), generator=torch.Generator().manual_seed(rank)), []
    for each in (layer, copy.deepcopy(layer)):
        each(x).sum().backward()
        grads.append([w.grad for w in each.experts.stacked()])
    torch.testing.assert_close(grads[0], grads[1])


def case_a_rank_may_keep_the_graphs_of_earlier_steps(rank, n):
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, norm=nn.LayerNorm(HIDDEN))
    kept = []
    for _ in range(5):
        loss = layer(torch.randn(TOKENS, HIDDEN)).sum()
        loss.backward(retain_graph=rank == 0)
        if rank == 0:
            kept.append(loss)


def case_garbage_waits_for_no_peer(rank, n):
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, norm=nn.LayerNorm(HIDDEN))
    layer(torch.randn(TOKENS, HIDDEN)).sum().backward()
    comm = layer.comm
    layer.cycle = layer
    del layer
    gc.collect()
    waiting = len(comm._leftovers._handles)
    assert waiting >= 2, "the routing and the replacement are destroyed where garbage is collected"
    mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1)(torch.randn(TOKENS, HIDDEN))
    assert len(comm._leftovers._handles) == 0


def case_a_loss_that_is_kept_keeps_no_routing(rank, n):
    for options in ({}, {"dispatch_dtype": torch.float8_e4m3fn}, {"sample_tokens": SAMPLE, "norm": nn.LayerNorm(HIDDEN)}):
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, **options)
        kept, x, grads = [], torch.randn((TOKENS, HIDDEN), requires_grad=True), []
        for _ in range(3):
            loss = layer(x).square().sum()
            for retain in (True, False):
                x.grad = None
                loss.backward(retain_graph=retain)
                grads.append(x.grad.clone())
            kept.append((loss, weakref.ref(layer.handle)))
        torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
        layer(x)  # the layer itself has kept the last one
        try:
            loss.backward()
        except RuntimeError as error:
            assert "second time" in str(error), error
        else:
            raise AssertionError("a graph that was freed ran again")
        if hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph"):
            assert all(handle() is None for _, handle in kept), f"{options}: a loss keeps its routing"


def case_results_may_change_in_place(rank, n):
    for options in ({}, {"shared_expert": 8}, {"sample_tokens": SAMPLE, "comm_options": {"deterministic": 1}}):
        for weight in (0, 1.0):
            layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, aux_loss_weight=weight, trials=-1, **options)
            got = []
            for in_place in (False, True):
                x = torch.randn((2, TOKENS // 2, HIDDEN), generator=torch.Generator().manual_seed(rank)).requires_grad_()
                y = layer(x)
                if in_place:
                    y += x
                else:
                    y = y + x
                y.square().sum().backward()
                got.append([y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
                layer.zero_grad()
            torch.testing.assert_close(got[0], got[1], rtol=0, atol=0)


def case_experts_may_begin_in_place(rank, n):
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank))
    for options in ({}, {"replica_slots": EXPERTS // n + 1}, {"dispatch_dtype": torch.float8_e4m3fn}, {"compute_dtype": torch.float64}):
        got = []
        for in_place in (False, True):
            layer = mt.MoELayer(HIDDEN, EXPERTS, 2, seed=1, trials=-1, max_tokens=TOKENS, **options,
                                expert=lambda: nn.Sequential(nn.ELU(inplace=in_place), nn.Linear(HIDDEN, HIDDEN)))
            layer.router.linear.weight.data.fill_(0.1).add_(torch.arange(EXPERTS)[:, None] * 0.01)
            given = x.clone().requires_grad_()
            y = layer(given)
            y.square().sum().backward()
            got.append([y.detach(), given.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(got[0], got[1])


def case_experts_are_in_the_mode_of_the_layer(rank, n):
    """From the beginning, and without a change in a forward pass, which a graph of torch.compile could not have."""
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, expert=lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5)).eval(), seed=1, trials=-1)
    x = torch.ones(TOKENS, HIDDEN)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    with mock.patch.object(layer.experts._form[0], "train", side_effect=AssertionError("a forward pass has changed a module")):
        assert torch.equal(layer(x), layer(x))
    copied = copy.deepcopy(layer).train()
    assert not torch.equal(copied(x), copied(x)) and torch.equal(layer(x), layer(x))
