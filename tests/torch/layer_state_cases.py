# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about what a layer keeps or repeats: recomputed steps, copies, generators, and handles that end."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeccl.torch as mt

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
    for shared in (None, 8):
        for behind in (False, True):
            expected, moved = gradients_of_steps(rank, n, shared, behind, lambda work, x: work(x))
            # Between two ranks, the residual's own row costs what a move saves.
            assert moved > 0 or shared and n == 2, "no sample moved, so nothing could differ"
            for reentrant in (False, True):
                got, _ = gradients_of_steps(rank, n, shared, behind, lambda work, x: checkpoint(work, x, use_reentrant=reentrant))
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{shared}, {behind}, {reentrant}: {m}")
