# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about experts that move: what moves with them, who decides, and what replicas share."""
import copy
import math

import torch
import torch.distributed as dist
from torch import nn

import moeccl
import moeccl.torch as mt
from layer_agreement_cases import assert_replicas_are_equal, grid
from layer_cases import gathered, needs
from layer_checkpoint_cases import refuses
from moeccl.torch import replicated, swapped

HIDDEN, EXPERTS, TOKENS = 16, 8, 32


def layer_with(n, **options):
    torch.manual_seed(3)
    options = {"ffn": 32, "max_tokens": TOKENS, "seed": 1, "aux_loss_weight": 0, **options}
    return mt.MoELayer(HIDDEN, EXPERTS, 2, **options)


def moving_kinds(n):
    # Moves at any price, because these tests are about what moves.
    return [{"swap": True, "swap_horizon": 1e12}, {"replica_slots": EXPERTS // n + 1, "swap_horizon": 1e12}]


def tokens_of(rank, place=None):
    """Tokens that prefer other experts than those of another place."""
    place = rank if place is None else place
    return torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank)) + \
        2 * torch.randn((1, HIDDEN), generator=torch.Generator().manual_seed(50 + place))


def by_expert(layer, tensors):
    """Returns {expert: its rows of the tensors [slots, ...]} for the experts of all ranks."""
    mine = {e: [t[i].clone() for t in tensors] for i, e in enumerate(layer.experts.numbers())}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {e: rows for some in every for e, rows in some.items()}


def assert_same_by_expert(layer, before, tensors, what):
    after = by_expert(layer, tensors)
    for e in range(EXPERTS):
        assert all(a.equal(b) for a, b in zip(before[e], after[e])), f"{what}: expert {e} has another's"


def rebalance_until_moved(layer, x, *arguments, **named):
    for _ in range(6):
        with torch.enable_grad():
            layer(x)
        if layer.rebalance(*arguments, **named):
            return
        x = x.roll(1, dims=1)
    raise AssertionError("no expert moved")


def case_groups_of_experts_move_alike(rank, n):
    """Two expert-parallel groups with other data, whose gradients are summed."""
    if n < 4:
        return
    half, options = n // 2, grid(rank, n)
    for kind in moving_kinds(half):
        layer, moved = layer_with(n, **options, **kind), 0
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        before, x = by_expert(layer, layer.experts.stacked()), tokens_of(rank, rank // half)
        for _ in range(6):
            for _ in range(4):  # so that choices differ by more than chance explains
                layer(x).square().sum().backward()
            optimizer.zero_grad()
            moved += layer.rebalance(optimizer)
        numbers = gathered(torch.tensor(layer.experts.numbers()))
        assert all(numbers[r].equal(numbers[r + half]) for r in range(half)), f"{kind}: {numbers}"
        assert moved > 0, f"{kind}: nothing moved, so equal experts say nothing"
        assert_same_by_expert(layer, before, layer.experts.stacked(), kind)


def case_groups_with_other_experts_are_named(rank, n):
    if n < 4:
        return
    half, options, x = n // 2, grid(rank, n), tokens_of(rank)
    words = ["of an expert_data_group", "holds experts"]
    for kind in moving_kinds(half):
        for run in (lambda made: made(x).sum().backward(), lambda made: made.rebalance()):
            layer = layer_with(n, **options, **kind)
            state = mt.full_state_dict(layer)
            if rank >= half and "swap" in kind:  # only on the first rank of each group do experts differ
                layer.placement.slot_of = [1, 0, *range(2, EXPERTS)]
            elif rank >= half:
                slots = layer.placement.slot_expert
                slots[[0, -1]] = slots[[-1, 0]]
                layer.placement.slot_expert = slots
            mt.load_full_state_dict(layer, state)
            for _ in range(2):  # every time
                refuses(words, lambda: run(layer))
    other = layer_with(n, group=options["group"], expert_data_group=options["group"])
    refuses(words, lambda: other(x).sum().backward())


def with_call(module, changed, body):
    """Runs body() with another function `call` in the module."""
    call, module.call = module.call, changed
    try:
        return body()
    finally:
        module.call = call


def case_the_first_rank_decides_for_all(rank, n):
    """As if the solvers of other ranks rounded otherwise."""
    call = replicated.call

    def solve(comm, name, *arguments):
        call(comm, name, *arguments)
        if name == "moecclSolveSwap":
            arguments[2]._tensor.copy_(torch.tensor([0, EXPERTS - 1] if rank == 0 else [1, 2 + rank]))
        if name == "moecclSolveReplicas" and rank > 0:
            arguments[1]._tensor.copy_(arguments[1]._tensor.flip(0))

    for given in [{}] if n < 4 else [{}, grid(rank, n)]:
        for kind in moving_kinds(n // 2 if given else n):
            layer, x = layer_with(n, **given, **kind), tokens_of(rank)
            layer(x).sum().backward()
            with_call(replicated, solve, lambda: with_call(swapped, solve, layer.rebalance))
            places = layer.placement.slot_of if "swap" in kind else layer.placement.slot_expert
            for other in gathered(places):
                assert other.equal(places), f"{kind}, {given}"
            layer(x).sum().backward()


def case_wrong_choices_are_errors_everywhere(rank, n):
    made, good, last = {}, torch.arange(2 * TOKENS).reshape(TOKENS, 2) % EXPERTS, rank == n - 1
    x = torch.ones(TOKENS, HIDDEN)
    for kind in ({}, {"swap": True}):
        layer = layer_with(n, router=lambda _: (torch.ones(good.shape), made["index"], None), **kind)
        made["index"] = good.float()
        refuses(["topk_idx holds torch.float32"], lambda: layer(x), TypeError)
        for wrong, said in (([5, -5], "is -5"), ([5, EXPERTS], f"is {EXPERTS}"), ([5, 5], "twice")):  # on one rank
            made["index"] = good.clone()
            made["index"][3] = torch.tensor(wrong if last else [5, 6])
            refuses([said] if last else [f"rank {n - 1}"], lambda: layer(x), moeccl.Error)
        made["index"] = good
        layer(x).sum().backward()
        layer.rebalance()
        layer(x).sum().backward()


def case_replicas_take_the_demand_of_long_runs(rank, n):
    """More tokens than 32 bits hold, of an expert and of all, and a failure that loses no counts."""
    share, call = torch.tensor([1, 1, 50, 1, 1, 1, 1, 1]), replicated.call

    def fails(comm, name, *arguments):
        if name == "moecclSolveReplicas":
            raise ValueError(name)
        call(comm, name, *arguments)

    for scale in (1000, 2**24, 2**40):
        layer = layer_with(n, replica_slots=EXPERTS // n + 1)
        layer.placement._demand = share * scale
        refuses(["moecclSolveReplicas"], lambda: with_call(replicated, fails, layer.rebalance))
        assert layer.placement._demand.equal(share * scale), "the counts are lost"
        layer.rebalance()
        assert layer.placement.slot_expert.bincount(minlength=EXPERTS).argmax() == 2, scale
        assert not layer.placement._demand.any()


def case_master_weights_move_with_their_experts(rank, n):
    """At a learning rate of 0 nothing changes, so what a step copies back must be the experts that are in the slots now."""
    for kind in moving_kinds(n):
        layer, x = layer_with(n, dtype=torch.bfloat16, **kind), tokens_of(rank).bfloat16()
        masters = {p: p.detach().float().requires_grad_() for p in layer.parameters()}
        optimizer = torch.optim.AdamW(masters.values(), lr=0.0)

        def step():
            layer(x).float().square().mean().backward()
            for p, master in masters.items():
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for p, master in masters.items():
                    p.copy_(master)

        step()
        moments = [optimizer.state[masters[p]]["exp_avg"] for p in layer.experts.stacked()]
        before = by_expert(layer, [*layer.experts.stacked(), *moments])
        refuses(["experts.up__weight", "param_groups", "also={parameter: master}"], lambda: layer.rebalance(optimizer))
        rebalance_until_moved(layer, x, optimizer, also=masters)
        assert_same_by_expert(layer, before, [*layer.experts.stacked(), *moments], kind)
        step()
        assert_same_by_expert(layer, before, layer.experts.stacked(), kind)


def case_copies_of_a_model_follow(rank, n):
    from torch.optim.swa_utils import AveragedModel
    for kind in moving_kinds(n):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer_with(n, **kind), layer_with(n), layer_with(n, **kind))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), tokens_of(rank)
        average = AveragedModel(model, avg_fn=lambda mine, given, _: 0.5 * mine + 0.5 * given)
        average.update_parameters(model)
        with torch.no_grad():
            expected, moved = average(x), 0
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.zero_grad()
            moved += mt.rebalance(model, optimizer, also=[average])
            average.update_parameters(model)
        assert moved > 0, "nothing moved"
        with torch.no_grad():
            torch.testing.assert_close(average(x), expected, rtol=1e-4, atol=1e-5)
        refuses(["1 MoE layers and the model 3"], lambda: mt.rebalance(model, optimizer, also=model[1]))
        kept = copy.deepcopy(model[1])
        rebalance_until_moved(model[1], torch.tanh(x.roll(3, dims=1)), optimizer)
        refuses(["MoE layer 0 of a copy", "other slots"], lambda: model[1].rebalance(optimizer, also=kept))


def case_gradients_move_between_micro_batches(rank, n):
    for kind in moving_kinds(n):
        found = []
        for moves in (False, True):
            layer, x = layer_with(n, **kind), tokens_of(rank)
            layer(x).square().mean().backward()
            first = by_expert(layer, [p.grad for p in layer.experts.stacked()])
            if moves:
                rebalance_until_moved(layer, x)
                assert_same_by_expert(layer, first, [p.grad for p in layer.experts.stacked()], kind)
            layer(x.roll(2, dims=0).roll(1, dims=1)).square().mean().backward()
            found.append(by_expert(layer, [p.grad for p in layer.experts.stacked()]))
        for e in range(EXPERTS):
            torch.testing.assert_close(found[1][e], found[0][e], rtol=1e-4, atol=1e-6, msg=lambda m: f"{kind}, expert {e}: {m}")


def case_wrong_optimizers_are_named_before_anything_moves(rank, n):
    for kind in moving_kinds(n):
        layer, x = layer_with(n, **kind), tokens_of(rank)
        dense, experts = torch.optim.SGD(layer.router.parameters(), lr=0.1), torch.optim.AdamW(layer.experts.parameters(), lr=1e-3)
        layer(x).square().mean().backward()
        experts.step()
        moments = [experts.state[p]["exp_avg"] for p in layer.experts.stacked()]
        before = by_expert(layer, [*layer.experts.stacked(), *moments])
        for wrong, words, kinds in (((dense,), ["experts.up__weight", "no param_groups", "all optimizers"], ValueError),
                                    ((moments,), ["optimizer is a Tensor"], TypeError),
                                    ((experts, {"up": moments[0]}), ["among its keys"], ValueError),
                                    ((experts, "ema"), ["also has str"], TypeError),
                                    ((experts, {layer.experts.up__weight: moments[0][1:]}), ["also[experts.up__weight]", "slots"], ValueError)):
            refuses(words, lambda: layer.rebalance(*wrong), kinds)
        if rank == n - 1:
            experts.state[layer.experts.up__weight]["extra"] = torch.zeros(99, 2)
        refuses(["extra of experts.up__weight", "row"], lambda: layer.rebalance(experts))
        if rank == n - 1:
            experts.state[layer.experts.up__weight]["extra"] = torch.zeros(layer.experts.n_slots, 2)
        refuses([f"rank {n - 1}", "extra of experts.up__weight", "rank 0"], lambda: layer.rebalance(experts))
        experts.state[layer.experts.up__weight].pop("extra", None)
        assert_same_by_expert(layer, before, [*layer.experts.stacked(), *moments], kind)
        rebalance_until_moved(layer, x, [dense, experts, experts], also={p: p.detach() for p in layer.parameters()})  # twice
        assert_same_by_expert(layer, before, [*layer.experts.stacked(), *moments], kind)
        layer.experts.requires_grad_(False)
        layer.rebalance(dense)  # does not train them


class Hot(nn.Module):
    """Every token's first choice is expert 0."""

    def forward(self, x):
        index = torch.stack([torch.zeros(len(x), dtype=torch.int64), 1 + torch.arange(len(x)) % (EXPERTS - 1)], 1)
        return torch.full((len(x), 2), 0.5), index, x.new_zeros(())


def hot_layer(slot_expert, **options):
    layer = layer_with(4, replica_slots=3, **options)
    layer.placement.slot_expert = slot_expert
    layer.router = Hot()
    return layer


def case_replicas_share_what_capacity_leaves(rank, n):
    """Rank 3 has no replica of the expert that all tokens choose, rank 0 three."""
    if n != 4:
        return
    slots = [0, 0, 0, 0, 1, 2, 0, 3, 4, 5, 6, 7]
    x = tokens_of(rank)
    for factor in (1.0, 0.7, 3.0, None):
        layer = hot_layer(slots, capacity_factor=factor)
        given = x.clone().requires_grad_()
        layer(given).sum().backward()
        per_slot = gathered(torch.tensor(layer.handle.tokens_per_expert))
        at = torch.cat(per_slot)[torch.tensor(slots) == 0]
        assert at.max() - at.min() <= 1, f"factor {factor}: the replicas of expert 0 have {at.tolist()} tokens"
        dropped = [int(d) for d in gathered(torch.tensor(layer.handle.n_dropped))]
        limit = math.ceil((factor or 1e9) * 2 * TOKENS * n / len(slots))
        wanted = torch.bincount(Hot()(x)[1].flatten(), minlength=EXPERTS) * n
        demanded = (wanted - limit * torch.bincount(torch.tensor(slots))).clamp(min=0)
        assert sum(dropped) == demanded.sum() and int(torch.cat(per_slot).sum()) == 2 * n * TOKENS - sum(dropped), (factor, dropped, demanded)
        assert max(dropped) - min(dropped) <= int((demanded > 0).sum()), f"factor {factor}: ranks drop {dropped}"
        if factor == 1.0:
            assert sum(dropped) == 18 and max(dropped) - min(dropped) <= 1, dropped


def case_one_ranks_replicas_share_its_tokens(rank, n):
    layer = layer_with(n, replica_slots=EXPERTS + 2)
    layer.placement.slot_expert = [0, 0, *range(EXPERTS)] * n
    layer.router = Hot()
    layer(tokens_of(rank))
    assert set(layer.handle.tokens_per_expert[:3]) <= {10, 11}, layer.handle.tokens_per_expert  # 32 for each 3 slots


def case_replicas_that_drift_apart_are_named(rank, n):
    needs((2, 5), "Adafactor")
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        layer = layer_with(n, replica_slots=EXPERTS // n + 3)
        optimizer, x = make(layer.parameters(), lr=1e-2), tokens_of(rank)
        for _ in range(5):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
        if make is torch.optim.AdamW:
            layer.rebalance(optimizer)
            assert_replicas_are_equal(layer)
            continue
        refuses(["the replicas of expert", "on ranks", "drifted", "Adafactor", "load_full_state_dict"], lambda: layer.rebalance(optimizer))
        mt.load_full_state_dict(layer, mt.full_state_dict(layer))
        layer.rebalance(optimizer)


class Skewed(nn.Module):
    """3/4 of the tokens choose expert 1."""

    def forward(self, x):
        place = torch.arange(len(x))
        index = torch.where(place % 4 < 3, torch.ones_like(place), (2 + place // 4) % EXPERTS)
        return torch.ones(len(x), 1), index[:, None], None


def case_replicas_that_differ_by_rounding_become_equal(rank, n):
    """Experts of odd sizes, so that a fused optimizer rounds an element of one replica in a vector and of another at the tensor's end."""
    hidden = 10
    layer = mt.MoELayer(hidden, EXPERTS, 1, ffn=13, seed=1, router=Skewed(), replica_slots=EXPERTS // n + 3)
    optimizer = torch.optim.AdamW(layer.experts.parameters(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(rank)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn((TOKENS, hidden), generator=generator)
            (layer(x) - x.sin()).square().mean().backward()
            optimizer.step()

    def states():
        return [t for p in layer.experts.stacked() for t in (p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])]

    def first_and_last(tensors):
        every = [torch.cat(gathered(t)) for t in tensors]
        at = (layer.placement.slot_expert == 1).nonzero()[:, 0]
        return [(t[at[0]], t[at[-1]]) for t in every]

    for _ in range(3):
        train(10)
        layer.rebalance(optimizer)
    train(10)
    with torch.no_grad():  # so much at least, whatever this processor's optimizer does
        for t in states():
            t += (0.5 - torch.rand(t.shape, generator=generator)) * 1e-6 * t.abs().max()
    assert not any(a.equal(b) for a, b in first_and_last(states()))
    before = [a for a, _ in first_and_last(states())]
    layer.placement._demand.zero_()  # nothing moves
    assert layer.rebalance(optimizer) == 0
    for (a, b), wanted in zip(first_and_last(states()), before):
        assert a.equal(wanted) and b.equal(wanted), "a replica does not have what the first has"
    assert_replicas_are_equal(layer)
    holder, mine = divmod(int((layer.placement.slot_expert == 1).nonzero()[-1]), layer.placement.per_rank)
    for which in (0, 1):  # a parameter, and a moment while parameters differ by rounding
        if rank == holder:
            parameter, apart = states()[0], states()[which]
            parameter[mine] *= 1 + 1e-6
            apart[mine, 0] += 1e-3 * apart.abs().max()
        refuses(["the replicas of expert 1 on ranks", f"and {holder} have drifted"], lambda: layer.rebalance(optimizer))
        mt.load_full_state_dict(layer, mt.full_state_dict(layer))
        mt.load_full_optimizer_state_dict(layer, optimizer, mt.full_optimizer_state_dict(layer, optimizer))
        assert layer.rebalance(optimizer) == 0


def case_parts_of_experts_are_joined_or_refused(rank, n):
    """Experts that fully_shard cuts over the ranks that hold the same ones."""
    needs((2, 7), "fully_shard of a part of a model")
    if n < 4:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("edp", "ep"))
    whole, x = layer_with(n, group=mesh["ep"].get_group()), tokens_of(rank)

    def sharded(**options):
        layer = layer_with(n, group=mesh["ep"].get_group(), **options)
        fully_shard(layer.experts, mesh=mesh["edp"])
        return layer, torch.optim.AdamW(layer.parameters(), lr=1e-2)

    layer, optimizer = sharded(swap=True)
    layer(x).sum().backward()
    refuses(["experts.up__weight is a DTensor", "ignored_params"], lambda: layer.rebalance(optimizer), TypeError)
    state = mt.full_state_dict(layer)
    for key, value in mt.full_state_dict(whole).items():
        assert not torch.is_tensor(value) or state[key].equal(value), key
    optimizer.step()
    state, moments = mt.full_state_dict(layer), mt.full_optimizer_state_dict(layer, optimizer)
    assert moments["state"]["experts.up__weight"]["exp_avg"].shape == (EXPERTS, 32, HIDDEN)
    other, later = sharded()
    other(x).sum().backward()
    later.step()
    mt.load_full_state_dict(other, state)
    mt.load_full_optimizer_state_dict(other, later, moments)
    again, moments_again = mt.full_state_dict(other), mt.full_optimizer_state_dict(other, later)
    assert all(again[key].equal(value) for key, value in state.items() if torch.is_tensor(value))
    for name, one in moments["state"].items():
        assert all(moments_again["state"][name][key].equal(value) for key, value in one.items()), name
    with torch.no_grad():
        torch.testing.assert_close(other(x), layer(x))
