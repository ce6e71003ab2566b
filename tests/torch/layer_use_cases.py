# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about how programs use a layer: sizes and types of steps, failures, scalers and routers of their own."""
import copy
import os
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moeccl
import moeccl.torch as mt
from moeccl.torch._group import beside
from layer_cases import gathered, needs
from layer_model_cases import EXPERTS, HIDDEN, SAMPLE, TOKENS, Model, alone, go_on, same

SOON_S = 30  # the cases' communicators would wait for a minute
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def tokens_of(rank, n_tokens=TOKENS):
    return torch.randn((n_tokens, HIDDEN), generator=torch.Generator().manual_seed(rank))


def one_process(layer, **options):
    """Returns a layer with all experts in this process, and with the router of `layer`."""
    whole = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, seed=1, group=alone(), average=False, **options)
    if "router" not in options:
        whole.router.load_state_dict(layer.router.state_dict())
    return whole


def refused(kind, said, run):
    try:
        run()
    except kind as error:
        assert said in str(error), error
        return error
    raise AssertionError(f"nothing was said of {said}")


def case_steps_may_grow(rank, n):
    """The first batch sets no limit, and the graphs of earlier steps live on while later ones make more room."""
    for options in ({}, {"domains": [n]}, {"sample_tokens": SAMPLE, "norm": nn.Identity()}):
        torch.manual_seed(3)
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, seed=1, aux_loss_weight=0, **options)
        whole = one_process(layer, aux_loss_weight=0)
        steps, grads = [], []
        for step, size in enumerate((1, 5, 0, 300, 40)):
            # Each rank in turn has the most.
            sizes = [max(0, size - 7 * ((r + step) % n)) for r in range(n)]
            if "sample_tokens" in options:
                sizes = [SAMPLE * (1 + size // SAMPLE)] * n
            x = [tokens_of(100 * step + r, sizes[r]) for r in range(n)]
            mine, every = x[rank].requires_grad_(), torch.cat([t.detach() for t in x]).requires_grad_()
            begin = sum(sizes[:rank])
            y, expected = layer(mine), whole(every)
            if "sample_tokens" in options:
                expected, place = expected + every, layer.follow(torch.arange(sizes[0]) + rank * sizes[0])
            else:
                place = torch.arange(begin, begin + sizes[rank])
            torch.testing.assert_close(y, expected[place], **CLOSE)
            steps.append((y, expected, place, mine, every, slice(begin, begin + sizes[rank])))
        for y, expected, place, mine, every, here in reversed(steps):
            y.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(mine.grad, every.grad[here], **CLOSE)
        grads = [(a.grad * n, b.grad[layer.ep.local_experts]) for a, b in zip(layer.experts.stacked(), whole.experts.stacked())]
        for got, wanted in grads:
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        assert layer.ep.max_tokens >= 300 and len(layer.ep._layers) == 1
    ep = mt.ExpertParallel(EXPERTS, 2, HIDDEN)
    for index in (torch.full((3, 2), EXPERTS), torch.zeros((3, 2), dtype=torch.int64)):  # other errors stay what they are
        refused(moeccl.Error, "moeccl", lambda: ep.dispatch(torch.zeros(3, HIDDEN), index))
    assert ep.max_tokens == 3


class Blocks(nn.Module):
    """A model whose first layer makes the rows' type what a wrapper wants."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        self.inp, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.moe = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, **options)

    def forward(self, x):
        h = self.inp(x)
        return self.head(h + self.moe(h))


def trained(model, rank, steps=6):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        x = tokens_of(rank)
        loss = (model(x).float().squeeze(-1) - x[:, 0].sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(sum(gathered(loss)).item() / dist.get_world_size())
    return losses


def case_fsdp2_computes_in_bfloat16(rank, n):
    needs((2, 7), "parameters that fully_shard ignores")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    expected = trained(DistributedDataParallel(mt.ignore_experts(Blocks())), rank)
    for options in ({}, {"domains": [n], "codec_ratio": 2}, {"replica_slots": EXPERTS // n + 1}):
        model = Blocks(**options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (n,)), mp_policy=policy, ignored_params=set(mt.expert_parameters(model)))
        torch.testing.assert_close(torch.tensor(trained(model, rank)), torch.tensor(expected), rtol=0.05, atol=0.02)
        assert {p.dtype for e in model.moe.experts.stacked() for p in (e, e.grad)} == {torch.float32}
        assert model.moe.handle.layer.dtype == torch.bfloat16


def bytes_per_element(layer):
    return layer.handle.info().logical_bytes / (TOKENS * 2 * HIDDEN)


def case_rows_travel_in_the_type_of_the_computation(rank, n):
    torch.manual_seed(3)
    plain = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1)
    expected = plain(tokens_of(rank))
    assert bytes_per_element(plain) == 4
    asked = {"compute_dtype": torch.bfloat16}
    kinds = [(True, {}, 2), (False, asked, 2), (True, asked, 2), (True, {"domains": [n]}, 2), (True, {"shared_expert": 8}, 2),
             (False, {"domains": [n], **asked}, 2), (True, {"dispatch_dtype": torch.float8_e4m3fn}, 2),
             (True, {"compute_dtype": torch.float32}, 4)]
    for autocast, options, width in kinds:
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, **options)
        layer.router.load_state_dict(plain.router.state_dict())
        given = tokens_of(rank).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = layer(given)
        y.sum().backward()
        assert y.dtype == given.grad.dtype == torch.float32 and bytes_per_element(layer) == width, (options, bytes_per_element(layer))
        assert all(w.grad.dtype == torch.float32 and w.grad.abs().max() > 0 for w in layer.experts.stacked())
        shared = 0 if layer.shared_expert is None else layer.shared_expert(given)
        torch.testing.assert_close(y, expected + shared, rtol=0.05, atol=0.05, msg=lambda m: f"{autocast}, {options}: {m}")
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 as it is
        assert mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, dtype=torch.float64)(tokens_of(rank).double()).dtype == torch.float64


def case_a_residual_keeps_its_type(rank, n):
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, sample_tokens=SAMPLE, norm=nn.LayerNorm(HIDDEN),
                        compute_dtype=torch.bfloat16)
    for p in layer.experts.stacked():
        nn.init.zeros_(p)
    x = tokens_of(rank)
    every = torch.cat(gathered(x)).view(-1, SAMPLE * HIDDEN)
    y = layer(x)
    torch.testing.assert_close(y.view(-1, SAMPLE * HIDDEN), every[layer.step.local_samples], rtol=0, atol=0)


def case_communicators_have_the_timeout_of_their_group(rank, n):
    def waits(comm, least_s):
        if rank == 0:
            return  # the others wait for it
        began = time.monotonic()
        refused(moeccl.Error, "moecclTimeout", lambda: comm.all_reduce(torch.ones(4)))
        assert least_s - 1 < time.monotonic() - began < SOON_S, time.monotonic() - began

    with mock.patch.dict("os.environ"):
        del os.environ["MOECCL_TIMEOUT_MS"]  # that of the library stays
        group = dist.new_group(timeout=timedelta(seconds=2))
        comms = [mt.comm_of(group), *(beside(mt.comm_of(group, **o)) for o in ({"topology": f"node:1 gpu:{n}"}, {"timeout_ms": 3000}))]
        for comm, least_s in zip(comms, (2, 2, 3)):
            waits(comm, least_s)
        dist.barrier()
        mt.close(group)
        os.environ["MOECCL_TIMEOUT_MS"] = "60000"
        assert "timeout_ms" not in moeccl.torch._group._timeouts(group, {})


def case_layers_go_on_after_an_abort(rank, n):
    features = [{}, {"swap": True}, {"replica_slots": EXPERTS // n + 1}, {"domains": [n]}, {"domains": [n], "gradient_ratio": 4},
                {"sample_tokens": SAMPLE}]
    for closed, options in enumerate(features):
        group = dist.new_group()
        expected = go_on(rank, range(4), *made(Model()), 2)[0] if "gradient_ratio" not in options else None
        model, wrapped, optimizer = made(Model(group=group, **options))
        losses, _ = go_on(rank, range(2), model, wrapped, optimizer, 2)
        copied, x = copy.deepcopy(model), tokens_of(rank)
        with torch.no_grad():
            of_the_copy = copied.layers[0](x)
        numbers = model.layers[0].experts.numbers()
        before = [p.detach().clone() for p in model.parameters()]
        own = model.layers[0].remainders.get_extra_state() if "gradient_ratio" in options else None
        if rank < n - 1:  # these wait for the last rank
            began = time.monotonic()
            watch = threading.Timer(0.5, mt.abort, [group])
            watch.start()
            refused(moeccl.Error, "moeccl", lambda: model.layers[0](x))
            assert time.monotonic() - began < SOON_S
            watch.join()
        else:
            mt.abort(group)
        dist.barrier()
        if closed % 2:
            mt.close(group)
        mt.renew(model)
        torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)
        assert model.layers[0].experts.numbers() == numbers
        if own is not None:
            assert own["remainders"].abs().max() > 0
            torch.testing.assert_close(model.layers[0].remainders.get_extra_state(), own, rtol=0, atol=0)
        losses += go_on(rank, range(2, 4), model, wrapped, optimizer, 2)[0]
        if expected is not None:
            same(losses, expected, 1e-4)
        mt.renew(copied)
        assert copied.layers[0].comm is model.layers[0].comm and copied.layers[0].comm.handle
        with torch.no_grad():
            torch.testing.assert_close(copied.layers[0](x), of_the_copy)
        mt.close(group)


def made(model):
    return model, DistributedDataParallel(mt.ignore_experts(model)), torch.optim.AdamW(model.parameters(), lr=1e-2)


def case_a_layer_moves_to_another_communicator(rank, n):
    """The one that the caller made, and dispatch without a module."""
    class Bare(nn.Module):
        def __init__(self, comm):
            super().__init__()
            self.ep = mt.ExpertParallel(EXPERTS, 2, HIDDEN, comm)

    def comm():
        given = [bytes(moeccl.unique_id()) if rank == 0 else None]
        dist.broadcast_object_list(given)
        return moeccl.Comm(n, given[0], rank)

    first, second = comm(), comm()
    model = nn.ModuleList([Bare(first), mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, group=first, seed=1)])
    x, index = tokens_of(rank), torch.arange(2 * TOKENS).view(TOKENS, 2) % EXPERTS
    expected = model[1](x), model[0].ep.dispatch(x, index)[0]
    mt.abort(first)
    refused(ValueError, "give renew() a new one", lambda: mt.renew(model))
    refused(ValueError, "of as many ranks", lambda: mt.renew(model, alone()))
    mt.renew(model, second)
    torch.testing.assert_close((model[1](x), model[0].ep.dispatch(x, index)[0]), expected)
    first.close()
    second.close()


class Routed(nn.Module):
    """Dispatch without a MoELayer, in an ExpertParallel that other modules may hold too."""

    def __init__(self, ep):
        super().__init__()
        self.ep = ep

    def forward(self, x):
        index = torch.arange(2 * len(x)).view(-1, 2) % EXPERTS
        rows, _, handle = self.ep.dispatch(x, index, torch.full(index.shape, 0.5))
        return self.ep.combine(rows, handle)


def case_modules_that_share_dispatch_are_renewed_once(rank, n):
    singles = [dist.new_group([r]) for r in range(n)]
    for group in (dist.new_group(), singles[rank]):
        first, second = (mt.ExpertParallel(EXPERTS, 2, HIDDEN, group) for _ in range(2))
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, group=group, seed=1)
        model, x = nn.Sequential(Routed(first), Routed(second), Routed(first), layer), tokens_of(rank)
        model[1].of_the_layer = layer.ep
        expected = model(x)
        for end in (mt.abort, mt.close):
            old = layer.comm
            end(group)
            mt.renew(model)
            assert first.comm is second.comm is layer.comm is layer.ep.comm is not old
            torch.testing.assert_close(model(x), expected)
        mt.close(group)
        late = Routed(mt.ExpertParallel(EXPERTS, 2, HIDDEN, group))  # whose communicator is open, unlike the others'
        mt.renew(nn.Sequential(model, late))
        assert late.ep.comm is layer.comm
        torch.testing.assert_close(late(model(x)), model[0](expected))
        mt.close(group)


def case_a_rank_that_fails_inside_a_layer_ends_the_others_wait(rank, n):
    group = dist.new_group()
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, group=group, domains=[1], shared_expert=8)
    x = tokens_of(rank)
    expected = layer(x)
    for broken in (layer.router, layer.experts, layer.shared_expert, moeccl.torch.expert_parallel.Dispatch):
        name = "apply" if isinstance(broken, type) else "forward"
        failure = torch.cuda.OutOfMemoryError("full")
        began = time.monotonic()
        if rank == n - 1:
            with mock.patch.object(broken, name, side_effect=failure):
                refused(RuntimeError, "full", lambda: layer(x))
            time.sleep(2)  # and does not come back at once
        else:
            error = refused(moeccl.Error, f"rank {n - 1} revoked", lambda: layer(x))
            if sys.version_info >= (3, 11):
                assert "renew(model)" in "".join(getattr(error, "__notes__", ())), error
        assert time.monotonic() - began < SOON_S
        dist.barrier()
        refused(moeccl.Error, "revoked", lambda: layer(x))
        mt.renew(layer)
        torch.testing.assert_close(layer(x), expected)
    refused(ValueError, "shape", lambda: layer(x[:, 1:]))  # an error of all ranks, before anything is sent
    torch.testing.assert_close(layer(x), expected)
    mt.close(group)


def case_a_scaler_scales_the_auxiliary_loss_too(rank, n):
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, aux_loss_weight=1.0)
    optimizer, weight = torch.optim.SGD(layer.parameters(), lr=0.0), layer.router.linear.weight

    def gradient(scaler, parts=1):
        layer.zero_grad()
        mt.set_aux_loss_scale(1 / parts)
        for _ in range(parts):
            loss = layer(tokens_of(rank)).square().mean() / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
            got = weight.grad.clone()
            scaler.step(optimizer)
            scaler.update()
            return got
        return weight.grad.clone()

    expected = gradient(None)
    for parts in (1, 4):
        for given in (mt.GradScaler("cpu", init_scale=65536.0), mt.GradScaler("cpu", enabled=False)):
            torch.testing.assert_close(gradient(given, parts), expected, rtol=1e-4, atol=1e-6)
    for loss in mt.GradScaler("cpu").scale([layer(tokens_of(rank)).sum(), layer(tokens_of(rank)).sum()]):  # and never again
        loss.backward()
    torch.testing.assert_close(gradient(None), expected)  # without a scaler
    mt.set_aux_loss_scale(1)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("the backward pass failed")


def case_a_scale_does_not_outlive_a_backward_pass_that_fails(rank, n):
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, aux_loss_weight=1.0)
    weight, scaler, x = layer.router.linear.weight, mt.GradScaler("cpu", init_scale=1024.0), tokens_of(rank)

    def gradient(loss):
        layer.zero_grad()
        loss.backward()
        return weight.grad.clone()

    def fail():
        refused(RuntimeError, "the backward pass failed", lambda: scaler.scale(Failing.apply(layer(x)).sum()).backward())

    expected = gradient(layer(x).sum())
    fail()
    torch.testing.assert_close(gradient(layer(x).sum()), expected)
    earlier = layer(x).sum()
    fail()
    scaler.update(1024.0)
    torch.testing.assert_close(gradient(earlier), expected)
    for reentrant in (False, True):  # a recomputation does not end the scale
        y = torch.utils.checkpoint.checkpoint(layer, x.clone().requires_grad_(), use_reentrant=reentrant)
        torch.testing.assert_close(gradient(scaler.scale(y.sum())) / 1024, expected, rtol=1e-4, atol=1e-6)


def case_a_recomputation_that_stops_early_keeps_the_step(rank, n):
    class Frozen(nn.Module):
        """Its weights need no gradients, so combine saves nothing and the recomputation stops before it."""

        def forward(self, given):
            scores, index = given.detach()[:, :EXPERTS].sigmoid().topk(2)
            return scores, index, None

    x = tokens_of(rank)
    labels = torch.arange(TOKENS) + rank * TOKENS
    for options in ({}, {"sample_tokens": SAMPLE}, {"sample_tokens": SAMPLE, "router": Frozen()}):
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, **options)
        plain = layer(x)
        followed = layer.follow(labels) if layer.step else None
        y = torch.utils.checkpoint.checkpoint(layer, x.clone().requires_grad_(), use_reentrant=False)
        torch.testing.assert_close(y, plain)
        y.sum().backward()
        assert layer.handle.n_dropped == 0 and layer.handle.n_tokens == TOKENS
        assert followed is None or layer.follow(labels).equal(followed)


class Packed(nn.Module):
    """One linear layer of frozen whole numbers in 4 bits, two in each byte, and a scale that trains."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Parameter(torch.randint(256, (HIDDEN, HIDDEN // 2), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((HIDDEN, 1), 0.05))

    def forward(self, x):
        assert self.packed.dtype == torch.uint8 and self.scale.dtype == x.dtype, (self.packed.dtype, self.scale.dtype)
        whole = torch.cat([self.packed & 15, self.packed >> 4], dim=1).to(x.dtype) - 8
        return nn.functional.linear(x, whole * self.scale)


def case_weights_of_whole_numbers_keep_their_type(rank, n):
    x, results = tokens_of(rank), []
    for kind in (None, torch.float32, torch.bfloat16, torch.float64):
        torch.manual_seed(3)
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, expert=Packed, max_tokens=TOKENS, seed=1, compute_dtype=kind)
        y = layer(x)
        y.square().sum().backward()
        assert layer.experts.scale.grad.abs().max() > 0 and layer.experts.packed.dtype == torch.uint8
        results.append((y.detach(), layer.experts.scale.grad))
        torch.testing.assert_close(results[-1][0], results[0][0], **({"rtol": 0.05, "atol": 0.05} if kind == torch.bfloat16 else CLOSE))
    low = layer(x.double())  # without compute_dtype the scales follow the tokens' type
    torch.testing.assert_close(low.float(), results[0][0], **CLOSE)


class Joined(torch.autograd.Function):
    """The parts of a batch that the ranks of a group share; each rank's loss is that of the whole batch."""

    @staticmethod
    def forward(ctx, part, group):
        every = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, part.contiguous(), group=group)
        ctx.here = slice(dist.get_rank(group) * part.shape[0], (dist.get_rank(group) + 1) * part.shape[0])
        return torch.cat(every)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.here], None


def case_experts_may_span_ranks_that_share_a_batch(rank, n):
    groups = [dist.new_group([first, first + 1]) for first in range(0, n, 2)]  # of sequence parallelism; n / 2 of data parallelism
    options = {"ffn": 32, "max_tokens": TOKENS, "seed": 1, "aux_loss_weight": 0}
    torch.manual_seed(3)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, average=n // 2, **options)
    whole = one_process(layer, aux_loss_weight=0)
    Joined.apply(layer(tokens_of(rank)), groups[rank // 2]).square().mean().backward()
    whole(torch.cat([tokens_of(r) for r in range(n)])).square().mean().backward()
    for mine, all_of_them in zip(layer.experts.stacked(), whole.experts.stacked()):
        torch.testing.assert_close(mine.grad, all_of_them.grad[layer.experts.numbers()], **CLOSE)
    for wrong in (0, None, "mean"):
        refused(ValueError, f"average is {wrong!r}", lambda: mt.MoELayer(HIDDEN, EXPERTS, 2, average=wrong, **options))


class Sigmoid(nn.Module):
    """DeepSeek-V3's router, as docs/pytorch-moe.md has it."""

    def __init__(self, hidden, n_experts, top_k):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(n_experts, hidden) * hidden**-0.5), top_k
        self.register_buffer("bias", torch.zeros(n_experts))

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(x.float() @ self.weight.float().T)
        index = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, index)
        return weights / weights.sum(-1, keepdim=True), index, None

    def balance(self, counts, speed):
        self.bias += speed * torch.sign(counts.float().mean() - counts)


def case_a_router_of_the_callers_trains_as_one_process(rank, n):
    def batch(step, r):
        return tokens_of(100 * step + r) + 2 * tokens_of(r, 1)

    for options in ({}, {"swap": True}, {"replica_slots": EXPERTS // n + 1}, {"domains": [n]}):
        torch.manual_seed(3)
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, router=Sigmoid(HIDDEN, EXPERTS, 2), **options)
        whole = one_process(layer, router=copy.deepcopy(layer.router))
        net = DistributedDataParallel(mt.ignore_experts(layer))
        optimizers, losses, moved = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (layer, whole)], [], 0
        for step in range(6):
            got, every = [], torch.cat([batch(step, r) for r in range(n)])
            for m, optimizer, x in ((net, optimizers[0], batch(step, rank)), (whole, optimizers[1], every)):
                optimizer.zero_grad()
                loss = (m(x) - x.sin()).square().mean()
                loss.backward()
                optimizer.step()
                own = layer if m is net else whole
                with torch.no_grad():
                    index = own._index
                    expected = torch.bincount(index.reshape(-1), minlength=EXPERTS)
                    if m is net:
                        dist.all_reduce(expected)
                if m is net:
                    moved += layer.rebalance(optimizer)
                counts = own.expert_counts()
                assert counts.equal(expected), (options, counts, expected)
                own.router.balance(counts, 0.01)
                got.append(sum(gathered(loss)).item() / n)
            assert layer.aux_loss is None and layer.router.bias.equal(whole.router.bias)
            losses.append(got)
        assert moved or not ("swap" in options or "replica_slots" in options), "no expert moved"
        assert layer.router.bias.abs().max() > 0
        torch.testing.assert_close(*torch.tensor(losses).T, **CLOSE)


def case_padding_is_not_routed(rank, n):
    inner = Sigmoid(HIDDEN, EXPERTS, 2)
    mask = torch.arange(TOKENS) % 3 > 0

    def router(x):
        weights, index, _ = inner(x)
        return weights, index.where(mask[:, None], -1), index.float().mean()

    for options in ({}, {"swap": True}, {"replica_slots": EXPERTS // n + 1}, {"domains": [n]}):
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, router=router, **options)
        x = tokens_of(rank).requires_grad_()
        y = layer(x)
        y.sum().backward()
        layer.rebalance()
        assert y[mask].abs().amax(-1).min() > 0 and not y[~mask].any() and not x.grad[~mask].any()
        assert int(layer.expert_counts().sum()) == 2 * int(mask.sum()) * n and layer.aux_loss > 0
    refused(TypeError, "router is a str", lambda: mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, router="sigmoid"))
    refused(ValueError, "compute_dtype is torch.int8", lambda: mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, compute_dtype=torch.int8))
