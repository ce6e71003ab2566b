# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about expert domains: experts that travel, the codec, and gradients that return compressed."""
import torch

import moeccl
import moeccl.torch as mt
from layer_cases import gathered
from layer_model_cases import EXPERTS, HIDDEN, TOKENS, reference, same, train


def case_expert_domains_keep_the_loss(rank, n):
    options = {"topology": "node:2 gpu:%d" % (n // 2)} if n > 2 else {}
    for domains in ([[2, 1], [1, 2], [2, 2]] if n > 2 else [[2], [1]]):
        losses, model, _ = train(rank, 6, domains=domains, comm_options=options)
        held = len(model.layers[0].placement.held)
        assert held == EXPERTS // n * (domains[0] * (domains[1] if n > 2 else 1)), held
        same(losses, reference(n, 6)[0])


def case_domains_are_chosen(rank, n):
    """Large experts stay where they are for a few tokens; small experts travel over the slow level for many tokens."""
    options = {"topology": "node:%d(bw=1GB/s,lat=1us)" % n}
    few = mt.MoELayer(64, 2 * n, 2, ffn=512, domains="auto", max_tokens=4, comm_options=options)
    assert few.placement.domains == [1], few.placement.domains
    many = mt.MoELayer(64, 2 * n, 2, ffn=4, domains="auto", max_tokens=65536, comm_options=options)
    assert many.placement.domains == [n], many.placement.domains
    losses, model, _ = train(rank, 4, domains="auto", max_tokens=TOKENS, comm_options=options)
    same(losses, reference(n, 4)[0])
    assert len(model.layers[0].placement.held) == EXPERTS // n * model.layers[0].placement.domains[0]


def near_expert():
    """Returns an expert that differs little from all others, like those of a dense model that was made sparse."""
    noise = torch.random.get_rng_state()
    torch.manual_seed(77)
    made = mt.MLP(HIDDEN, 32)
    torch.random.set_rng_state(noise)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.02 * torch.randn_like(p)
    return made


def kept_by_codec(experts, ratio):
    """Returns what the codec leaves of experts [E, count] (one block): their mean, and the largest differences from it."""
    mean_of_all = experts.mean(0)
    rest = experts - mean_of_all
    least = rest.abs().topk(int(experts.shape[1] * 4 / (ratio * 6)), dim=1).values[:, -1:]
    return mean_of_all + torch.where(rest.abs() >= least, rest, torch.zeros_like(rest))


def case_the_codec_keeps_the_largest_differences(rank, n):
    options = {"topology": "node:2 gpu:%d" % (n // 2)} if n > 2 else {}
    kind = {"ffn": None, "expert": near_expert, "domains": [2, 1][:1 if n == 2 else 2], "comm_options": options}
    losses, model, _ = train(rank, 6, lr=1e-3, codec_ratio=5, **kind)
    expected, whole = reference(n, 6, lr=1e-3, ffn=None, expert=near_expert)
    same(losses, expected, 0.02)
    layer = model.layers[0]
    layer.placement.begin(layer.experts)
    held = torch.cat([w.flatten(1) for w in layer.placement.weights(layer.experts.stacked())], dim=1)
    own = torch.cat([w.detach().flatten(1) for w in layer.experts.stacked()], dim=1)
    every = torch.cat(gathered(own))
    torch.testing.assert_close(held.detach(), kept_by_codec(every, 5)[layer.placement.held], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(held.detach(), every[layer.placement.held], atol=1e-4)


def case_domains_follow_a_change_of_type(rank, n):
    def layer_with(**options):
        torch.manual_seed(4)
        return mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=256, max_tokens=TOKENS, seed=1, **options)

    plain, layer = layer_with(), layer_with(domains=[n])
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        y = layer.to(dtype)(x.to(dtype))
        y.sum().backward()
        torch.testing.assert_close(y, plain.to(dtype)(x.to(dtype)), rtol=0.02, atol=0.02)


def case_a_domain_may_hold_no_expert(rank, n):
    for options in ({}, {"gradient_ratio": 4}):
        torch.manual_seed(4)
        layer = mt.MoELayer(HIDDEN, 1, 1, ffn=8, max_tokens=TOKENS, seed=1, domains=[1], average=False, aux_loss_weight=0, **options)
        x = torch.ones(TOKENS, HIDDEN, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.abs().max() > 0
        if layer.placement.own:
            assert all(p.grad.abs().max() > 0 for p in layer.experts.parameters())


def case_compressed_gradients_arrive_or_remain(rank, n):
    def layer_with(**options):
        torch.manual_seed(4)  # of the router
        return mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, domains=[n], average=False, **options)

    def gradients(layer, step):
        layer.zero_grad()
        layer(torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(100 * step + rank))).square().sum().backward()
        return torch.cat([p.grad.flatten(1) for p in layer.experts.parameters()], dim=1)

    def kept_of(layer):
        # What all ranks have kept of this rank's experts.
        placement, kept = layer.placement, torch.zeros((EXPERTS, came.shape[1]))
        kept[[e for e in placement.held if e not in placement.own]] = layer.state_dict()["remainders._extra_state"]["remainders"]
        torch.distributed.all_reduce(kept)
        return kept[placement.own]

    exact, compressed = layer_with(), layer_with(gradient_ratio=4)
    assert not any("remainders" in key for key in exact.state_dict())
    state = layer_with(gradient_ratio=4).state_dict()
    assert state["remainders._extra_state"] == {"remainders": None}, state
    wanted, came = 0, 0
    for step in range(4):
        wanted, came = wanted + gradients(exact, step), came + gradients(compressed, step)
    assert kept_of(compressed).abs().max() > 0
    torch.testing.assert_close(came + kept_of(compressed), wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(came, wanted, rtol=1e-2, atol=1e-2)
    loaded = layer_with(gradient_ratio=4)
    loaded.load_state_dict(compressed.state_dict())
    assert torch.equal(gradients(loaded, 4), gradients(compressed, 4)) and torch.equal(kept_of(loaded), kept_of(compressed))
    compressed.load_state_dict(state)  # back to the beginning
    assert torch.equal(gradients(compressed, 0), gradients(layer_with(gradient_ratio=4), 0))
    wide = layer_with(gradient_ratio=4, dtype=torch.float64)
    try:
        wide(torch.randn(TOKENS, HIDDEN, dtype=torch.float64)).sum().backward()
    except TypeError as error:
        assert "torch.float64" in str(error), error
    else:
        raise AssertionError("gradients of float64 were taken")


def case_a_failed_step_leaves_no_old_experts(rank, n):
    for ratio in (1, 4):
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, domains=[n], codec_ratio=ratio)
        x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank))
        assert layer(x).abs().max() > 0
        try:
            layer(torch.cat([x, x]))
        except moeccl.Error as failure:
            assert "max_tokens" in str(failure), failure
        else:
            raise AssertionError("too many tokens were taken")
        with torch.no_grad():
            for p in layer.experts.parameters():
                p.zero_()
        assert layer(x).abs().max() == 0, "the step after a failed one runs the experts of the failed one"
