# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about what trainers such as torchtitan and Megatron-LM do with the modules of a model: meshes, deferred
initialisation, backward passes in two halves, export, and inputs that need no gradient."""
import torch
from torch import nn

import moeccl.torch as mt
from layer_agreement_cases import grid
from layer_cases import needs
from layer_model_cases import EXPERTS, HIDDEN, SAMPLE, TOKENS, every_feature
from layer_use_cases import CLOSE, refused, tokens_of


def made(**options):
    torch.manual_seed(3)
    return mt.MoELayer(HIDDEN, EXPERTS, 2, **{"ffn": 32, "max_tokens": TOKENS, "seed": 1, "trials": -1, "aux_loss_weight": 0.1, **options})


def gradients(run, model, x):
    """Returns the result of a training step and all gradients."""
    model.zero_grad()
    given = x.clone().requires_grad_()
    y = run(given)
    y.square().sum().backward()
    return y.detach(), given.grad, [p.grad.clone() for p in model.parameters()]


def case_tokens_of_one_rank_need_no_gradient(rank, n):
    """As where a rank without tokens gives zeros that no other layer has made."""
    for options in ({}, {"dispatch_dtype": torch.float8_e4m3fn}, {"swap": True}, {"domains": [n]}):
        for n_tokens in (TOKENS, 0):
            layer = made(**options)
            x = tokens_of(rank, n_tokens if rank == 1 else TOKENS)
            expected = gradients(layer, layer, x)
            layer.zero_grad()
            given = x.clone().requires_grad_(rank != 1)
            (layer(given).square().sum() + layer(given).square().sum()).backward()  # a rank that waits in one meets another call
            torch.testing.assert_close([p.grad / 2 for p in layer.parameters()], expected[2], **CLOSE)
            if rank != 1:
                torch.testing.assert_close(given.grad / 2, expected[1], **CLOSE)
    ep = mt.ExpertParallel(EXPERTS, 2, HIDDEN)
    weights, x = torch.ones(TOKENS, 2, requires_grad=True), tokens_of(rank).requires_grad_(rank != 1)
    rows, _, handle = ep.dispatch(x, torch.arange(2 * TOKENS).view(TOKENS, 2) % EXPERTS, weights)
    ep.combine(rows.square(), handle).sum().backward()
    torch.testing.assert_close(weights.grad, tokens_of(rank).square().sum(1, keepdim=True).expand(TOKENS, 2), **CLOSE)


def by_place(x):
    """A router without gradients, as for experts that follow from the tokens' numbers."""
    place = torch.arange(x.shape[0])
    return torch.full((x.shape[0], 2), 0.5), torch.stack([place % EXPERTS, (place + 1) % EXPERTS], dim=1), None


def frozen(layer, *parts):
    for part in parts:
        getattr(layer, part).requires_grad_(False)
    return layer


def case_a_router_does_not_train_and_tokens_of_one_rank_need_no_gradient(rank, n):
    for options, parts in (({"router": by_place}, ()), ({"router": by_place, "domains": [n]}, ()), ({}, ("router",)), ({}, ("experts",)),
                           ({"replica_slots": EXPERTS // n + 1, "dispatch_dtype": torch.float8_e4m3fn}, ("router",))):
        layer = frozen(made(**options), *parts)
        trained = [p for p in layer.parameters() if p.requires_grad]
        for n_tokens in (TOKENS, 0):
            x = tokens_of(rank, n_tokens if rank == 1 else TOKENS)
            expected = []
            for needed in (True, rank != 1):
                layer.zero_grad()
                given = x.clone().requires_grad_(needed)
                (layer(given).square().sum() + layer(given).square().sum()).backward()
                expected.append([given.grad if rank != 1 else None, *(p.grad.clone() for p in trained)])
            torch.testing.assert_close(expected[1], expected[0], **CLOSE, msg=lambda m: f"{options}, {parts}: {m}")


def case_a_layer_that_does_not_train_has_no_backward_pass(rank, n):
    """Tokens from layers that do not train either, also where a rank has none."""
    for layer in (frozen(made(), "router", "experts"), frozen(made(router=by_place), "experts")):
        assert not layer(tokens_of(rank, TOKENS if rank else 0)).requires_grad


def case_a_mesh_names_the_ranks(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    mesh, x = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("same", "ep")), tokens_of(rank)
    expected = gradients(*2 * (made(**grid(rank, n)),), x)
    layer = made(group=mesh["ep"], expert_data_group=mesh["same"])
    torch.testing.assert_close(gradients(layer, layer, x), expected)
    assert mt.comm_of(mesh["ep"]) is layer.comm and layer.comm.size == n // 2
    for name in ("group", "expert_data_group"):
        refused(ValueError, "with the dimensions ['same', 'ep']: give one dimension of it, such as mesh['ep']", lambda: made(**{name: mesh}))


def case_tokens_that_are_a_dtensor_are_refused(rank, n):
    needs((2, 5), "torch.distributed.tensor")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    layer, x = made(), DTensor.from_local(tokens_of(rank), init_device_mesh("cpu", (n,)), [Shard(0)])
    refused(TypeError, "x is a DTensor: give the tokens of this rank, x.to_local()", lambda: layer(x))
    layer(x.to_local())  # the communicator goes on


class Scaled(nn.Module):
    """An expert with a parameter of its own; reset_parameters() as trainers call it."""

    def __init__(self, device=None):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.empty(HIDDEN, device=device)), nn.Linear(HIDDEN, HIDDEN, device=device)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale)

    def forward(self, x):
        return self.linear(x) * self.scale


class Unset(Scaled):
    reset_parameters = property()  # which hasattr() does not see

    def __init__(self, device=None):
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.empty(HIDDEN, device=device))


def case_experts_begin_as_always_after_deferred_initialisation(rank, n):
    def deferred(wrap=lambda layer: layer, **options):
        with torch.device("meta"):
            layer = made(**options)
        wrap(layer)
        layer.to_empty(device="cpu")
        for p in layer.parameters():
            nn.init.constant_(p, 7.0)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return layer

    for options in ({}, {"swap": True}, {"replica_slots": EXPERTS // n + 1}, {"domains": [n]}, {"seed": None}, {"bias": True, "activation": "swiglu"},
                    {"device": "meta"}, {"ffn": None, "expert": Scaled}):
        torch.manual_seed(5)
        layer, state = deferred(**options), torch.get_rng_state()
        if options.get("seed", 1):
            expected = made(**{k: v for k, v in options.items() if k != "device"})
            torch.testing.assert_close(layer.experts.stacked(), expected.experts.stacked(), rtol=0, atol=0)
        layer.experts.reset_parameters()
        kept = [p.clone() for p in layer.experts.stacked()]
        assert torch.get_rng_state().equal(state) or not options.get("seed", 1)  # torch's generators stay as they were
        layer.experts.reset_parameters()
        torch.testing.assert_close(layer.experts.stacked(), kept, rtol=0, atol=0)
        every = [p.std().item() for p in layer.experts.stacked() if p.numel()]
        assert all(0 < s < 2 for s in every), every
        layer(tokens_of(rank)).sum().backward()
    again = deferred(ffn=None, expert=lambda: Scaled(device="meta"))
    assert again.experts.scale.std() > 0 and len(again.experts.scale.unique()) == again.experts.scale.numel()
    refused(ValueError, "the expert's Unset is made on the device meta and has no reset_parameters()",
            lambda: deferred(ffn=None, expert=lambda: Unset(device="meta")))
    refused(RuntimeError, "call to_empty(device=...) before reset_parameters()", lambda: made(device="meta").experts.reset_parameters())
    if n > 2 and hasattr(torch.distributed, "fsdp"):
        needs((2, 7), "parameters that fully_shard ignores")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("same", "ep"))
        layer = deferred(lambda layer: fully_shard(layer.experts, mesh=mesh["same"]), group=mesh["ep"])
        torch.testing.assert_close([p.full_tensor() for p in layer.experts.stacked()], [p.data for p in made(group=mesh["ep"]).experts.stacked()],
                                   rtol=0, atol=0)


def case_a_backward_pass_may_have_two_halves(rank, n):
    """Zero-bubble schedules compute the gradients of a stage's input first, and those of its parameters after other micro-batches."""
    needs((2, 7), "torch.distributed.pipelining's halves of a backward pass")
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    for options in (*(o for o in every_feature(n) if "gradient_ratio" not in o), grid(rank, n)):  # what that leaves out joins the next step
        if options.get("sample_tokens"):
            options = {**options, "comm_options": {"deterministic": 1}}  # whose samples do not depend on the clock
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), made(**{**options, "max_tokens": TOKENS}), nn.Linear(HIDDEN, HIDDEN))
        batches = [tokens_of(rank + 10 * i)[:TOKENS - TOKENS % SAMPLE] for i in range(3)]
        model.zero_grad()
        given = [x.clone().requires_grad_() for x in batches]
        for x in given:
            model(x).square().sum().backward()
        expected = [x.grad for x in given], [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        given, halves = [x.clone().requires_grad_() for x in batches], []
        losses = [model(x).square().sum() for x in given]
        for x, loss in zip(given, losses):
            halves.append(stage_backward_input([loss], None, [x], iter(model.parameters())))
        for _, groups in halves:
            stage_backward_weight(iter(model.parameters()), groups)
        got = [grads[0] for grads, _ in halves], [p.grad for p in model.parameters()]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, msg=lambda m: f"{options}: {m}")


def case_export_is_refused(rank, n):
    layer, ep, x = made(), mt.ExpertParallel(EXPERTS, 2, HIDDEN), tokens_of(rank)

    class Bare(nn.Module):
        def forward(self, x):
            rows, _, handle = ep.dispatch(x, torch.arange(2 * TOKENS).view(TOKENS, 2) % EXPERTS)
            return ep.combine(rows, handle)

    expected = layer(x)
    for module in (layer, Bare()):
        for strict in (True, False):
            refused(Exception, "torch.export cannot take a MoE layer", lambda: torch.export.export(module, (x,), strict=strict))
    torch.testing.assert_close(layer(x), expected)  # the communicator goes on
