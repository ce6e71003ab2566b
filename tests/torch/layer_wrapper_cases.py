# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about torch's wrappers and optimizers, which may take the experts for parameters that all ranks have."""
import torch
import torch.nn.utils.parametrize
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import moeccl.torch as mt
from layer_agreement_cases import grid
from layer_cases import gathered, needs
from layer_checkpoint_cases import refuses
from layer_model_cases import EXPERTS, HIDDEN, TOKENS, alone
from layer_use_cases import refused, tokens_of

OPTIONS = {"ffn": 32, "max_tokens": TOKENS, "seed": 1}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.ffn = nn.Linear(HIDDEN, HIDDEN), mt.MoELayer(HIDDEN, EXPERTS, 2, trials=-1, **OPTIONS)

    def forward(self, x):
        return x + self.ffn(self.inp(x))


def made():
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def fsdp1(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def case_a_wrapper_that_takes_the_experts_is_refused(rank, n):
    forgotten = DistributedDataParallel(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), mt.MoELayer(HIDDEN, EXPERTS, 2, **OPTIONS)))
    for _ in range(2):
        refused(TypeError, "ignore_experts(model)", lambda: forgotten(tokens_of(rank)))
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, **OPTIONS)
    DistributedDataParallel(mt.ignore_experts(layer))(tokens_of(rank)).sum().backward()
    same_experts = grid(rank, n)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, group=same_experts["group"], **OPTIONS)
    wrapper = DistributedDataParallel(layer, process_group=same_experts["expert_data_group"])  # whose ranks have the same experts
    wrapper(tokens_of(rank)).sum().backward()
    DistributedDataParallel(mt.MoELayer(HIDDEN, EXPERTS, 2, group=alone(), **OPTIONS))(tokens_of(rank)).sum().backward()


class LowRank(nn.Module):
    """What adapters such as LoRA add to a stacked parameter by torch.nn.utils.parametrize."""

    def __init__(self, weight):
        super().__init__()
        slots, out, width = weight.shape
        self.a, self.b = nn.Parameter(torch.ones(slots, out, 2)), nn.Parameter(torch.full((slots, 2, width), 0.01))

    def forward(self, weight):
        return weight + self.a @ self.b


def case_adapted_experts_stay_those_of_their_rank(rank, n):
    def adapted():
        model = made()
        for block in model:
            for p in block.ffn.experts.parameters():
                p.requires_grad_(False)
            for name in list(block.ffn.experts._names.values()):
                torch.nn.utils.parametrize.register_parametrization(block.ffn.experts, name, LowRank(getattr(block.ffn.experts, name)))
        return model

    plain, x = adapted(), tokens_of(rank)
    plain(x).square().sum().backward()
    model = adapted()
    DistributedDataParallel(mt.ignore_experts(model))(x).square().sum().backward()
    experts = [[(p.detach(), p.grad) for p in mt.expert_parameters(m)] for m in (model, plain)]
    assert len(experts[0]) == 2 * 2 * 3 and sum(grad is None for _, grad in experts[0]) == 4
    torch.testing.assert_close(*([t for pair in one for t in pair if t is not None] for one in experts), rtol=1e-4, atol=1e-5)
    norm = mt.clip_grad_norm_(model, 1e9)
    assert all(norm.equal(other) for other in gathered(norm))
    refused(TypeError, "ignore_experts(model)", lambda: DistributedDataParallel(adapted())(x))
    for known, what in ((lambda: mt.full_state_dict(model), "a full state"), (lambda: mt.load_full_state_dict(model, {}), "a full state")):
        refused(ValueError, f"{what} knows the experts by the parameters of the expert module, and they have parametrizations.down__weight.0.a", known)
    for options in ({"swap": True}, {"replica_slots": EXPERTS // n + 1}):
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, **options, **OPTIONS)
        torch.nn.utils.parametrize.register_parametrization(layer.experts, "up__weight", LowRank(layer.experts.up__weight))
        refused(ValueError, "rebalance() knows the experts by", layer.rebalance)


def case_fully_shard_must_leave_the_experts_out(rank, n):
    needs((2, 7), "parameters that fully_shard ignores")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh, layer = init_device_mesh("cpu", (n,)), mt.MoELayer(HIDDEN, EXPERTS, 2, **OPTIONS)
    before = [p.detach().clone() for p in layer.experts.stacked()]
    refused(ValueError, "ignored_params=set(moeccl.torch.expert_parameters(model))", lambda: fully_shard(layer, mesh=mesh))
    torch.testing.assert_close([p.detach() for p in layer.experts.stacked()], before, rtol=0, atol=0)  # nothing was lost
    if n > 2:
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("same", "ep"))
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, group=mesh["ep"].get_group(), **OPTIONS)
        fully_shard(layer.experts, mesh=mesh["same"])  # over ranks that have the same experts
        layer(tokens_of(rank)).sum().backward()


def case_checkpoint_wrappers_change_no_names(rank, n):
    """The model may be in such a wrapper, and have some; DDP goes around them and the state of the whole model has no trace of them."""
    def wrapped(which):
        model = made()
        for i in which:
            model[i] = checkpoint_wrapper(model[i])
        return model

    plain = made()
    adam = torch.optim.Adam(plain.parameters())
    replicated = DistributedDataParallel(mt.ignore_experts(plain))
    replicated(tokens_of(rank)).square().mean().backward()
    adam.step()
    full, moments = mt.full_state_dict(plain), mt.full_optimizer_state_dict(plain, adam)
    expected = plain(tokens_of(rank)).detach()
    for model in (wrapped([0]), wrapped([0, 1]), checkpoint_wrapper(made()), checkpoint_wrapper(wrapped([1]))):
        optimizer = torch.optim.Adam(model.parameters())
        mt.load_full_state_dict(model, full)
        mt.load_full_optimizer_state_dict(model, optimizer, moments)
        state = mt.full_state_dict(model)
        assert state.keys() == full.keys(), state.keys() ^ full.keys()
        torch.testing.assert_close([state[k] for k in full], list(full.values()), rtol=0, atol=0)
        assert mt.full_optimizer_state_dict(model, optimizer)["state"].keys() == moments["state"].keys()
        y = DistributedDataParallel(mt.ignore_experts(model))(tokens_of(rank))
        torch.testing.assert_close(y, expected)
        y.sum().backward()


def case_fsdp1_must_leave_the_experts_out(rank, n):
    needs((2, 7), "FullyShardedDataParallel on the CPU")
    x, plain = tokens_of(rank), made()
    for own in (True, False):
        for grad in (True, False):
            wrong = fsdp1(made(), use_orig_params=own)
            with torch.set_grad_enabled(grad):
                refused(TypeError, "ignored_states=moeccl.torch.expert_parameters(model)", lambda: wrong(x))
        model = made()
        model = fsdp1(model, use_orig_params=own, ignored_states=mt.expert_parameters(model))
        y = model(x)
        torch.testing.assert_close(y, plain(x))
        y.sum().backward()
        state = mt.full_state_dict(model)
        assert state.keys() == plain.state_dict().keys()
        torch.testing.assert_close(state, mt.full_state_dict(plain))
        assert mt.load_full_state_dict(model, {k: v * 2 if v.is_floating_point() else v for k, v in state.items()}).missing_keys == []
        torch.testing.assert_close(mt.full_state_dict(model)["1.ffn.experts.up__weight"], 2 * state["1.ffn.experts.up__weight"])
        refuses(["FullyShardedDataParallel", "fully_shard"],
                lambda: mt.full_optimizer_state_dict(model, torch.optim.Adam(model.parameters())), TypeError)
    same_experts = grid(rank, n)  # which FullyShardedDataParallel's parts do not tell from others
    split = fsdp1(mt.MoELayer(HIDDEN, EXPERTS, 2, group=same_experts["group"], **OPTIONS), process_group=same_experts["expert_data_group"])
    if n > 2:
        refuses(["among ranks. Whether these have the same experts is not visible", "use fully_shard, which also splits"], lambda: split(x),
                TypeError)
    whole = mt.MoELayer(HIDDEN, EXPERTS, 2, group=alone(), **OPTIONS)  # all ranks have all experts
    fsdp1(nn.Sequential(whole), use_orig_params=True)(x).sum().backward()
    parameters = {name: p.detach() for name, p in plain.named_parameters()}
    torch.func.functional_call(plain, parameters, (x,))  # is no wrapper, and has tensors in place of parameters


def case_zero_must_leave_the_experts_out(rank, n):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = made()
    experts, start = mt.expert_parameters(model), [p.detach().clone() for p in mt.expert_parameters(model)]

    def step(*optimizers):
        model(tokens_of(rank)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    refused(TypeError, "moeccl.torch.expert_parameters(model)",
            lambda: step(ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)))
    torch.testing.assert_close([p.detach() for p in experts], start, rtol=0, atol=0)  # nothing was lost
    others = [p for p in model.parameters() if all(p is not e for e in experts)]
    step(ZeroRedundancyOptimizer(others, torch.optim.Adam, lr=1e-3), torch.optim.Adam(experts, lr=1e-3))
    torch.testing.assert_close([p.detach() for p in experts], start, rtol=0, atol=2e-3)  # one rank's experts differ by more
    same_experts = grid(rank, n)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, group=same_experts["group"], **OPTIONS)
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam, lr=1e-3, process_group=same_experts["expert_data_group"])
    layer(tokens_of(rank)).sum().backward()
    optimizer.step()
