# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about MoELayer: losses must equal those of one process that has all experts and all tokens."""
import copy
import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moeccl
import moeccl.torch as mt
from moeccl.torch import _traced
from moeccl.torch.replace import Replacing
from layer_cases import VERSION, needs

HIDDEN, TOKENS, SAMPLE = 16, 24, 6
EXPERTS = 8
_alone = []


def alone():
    """Returns a communicator of this process alone; a layer over it has all experts."""
    if not _alone:
        _alone.append(moeccl.Comm(1, moeccl.unique_id(), 0))
    return _alone[0]


class Model(nn.Module):
    """Two residual MoE blocks between two linear layers."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        self.inp, self.head = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, 1)
        self.inside = bool(options.get("sample_tokens"))  # the layer adds the residual
        self.moved = 0  # samples, in all steps
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        options = {"aux_loss_weight": 0, "ffn": 32, **options}
        self.layers = nn.ModuleList(
            mt.MoELayer(HIDDEN, EXPERTS, 2, trials=-1, **options, **({"norm": norm} if self.inside else {})) for norm in self.norms)

    def forward(self, x, target):
        h = self.inp(x)
        for norm, layer in zip(self.norms, self.layers):
            if self.inside:
                h = layer(h)
                target = layer.follow(target)
                self.moved += layer.step.moved
            else:
                h = h + layer(norm(h))
        return (self.head(torch.tanh(h)).squeeze(-1) - target).square().mean()


def batch(step, rank):
    """Each rank's tokens prefer other experts than the next rank's, so that there is something to move."""
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn((TOKENS, 5), generator=g) + torch.randn((1, 5), generator=torch.Generator().manual_seed(rank))
    return x, x.sin().sum(-1) + 0.1 * torch.randn(TOKENS, generator=g)


def reference(n, steps, lr=1e-2, **options):
    """Returns the losses and the trained model of one process with the batches of all ranks."""
    model = Model(group=alone(), average=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        x, target = (torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(n))))
        optimizer.zero_grad()
        loss = model(x, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def mean(value):
    value = torch.tensor([value])
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(rank, steps, rebalance_every=0, wrap=lambda m: DistributedDataParallel(mt.ignore_experts(m)), micro_batches=1,
          lr=1e-2, **options):
    """Trains on all ranks. Returns the losses, the model, and the number of slots that changed their expert."""
    model = Model(**options)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr)
    losses, moved = go_on(rank, range(steps), model, wrapped, optimizer, rebalance_every, micro_batches)
    return losses, model, moved


def go_on(rank, steps, model, wrapped, optimizer, rebalance_every=0, micro_batches=1):
    """Trains on all ranks for the steps of those numbers. Returns the losses, and the number of slots that changed their expert."""
    losses, moved = [], 0
    for step in steps:
        x, target = batch(step, rank)
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(x.chunk(micro_batches), target.chunk(micro_batches)):
            loss = wrapped(part, wanted) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(mean(total))
        if rebalance_every and step % rebalance_every == rebalance_every - 1:
            moved += mt.rebalance(model, optimizer)
    return losses, moved


def same(losses, expected, tolerance=2e-5):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    assert max(expected) > 1.05 * min(expected), "the model learned nothing, so equal losses say nothing"


def case_layer_is_its_formula(rank, n):
    torch.manual_seed(0)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 3, ffn=32, shared_expert=20, activation="swiglu", bias=True, max_tokens=64)
    x = torch.randn(2, TOKENS // 2, HIDDEN, requires_grad=True)
    y = layer(x)
    probabilities = torch.softmax(x.reshape(-1, HIDDEN) @ layer.router.linear.weight.T, -1)
    weights, index = probabilities.topk(3)
    weights = weights / weights.sum(-1, keepdim=True)
    # The experts of all ranks.
    every = [None] * n
    dist.all_gather_object(every, dict(zip(layer.ep.local_experts, zip(*[p.detach().unbind(0) for p in layer.experts.stacked()]))))
    every = {e: p for part in every for e, p in part.items()}
    expected = layer.shared_expert(x.reshape(-1, HIDDEN))
    form = mt.MLP(HIDDEN, 32, "swiglu", True)
    for k in range(3):
        part = torch.stack([torch.func.functional_call(form, dict(zip(dict(form.named_parameters()), every[int(e)])), (row,))
                            for e, row in zip(index[:, k], x.reshape(-1, HIDDEN))])
        expected = expected + weights[:, k:k + 1] * part
    torch.testing.assert_close(y.reshape(-1, HIDDEN), expected, rtol=1e-5, atol=1e-5)
    given = torch.randn_like(y)
    (wanted,) = torch.autograd.grad((expected.view_as(y) * given).sum(), x)
    layer.aux_loss_weight = 0
    (got,) = torch.autograd.grad((layer(x) * given).sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def case_trains_as_one_process(rank, n):
    losses, model, _ = train(rank, 8, shared_expert=20)
    expected, whole = reference(n, 8, shared_expert=20)
    same(losses, expected)
    for mine, all_of_them in zip(model.layers, whole.layers):
        for a, b in zip(mine.experts.stacked(), all_of_them.experts.stacked()):
            torch.testing.assert_close(a, b[mine.ep.local_experts], rtol=1e-3, atol=2e-4)
        # AdamW makes much of the rounding of small gradients: up to 5e-4 with torch 2.7, where the weights after SGD differ by 7e-8.
        atol = 1e-3 if VERSION == (2, 7) else 2e-4
        torch.testing.assert_close(mine.router.linear.weight, all_of_them.router.linear.weight, rtol=1e-3, atol=atol)


def case_any_module_is_an_expert(rank, n):
    def make():
        return nn.Sequential(nn.Linear(HIDDEN, 12), nn.Tanh(), nn.Linear(12, HIDDEN))

    torch.manual_seed(3)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, expert=make, max_tokens=TOKENS, seed=5)
    whole = mt.MoELayer(HIDDEN, EXPERTS, 2, expert=make, max_tokens=TOKENS, seed=5, group=alone())
    whole.router.load_state_dict(layer.router.state_dict())
    x = torch.randn(TOKENS, HIDDEN)
    torch.testing.assert_close(layer(x), whole(x), rtol=1e-5, atol=1e-6)


def case_copies_have_the_same_gradients(rank, n):
    def gradients(layer):
        layer.zero_grad()
        layer(torch.randn((16, 8), generator=torch.Generator().manual_seed(rank))).sum().backward()
        return [p.grad.clone() for p in layer.experts.parameters()]

    layer = mt.MoELayer(hidden=8, n_experts=2 * n, top_k=2, ffn=16, max_tokens=16, seed=1)
    early = copy.deepcopy(layer)
    expected = gradients(layer)
    late, assigned = copy.deepcopy(layer), mt.MoELayer(hidden=8, n_experts=2 * n, top_k=2, ffn=16, max_tokens=16, seed=1)
    assigned.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)
    for other in (early, late, assigned):
        torch.testing.assert_close(gradients(other), expected)
        assert len(mt.expert_parameters(other)) == 2
        assert mt.ignore_experts(other)._ddp_params_and_buffers_to_ignore == ["experts.up__weight", "experts.down__weight"]


def every_feature(n):
    """Returns options for MoELayer that turn on its features, with HIDDEN, EXPERTS and 2 * SAMPLE tokens per rank."""
    norm = {"sample_tokens": SAMPLE, "norm": nn.LayerNorm(HIDDEN)}
    return [{}, {"swap": True}, {"replica_slots": EXPERTS // n + 1}, {"domains": [n]}, {"domains": [n], "codec_ratio": 4},
            {"domains": [n], "gradient_ratio": 4}, norm,
            {**norm, "shared_expert": 8}]


def case_layers_with_features_can_be_copied_and_compiled(rank, n):
    def run(layer, callee):
        given = torch.randn((2 * SAMPLE, HIDDEN), generator=torch.Generator().manual_seed(rank)).requires_grad_()
        layer.zero_grad()
        y = callee(given)
        y.square().sum().backward()
        return y.detach(), given.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)

    for options in every_feature(n):
        torch.manual_seed(4)
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=2 * SAMPLE, seed=1, **options)
        if options.get("sample_tokens"):
            layer._replacing = Replacing(SAMPLE, moeccl._abi.moecclReplaceKeep, layer._replacing._residual)
        early = copy.deepcopy(layer)
        expected = run(layer, layer)
        late = copy.deepcopy(layer)
        for other in (early, late):
            torch.testing.assert_close(run(other, other), expected, msg=lambda m: f"copies, {options}: {m}")
        if n == 2 and options == {"domains": [n]}:  # once, because compiling takes seconds
            torch.testing.assert_close(run(layer, torch.compile(layer, backend="eager")), expected, msg=lambda m: f"compiled: {m}")


class Bare(nn.Module):
    """A model that calls dispatch and combine itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.ep = mt.ExpertParallel(EXPERTS, 2, HIDDEN, max_tokens=TOKENS)
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.own = nn.Parameter(torch.randn(len(self.ep.local_experts), HIDDEN, HIDDEN))

    def forward(self, x):
        weights, index = torch.softmax(self.gate(x), -1).topk(2)
        rows, counts, handle = self.ep.dispatch(x, index, weights)
        out = torch.cat([torch.tanh(part @ m) for part, m in zip(rows.split(counts), self.own)])
        return self.ep.combine(out, handle)


@mock.patch.object(_traced, "KNOWN", False)  # compile_cases.py has the torch that can trace the layers
def case_compiled_models_break_their_graphs_at_the_calls_only(rank, n):
    if n > 2:
        return  # once, because compiling takes seconds
    compiler = os.environ.get("MOECCL_TEST_COMPILER")  # such as inductor, which takes a minute and needs a C++ compiler
    close = {"rtol": 1e-4, "atol": 1e-4} if compiler else {}
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, aux_loss_weight=0.1, shared_expert=8)
    for model, calls in ((layer, {"MoELayer._dispatch", "Experts._untraced", "ExpertParallel._combine", "attach_loss"}),
                         (Bare(), {"ExpertParallel._dispatch", "ExpertParallel._combine"})):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend=compiler or ("aot_eager" if VERSION >= (2, 6) else "eager"))
        for step, tokens in enumerate((TOKENS, TOKENS, 9 + 3 * rank, rank, 1, 0 if rank else 7, 15)):
            x, got = torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(10 * step + rank)), []
            for run in (model, compiled):
                model.zero_grad()
                given = x.clone().requires_grad_()
                y = run(given)
                mt.set_aux_loss_scale(1 + step)  # after the forward pass
                y.square().sum().backward()
                got.append((y.detach(), given.grad, *(p.grad.clone() for p in model.parameters())))
            torch.testing.assert_close(*got, msg=lambda m: f"step {step}: {m}", **close)
        mt.set_aux_loss_scale(1)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), compiled(x), **close)
        breaks = torch._dynamo.utils.counters["graph_break"]
        found = {call for call in calls if any(call in reason for reason in breaks)}
        assert found == calls and all(any(call in reason for call in calls) for reason in breaks), list(breaks)


class FloatNorm(nn.Module):
    """A norm that returns float32 for every input, as norms do under autocast on CUDA."""

    def forward(self, x):
        return nn.functional.layer_norm(x.float(), (HIDDEN,))


def case_a_norm_may_return_another_type(rank, n):
    torch.manual_seed(0)
    x = torch.randn((2 * SAMPLE, HIDDEN), generator=torch.Generator().manual_seed(rank))
    for shared in (None, 8):
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=2 * SAMPLE, seed=1, sample_tokens=SAMPLE, norm=FloatNorm(),
                            shared_expert=shared)
        layer._replacing = Replacing(SAMPLE, moeccl._abi.moecclReplaceKeep, layer._replacing._residual)
        expected = layer(x.bfloat16().float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = x.bfloat16().requires_grad_()
            got = layer(given)
        got.float().sum().backward()
        assert got.dtype == given.grad.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


def case_factored_states_move_with_their_experts(rank, n):
    needs((2, 5), "Adafactor")
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, swap=True, swap_horizon=1e12)
    optimizer = torch.optim.Adafactor(layer.parameters())
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank))
    for _ in range(20):
        layer(x).square().sum().backward()
        optimizer.step()
        for p in layer.experts.stacked():  # a mark by which a slot's state is known
            for name in ("row_var", "col_var"):
                optimizer.state[p][name].copy_(p.detach().flatten(1)[:, 0].reshape(-1, *[1] * (p.dim() - 1)))
        if layer.rebalance(optimizer):
            break
        x = x.roll(1, dims=1)
    else:
        raise AssertionError("no experts changed places")
    for p in layer.experts.stacked():
        for name in ("row_var", "col_var"):
            moved = optimizer.state[p][name].flatten(1)[:, 0]
            torch.testing.assert_close(moved, p.detach().flatten(1)[:, 0], rtol=0, atol=0)


def case_micro_batches_and_checkpointing(rank, n):
    same(train(rank, 6, micro_batches=2)[0], reference(n, 6)[0])
    torch.manual_seed(1)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32)
    x = torch.randn(TOKENS, HIDDEN)
    grads = []
    for recompute in (False, True):
        given = x.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(layer, given, use_reentrant=False) if recompute else layer(given)
        y.square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(grads[0], grads[1])


def case_fsdp2_wraps_the_rest(rank, n):
    needs((2, 7), "parameters that fully_shard ignores")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (n,))

    def wrap(model):
        return fully_shard(model, mesh=mesh, ignored_params=set(mt.expert_parameters(model)))

    losses, model, _ = train(rank, 6, wrap=wrap)
    assert type(model.head.weight).__name__ == "DTensor" and type(model.layers[0].experts.stacked()[0]) is nn.Parameter
    same(losses, reference(n, 6)[0])


def case_expert_swap_keeps_the_loss(rank, n):
    losses, _, moved = train(rank, 9, rebalance_every=2, swap=True, swap_horizon=1e12)
    assert moved > 0, "nothing was swapped"
    same(losses, reference(n, 9)[0])


def case_replicas_keep_the_loss(rank, n):
    losses, model, moved = train(rank, 9, rebalance_every=4, replica_slots=EXPERTS // n + 1, swap_horizon=1e12)
    assert moved > 0, "no replica moved"
    same(losses, reference(n, 9)[0])
    for layer in model.layers:  # replicas of an expert are the same bits
        for stacked in layer.experts.stacked():
            every = [torch.empty_like(stacked) for _ in range(n)]
            dist.all_gather(every, stacked.detach().contiguous())
            for e in range(EXPERTS):
                copies = torch.cat(every)[layer.placement.slot_expert == e]
                assert len(copies) > 0 and copies.eq(copies[0]).all()


def case_rows_of_8_bits_train(rank, n):
    losses, model, _ = train(rank, 6, dispatch_dtype=torch.float8_e4m3fn)
    expected = reference(n, 6)[0]
    same(losses, expected, 0.02)
    assert losses != expected, "nothing was rounded"
    assert losses[-1] < losses[0]


def case_replaced_samples_keep_the_loss(rank, n):
    options = {"topology": "node:2 gpu:%d" % (n // 2)} if n > 2 else {}
    expected = reference(n, 7, sample_tokens=SAMPLE)[0]
    for places in ({}, {"swap": True, "swap_horizon": 1e12}, {"replica_slots": EXPERTS // n + 1, "swap_horizon": 1e12}):  # samples move, and experts too
        losses, model, moved = train(rank, 7, rebalance_every=4, sample_tokens=SAMPLE, comm_options=options, **places)
        same(losses, expected)
        assert n == 2 or model.moved > 0, "no sample moved, so nothing was followed"
        assert moved > 0 or not places, "no expert moved"


def case_replaced_samples_take_the_shared_expert_along(rank, n):
    per_rank = TOKENS // SAMPLE
    turned = [(r + s % 2) % n for r in range(n) for s in range(per_rank)]  # half of the samples go to the next rank

    def given(model):
        for layer in model.layers:
            layer._replacing = Replacing(SAMPLE, moeccl._abi.moecclReplaceGiven, 2, turned)
        return DistributedDataParallel(mt.ignore_experts(model))

    options = {"topology": "node:2 gpu:%d" % (n // 2)} if n > 2 else {}
    expected = reference(n, 5, shared_expert=20)[0]
    losses, model, _ = train(rank, 5, sample_tokens=SAMPLE, shared_expert=20, wrap=given, comm_options=options)
    same(losses, expected)
    assert model.moved == 5 * 2 * n * per_rank // 2, model.moved
    same(train(rank, 5, sample_tokens=SAMPLE, shared_expert=20, comm_options=options)[0], expected)  # as the solver chooses


def case_balancing_loss_has_its_gradient(rank, n):
    torch.manual_seed(0)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, aux_loss_weight=0.5, max_tokens=TOKENS)
    x = torch.randn(TOKENS, HIDDEN)
    (0 * layer(x)).sum().backward()
    got = layer.router.linear.weight.grad.clone()
    layer.zero_grad()
    _, _, loss = layer.router(x)
    (0.5 * loss).backward()
    torch.testing.assert_close(got, layer.router.linear.weight.grad)
    assert got.abs().max() > 0 and abs(layer.aux_loss.item() - loss.item()) < 1e-6
    with torch.no_grad():
        layer(x)


def case_rows_of_another_width_are_named(rank, n):
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS)
    for shape in ((2, 2 * HIDDEN), (HIDDEN, 4), ()):
        try:
            layer(torch.zeros(shape))
        except ValueError as error:
            assert str(shape) in str(error) and str(HIDDEN) in str(error), error
        else:
            raise AssertionError(f"x of shape {shape} was taken")


def case_wrong_options_are_named(rank, n):
    for options, said in (({}, "give ffn"), ({"ffn": 8, "swap": True, "domains": [2]}, "swap and domains"),
                          ({"ffn": 8, "codec_ratio": 50}, "codec_ratio is 50"), ({"ffn": 8, "gradient_ratio": 50}, "gradient_ratio is 50"),
                          ({"ffn": 8, "norm": nn.Identity()}, "norm"),
                          ({"ffn": 8, "sample_tokens": 2, "domains": [2]}, "sample_tokens"),
                          ({"ffn": 8, "sample_tokens": 2, "dispatch_dtype": torch.float8_e4m3fn}, "sample_tokens cannot go"),
                          ({"ffn": 8, "dispatch_dtype": torch.float16}, "dispatch_dtype is torch.float16"),
                          ({"ffn": 8, "capacity_factor": 1.0}, "max_tokens"), ({"ffn": 8, "domains": "auto"}, "max_tokens"),
                          ({"ffn": 8, "replica_slots": 1}, "replica_slots is 1"),
                          ({"ffn": 8, "activation": "sine"}, "sine"), ({"ffn": 8, "swap": True, "swap_levels": [3]}, "swap_levels is [3]"),
                          ({"expert": lambda: nn.BatchNorm1d(4)}, "buffers")):
        try:
            mt.MoELayer(4, EXPERTS, 2, **options)
        except ValueError as error:
            assert said in str(error), (said, error)
        else:
            raise AssertionError(f"{options} were taken")
