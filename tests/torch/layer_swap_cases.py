# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about expert swap and replicas that move: which, for which tokens, and at what price."""
from collections import Counter

import torch

import moeccl.torch as mt
from layer_cases import gathered
from layer_checkpoint_cases import refuses
from layer_placement_cases import EXPERTS, HIDDEN, TOKENS, layer_with, tokens_of

ANY_PRICE = 1e12  # as swap_horizon


def case_a_swap_is_one_for_the_plan_that_runs(rank, n):
    """Experts 0 and 3 are on rank 0. Deduplicated, the pairs {0, 1} and {2, 3} should each be on one rank; without, the ranks are balanced."""
    if n != 2:
        return
    pairs = torch.tensor([[0, 1]] * 50 + [[2, 3]] * 30)
    for algorithm, moved in (("flat", 0), ("hier:1", 2)):
        layer = mt.MoELayer(HIDDEN, 4, 2, ffn=8, max_tokens=80, seed=1, swap=True, algorithm=algorithm,
                            router=lambda x: (torch.ones(pairs.shape), pairs, None))
        layer.placement.slot_of = [0, 2, 3, 1]
        layer(torch.ones(80, HIDDEN)).sum().backward()
        assert layer.rebalance() == moved, algorithm


def case_swaps_count_the_latest_tokens(rank, n):
    made = {}
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=3000, seed=1, swap=True, router=lambda _: made["choices"])
    for step in range(3):
        index = torch.full((3000, 2), step) + torch.tensor([0, 1])
        made["choices"] = torch.ones(index.shape), index, None
        layer(torch.ones(3000, HIDDEN)).sum().backward()
    seen = layer.placement._seen
    assert seen.shape == (4096, 2) and seen[:1096, 0].eq(1).all() and seen[1096:, 0].eq(2).all(), seen


def case_the_default_swap_crosses_nodes(rank, n):
    """Tokens choose the experts {0, 4} or {2, 6}. Each pair lies on both nodes; one swap brings both pairs to a node each."""
    if n != 4:
        return
    index = torch.tensor([[0, 4], [2, 6]] * (TOKENS // 2))
    options = {"router": lambda x: (torch.ones(index.shape), index, None), "algorithm": "hier:2", "swap": True, "swap_horizon": ANY_PRICE,
               "comm_options": {"topology": "node:2 gpu:2"}}

    def nodes_after_a_swap(**levels):
        layer = layer_with(n, **options, **levels)
        layer(torch.ones(TOKENS, HIDDEN)).sum().backward()
        layer.rebalance()
        node = layer.placement.slot_of // 4  # of each expert
        return node[0] == node[4] and node[2] == node[6]

    assert nodes_after_a_swap(), "the default does not know the nodes"
    assert not nodes_after_a_swap(swap_levels=[n]), "so the ranks alone choose another pair"


def case_replicas_know_the_nodes(rank, n):
    """The solver gets the topology's outermost groups, or as many as the caller says."""
    from moeccl.torch import replicated
    if n != 4:
        return
    call, seen = replicated.call, []

    def watch(comm, name, *arguments):
        call(comm, name, *arguments)
        if name == "moecclSolveReplicas":
            problem = arguments[0]._obj
            seen.append((problem.n_nodes, problem.rank_node[:n] if problem.rank_node else None))

    replicated.call = watch
    try:
        for topology, given in (("node:2 gpu:2", {}), ("node:2 gpu:1+3", {}), ("node:2 gpu:2", {"n_nodes": 4}), (None, {})):
            layer = layer_with(n, replica_slots=EXPERTS // n + 1, comm_options={"topology": topology} if topology else {}, **given)
            layer(tokens_of(rank)).sum().backward()
            layer.rebalance()
    finally:
        replicated.call = call
    assert seen == [(2, [0, 0, 1, 1]), (2, [0, 1, 1, 1]), (4, [0, 1, 2, 3]), (1, [0, 0, 0, 0])], seen


def case_a_swap_has_to_pay(rank, n):
    """A pair that gains stays where its exchange takes longer than what it saves; the price is that of the last swap."""
    x = tokens_of(rank)

    def rebalanced(layer):
        layer(x).sum().backward()
        return layer.rebalance()

    layer = layer_with(n, swap=True, swap_horizon=1e-9)
    assert rebalanced(layer) == 0 and rebalanced(layer) == 0 and layer.placement.gain > 0, layer.placement.gain
    assert layer.placement.step_us > 0 and layer.placement.swap_us == 0, "no swap, so none was timed"
    layer.placement._horizon = ANY_PRICE
    assert rebalanced(layer) == 2
    layer.placement._horizon = 1e-9
    for _ in range(2):
        x = x.roll(1, dims=1)
        assert rebalanced(layer) == 0
    found = gathered(torch.tensor([layer.placement.gain, layer.placement.step_us, layer.placement.swap_us], dtype=torch.float64))
    assert all(one.equal(found[0]) for one in found) and found[0][2] > 0, found
    refuses(["swap_horizon is 0"], lambda: layer_with(n, swap=True, swap_horizon=0))


def case_a_slow_swap_does_not_end_all_swaps(rank, n):
    """As if a late peer had made the last one take 1000 s: after some time another one is tried."""
    made = {}
    layer = layer_with(n, swap=True, swap_horizon=1e4, router=lambda _: (torch.ones(made["index"].shape), made["index"], None))

    def rebalanced():
        """Tokens choose two experts of another rank, which are others each time."""
        made["step"] = made.get("step", 0) + 1
        first = (EXPERTS // n * (rank + 1) + made["step"]) % EXPERTS
        made["index"] = torch.tensor([[first, (first + 1) % EXPERTS]]).repeat(TOKENS, 1)
        layer(torch.ones(TOKENS, HIDDEN, requires_grad=True)).sum().backward()
        return layer.rebalance()

    layer.placement._own_move_us = 1e9 if rank == n - 1 else 0.0
    moved = []
    while not moved or not moved[-1]:
        moved.append(rebalanced())
        assert len(moved) < 60, "no pair moves any more"
    assert moved[0] == 0 and layer.placement.gain > 0, moved


def replicas_with(n, made, tokens=TOKENS, **options):
    """Returns a layer with replicas, and a function that makes a training pass with the choices of gates[EXPERTS] and then rebalances."""
    layer = layer_with(n, replica_slots=EXPERTS // n + 1, max_tokens=tokens,
                       router=lambda _: (torch.ones(made["index"].shape), made["index"], None), **options)

    def rebalanced(gates, seed):
        generator = torch.Generator().manual_seed(seed)
        made["index"] = torch.multinomial(torch.tensor(gates, dtype=torch.float32).expand(tokens, EXPERTS), 2, generator=generator)
        layer(torch.ones(tokens, HIDDEN, requires_grad=True)).sum().backward()
        return layer.rebalance()

    return layer, rebalanced


SKEWED = [[30, 2, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 1, 1, 30], [1, 1, 20, 1, 1, 20, 1, 1]]


def case_replicas_have_to_pay(rank, n):
    """Replicas stay where moving them takes longer than what it saves, as with an even gate, whose tokens differ by chance."""
    layer, rebalanced = replicas_with(n, {}, swap_horizon=1e-9)
    placement = layer.placement
    assert rebalanced(SKEWED[0], rank) == 0 and placement.gain > 0 and placement.step_us > 0 and placement.move_us == 0
    placement._horizon = ANY_PRICE
    assert rebalanced(SKEWED[0], rank) > 0
    for seed in range(3):
        placement._horizon = 1e-6
        assert rebalanced(EXPERTS * [1], 10 * seed + rank) == 0
    found = gathered(torch.tensor([placement.gain, placement.step_us, placement.move_us], dtype=torch.float64))
    assert all(one.equal(found[0]) for one in found) and found[0][2] > 0, found
    placement._horizon = ANY_PRICE
    rebalanced(SKEWED[1], rank)
    for seed in range(2):  # the same tokens again: nothing is to be gained, whatever a move may cost
        assert rebalanced(SKEWED[1], rank) == 0 and placement.gain <= 0, placement.gain
    refuses(["swap_horizon is -1"], lambda: layer_with(n, replica_slots=EXPERTS, swap_horizon=-1))


def case_replicas_do_not_follow_chance(rank, n):
    """An even gate's tokens differ by chance. A placement that is made for them gains nothing later, so it is not worth any move."""
    layer, rebalanced = replicas_with(n, {}, 256, swap_horizon=ANY_PRICE)
    seen = [rebalanced(EXPERTS * [1], 1000 * seed + rank) for seed in range(6)]
    assert seen[1:] == 5 * [0] and layer.placement.gain > 0, f"{seen} slots moved"
    assert rebalanced(SKEWED[0], rank) > 0


def case_experts_that_stay_on_a_rank_keep_their_slots(rank, n):
    layer, rebalanced = replicas_with(n, {}, swap_horizon=ANY_PRICE)
    total = 0
    for seed, gates in enumerate(SKEWED):
        before = layer.placement.slot_expert.view(n, -1).tolist()
        moved = rebalanced(gates, 10 * seed + rank)
        after = layer.placement.slot_expert.view(n, -1).tolist()
        new = sum(sum((Counter(then) - Counter(now)).values()) for now, then in zip(before, after))
        assert moved == new, f"{moved} slots changed for {new} experts that came to a rank"
        total += moved
    assert total > 0, "no expert moved, so this says nothing"


def case_replicas_move_where_capacity_drops_fewer_then(rank, n):
    """At any price."""
    layer, rebalanced = replicas_with(n, {}, swap_horizon=1e-9, capacity_factor=1.0)
    dropped = []
    for moves in (True, False):
        assert (rebalanced(SKEWED[0], rank) > 0) == moves
        dropped.append(int(sum(gathered(torch.tensor(layer.handle.n_dropped)))))
    assert dropped[1] < dropped[0], dropped
