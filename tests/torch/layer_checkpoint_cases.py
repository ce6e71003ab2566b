# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about checkpoints: a rank's own, and that of the whole model for other numbers of ranks."""
import copy
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moeccl.torch as mt
from layer_cases import needs
from layer_model_cases import EXPERTS, HIDDEN, TOKENS, Model, alone, batch, every_feature, go_on, same, train

BATCH = 7  # a batch that no model is trained on


def refuses(words, body, kinds=ValueError):
    try:
        body()
    except kinds as error:
        assert all(word in str(error) for word in words), (words, error)
    else:
        raise AssertionError(f"nothing was refused: {words}")


def loss_of(model, rank):
    with torch.no_grad():
        return model(*batch(BATCH, rank)).item()


def copied(state):
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}


def case_a_rank_refuses_the_experts_of_another(rank, n):
    share = EXPERTS // n
    for options in ({}, {"replica_slots": share + 1}, {"domains": [n]}, {"swap": True}):
        model = nn.Sequential(mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, **options))
        states = [None] * n
        dist.all_gather_object(states, copied(model.state_dict()))
        model.load_state_dict(states[rank])
        other, before = states[(rank + 1) % n], [p.detach().clone() for p in model[0].experts.stacked()]
        for strict in (True, False):
            refuses(["the checkpoint holds experts", "this rank has experts", "full_state_dict"],
                    lambda: model.load_state_dict(other, strict=strict))
        assert all(a.equal(b) for a, b in zip(before, model[0].experts.stacked())), "refused experts were loaded"
        old = {key: value for key, value in states[rank].items() if "experts._extra_state" not in key}
        refuses(["0.experts._extra_state"], lambda: model.load_state_dict(old), RuntimeError)
        assert model.load_state_dict(old, strict=False).missing_keys == ["0.experts._extra_state"]
    if n == 2:
        first = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, seed=1)
        words = ["holds experts 4-7, this rank has experts 0-3:", "holds experts 0-3, this rank has experts 4-7:"]
        refuses([words[rank]], lambda: first.load_state_dict({k[2:]: v for k, v in other.items()} | first.router.state_dict(prefix="router.") |
                                                             {"experts._extra_state": states[1 - rank]["0.experts._extra_state"]}))


def case_a_distributed_checkpoint_is_refused_not_mixed_up(rank, n):
    """torch.distributed.checkpoint keeps one rank's tensor under a key that several have."""
    import torch.distributed.checkpoint as dcp
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    try:
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1)
        dcp.save({"layer": layer.state_dict()}, checkpoint_id=where[0] + "/own")
        state, refused = {"layer": layer.state_dict()}, False
        dcp.load(state, checkpoint_id=where[0] + "/own")
        try:
            layer.load_state_dict(state["layer"])
        except ValueError as error:
            assert "the checkpoint holds experts" in str(error), error
            refused = True
        every = [None] * n
        dist.all_gather_object(every, refused)
        assert sum(every) == n - 1, f"refused: {every}"
        # The whole model's is the same on all ranks, as dcp expects.
        layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1)
        dcp.save({"layer": mt.full_state_dict(layer)}, checkpoint_id=where[0] + "/full")
        other = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=99)
        state = {"layer": mt.full_state_dict(other)}
        dcp.load(state, checkpoint_id=where[0] + "/full")
        mt.load_full_state_dict(other, state["layer"])
        assert all(a.equal(b) for a, b in zip(layer.experts.stacked(), other.experts.stacked()))
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(where[0])


def case_a_saved_placement_comes_back_before_its_experts(rank, n):
    for options, name in (({"swap": True}, "slot_of"), ({"replica_slots": EXPERTS // n + 1}, "slot_expert")):
        model, moved = train(rank, 6, rebalance_every=2, **options)[1:]
        assert moved > 0, "nothing moved"
        saved = [(getattr(layer.placement, name), copied(layer.state_dict())) for layer in model.layers]
        expected = loss_of(model, rank)
        fresh = Model(**options)
        fresh.load_state_dict({k: v for k, v in model.state_dict().items() if ".experts." not in k}, strict=False)
        for layer, (places, state) in zip(fresh.layers, saved):
            if layer.experts.numbers() != state["experts._extra_state"].tolist():
                refuses(["the checkpoint holds experts"], lambda: layer.load_state_dict(state))
            setattr(layer.placement, name, places.tolist() if rank == 0 else places)
            layer.load_state_dict(state)
        assert loss_of(fresh, rank) == expected, f"{options}: {loss_of(fresh, rank)} instead of {expected}"
        assert abs(expected - loss_of(Model(**options), rank)) > 1e-4, "training changed nothing"
        for net in (model, fresh):  # replicas are also summed by the new places
            net.zero_grad()
            net(*batch(BATCH, rank)).backward()
        for old, new in zip(model.layers, fresh.layers):
            for a, b in zip(old.experts.stacked(), new.experts.stacked()):
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def case_wrong_placements_are_named(rank, n):
    swapped = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, swap=True).placement
    replicas = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, replica_slots=EXPERTS // n + 1).placement
    for placement, name in ((swapped, "slot_of"), (replicas, "slot_expert")):
        good = getattr(placement, name)
        for wrong, words, kind in ((good[1:], ["shape", f"give {len(good)} numbers"], ValueError),
                                   (good.clone().fill_(EXPERTS), [f"from 0 to {EXPERTS - 1}"], ValueError),
                                   (good - 1, ["-1"], ValueError), (good.float(), ["whole numbers"], TypeError),
                                   (good.clone().fill_(0), ["slot"], ValueError)):
            refuses([name, *words], lambda: setattr(placement, name, wrong), kind)
            assert getattr(placement, name).equal(good)


def case_the_whole_model_comes_back_on_any_ranks(rank, n):
    """The state of each feature's model, trained, loads into one process, and into every other feature's model."""
    features = [o for o in every_feature(n) if not o.get("sample_tokens") and "codec_ratio" not in o]  # the codec changes what runs
    half = dist.new_group(list(range(n // 2)))
    for options in features:
        model = train(rank, 3, rebalance_every=1, **options)[1]
        model = DistributedDataParallel(mt.ignore_experts(model))
        state = mt.full_state_dict(model)
        assert state["layers.0.experts.up__weight"].shape == (EXPERTS, 32, HIDDEN)
        expected = loss_of(model, rank)
        whole = Model(group=alone(), **({"domains": [1], "gradient_ratio": 4} if "gradient_ratio" in options else {}))
        whole.load_state_dict(state)  # strictly
        torch.testing.assert_close(loss_of(whole, rank), expected, rtol=1e-5, atol=1e-6)
        for others in features if options.get("swap") or options.get("replica_slots") else [options]:
            if ("gradient_ratio" in options) != ("gradient_ratio" in others):
                continue
            other = train(rank, 2, rebalance_every=1, **others)[1]
            assert not mt.load_full_state_dict(other, state).missing_keys
            torch.testing.assert_close(loss_of(other, rank), expected, rtol=1e-5, atol=1e-6)
        if rank < n // 2 and "domains" not in options:
            fewer = Model(group=half)
            mt.load_full_state_dict(fewer, state)
            torch.testing.assert_close(loss_of(fewer, rank), expected, rtol=1e-5, atol=1e-6)
        kept = mt.full_state_dict(model, root=n - 1)
        assert (kept.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in kept.items() if torch.is_tensor(v))) \
            if rank == n - 1 else kept == {}
    wrong = dict(state, **{"layers.0.experts.up__weight": torch.zeros(3, 32, HIDDEN)})
    refuses(["layers.0.experts.up__weight has 3 experts", f"has {EXPERTS}"], lambda: mt.load_full_state_dict(model, wrong))


def case_parts_of_fsdp2_come_back_whole(rank, n):
    needs((2, 7), "parameters that fully_shard ignores")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (n,))

    def wrap(model):
        return fully_shard(model, mesh=mesh, ignored_params=set(mt.expert_parameters(model)))

    model = train(rank, 3, wrap=wrap)[1]
    state = mt.full_state_dict(model)
    whole = Model(group=alone())
    whole.load_state_dict(state)
    torch.testing.assert_close(loss_of(model, rank), loss_of(whole, rank), rtol=1e-5, atol=1e-6)
    other = wrap(Model())
    mt.load_full_state_dict(other, state)
    torch.testing.assert_close(loss_of(other, rank), loss_of(whole, rank), rtol=1e-5, atol=1e-6)


def equal_states(a, b):
    assert a["state"].keys() == b["state"].keys()
    for name, one in a["state"].items():
        for key, value in one.items():
            torch.testing.assert_close(b["state"][name][key], value, rtol=0, atol=0, msg=lambda said: f"{key} of {name}: {said}")


def case_the_optimizer_goes_on_with_any_placement(rank, n):
    """What is saved of each feature's run goes on in every other feature's, with the losses of the run that was not interrupted."""
    features = [o for o in every_feature(n) if not o.get("sample_tokens") and "codec_ratio" not in o and "gradient_ratio" not in o]
    half = dist.new_group(list(range(n // 2)))

    def made(**options):
        model = Model(**options)
        wrapped = DistributedDataParallel(mt.ignore_experts(model))
        experts = set(mt.expert_parameters(model))  # two groups, with other options
        return model, wrapped, torch.optim.AdamW([{"params": [p for p in wrapped.parameters() if p not in experts]},
                                                  {"params": list(experts), "weight_decay": 0.2}], lr=1e-2)

    for options in features:
        model, wrapped, optimizer = made(**options)
        go_on(rank, range(3), model, wrapped, optimizer, rebalance_every=1)
        weights, state = copy.deepcopy(mt.full_state_dict(model)), mt.full_optimizer_state_dict(wrapped, optimizer)
        assert state["state"]["layers.0.experts.up__weight"]["exp_avg"].shape == (EXPERTS, 32, HIDDEN)
        assert [g["weight_decay"] for g in state["param_groups"]] == [0.01, 0.2]
        expected = go_on(rank, range(3, 6), model, wrapped, optimizer)[0]
        same(expected, expected)  # it learns something
        for others in features:
            model, wrapped, optimizer = made(**others)
            go_on(rank, range(2), model, wrapped, optimizer, rebalance_every=1)  # another placement and other moments
            mt.load_full_state_dict(model, weights)
            mt.load_full_optimizer_state_dict(wrapped, optimizer, state)
            equal_states(state, mt.full_optimizer_state_dict(wrapped, optimizer))
            same(go_on(rank, range(3, 6), model, wrapped, optimizer, rebalance_every=1)[0], expected, 1e-4)
        for group in [alone()] + ([half] if rank < n // 2 else []):
            model = Model(group=group)
            optimizer = torch.optim.AdamW(model.parameters())
            refuses(["no group of the saved optimizer", "group 0"], lambda: mt.load_full_optimizer_state_dict(model, optimizer, state))
            one_group = dict(state, param_groups=[dict(state["param_groups"][0], params=sum((g["params"] for g in state["param_groups"]), []))])
            mt.load_full_optimizer_state_dict(model, optimizer, one_group)
            equal_states(state, mt.full_optimizer_state_dict(model, optimizer))
            assert optimizer.param_groups[0]["lr"] == 1e-2
    kept = mt.full_optimizer_state_dict(*last_trained(rank), root=n - 1)
    assert ("layers.0.experts.up__weight" in kept["state"]) if rank == n - 1 else kept == {}


def last_trained(rank):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(*batch(0, rank)).backward()
    optimizer.step()
    return model, optimizer


def case_states_that_cannot_be_joined_are_named(rank, n):
    model, optimizer = last_trained(rank)
    up = model.layers[0].experts.up__weight
    refuses(["parameter 0 of the optimizer's group 0", "[3]"],
            lambda: mt.full_optimizer_state_dict(model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1)))
    optimizer.state[up]["columns"] = torch.zeros(5 if rank == 0 else up.shape[0])
    refuses(["columns of layers.0.experts.up__weight", "rank 0", "optimizer.state_dict()"], lambda: mt.full_optimizer_state_dict(model, optimizer))
    del optimizer.state[up]["columns"]
    if rank == n - 1:
        optimizer.state[up].clear()
    refuses([f"on rank {n - 1}", "layers.0.experts.up__weight", "the same step"], lambda: mt.full_optimizer_state_dict(model, optimizer))


def case_the_optimizer_of_fsdp2_comes_back(rank, n):
    needs((2, 7), "parameters that fully_shard ignores")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (n,))

    def made(**options):
        model = Model(**options)
        wrapped = fully_shard(model, mesh=mesh, ignored_params=set(mt.expert_parameters(model)))
        return model, wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)

    model, wrapped, optimizer = made(swap=True, swap_horizon=1e12)
    go_on(rank, range(3), model, wrapped, optimizer, rebalance_every=1)
    weights, state = copy.deepcopy(mt.full_state_dict(model)), mt.full_optimizer_state_dict(model, optimizer)
    expected = go_on(rank, range(3, 6), model, wrapped, optimizer)[0]
    model, wrapped, optimizer = made()
    mt.load_full_state_dict(model, weights)
    mt.load_full_optimizer_state_dict(model, optimizer, state)
    equal_states(state, mt.full_optimizer_state_dict(model, optimizer))
    same(go_on(rank, range(3, 6), model, wrapped, optimizer)[0], expected, 1e-4)
