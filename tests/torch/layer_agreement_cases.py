# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about what is equal on all ranks and must stay so: clipped gradients, skipped steps, first values."""
import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moeccl
import moeccl.torch as mt
from layer_cases import gathered, needs
from layer_model_cases import EXPERTS, HIDDEN, SAMPLE, TOKENS, Model, alone, batch, every_feature, mean, same

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def grid(rank, n):
    """Returns the group of this rank's experts and that of the ranks that hold the same ones: n / 2 ranks share experts, twice."""
    half = n // 2
    rows = [dist.new_group([half * i + r for r in range(half)]) for i in range(2)]
    columns = [dist.new_group([r, r + half]) for r in range(half)]
    return {"group": rows[rank // half], "expert_data_group": columns[rank % half]}


def placements(rank, n):
    return [{}, {"replica_slots": EXPERTS // n + 3}, {"domains": [n]}, grid(rank, n)]


def replicated(model):
    """Returns all parameters that every rank has."""
    experts = {id(p) for p in mt.expert_parameters(model)}
    return [p.detach() for p in model.parameters() if id(p) not in experts]


def assert_equal_on_all_ranks(tensors, what):
    flat = torch.cat([t.flatten() for t in tensors])
    for rank, other in enumerate(gathered(flat)):
        assert flat.equal(other), f"{what}: rank {rank} has other values"


def assert_replicas_are_equal(layer):
    slots = layer.placement.slot_expert
    ranks_of = [{s // layer.placement.per_rank for s in (slots == e).nonzero()[:, 0].tolist()} for e in range(layer.n_experts)]
    assert any(len(ranks) > 1 for ranks in ranks_of), "every expert is on one rank, so equal replicas say nothing"
    for stacked in layer.experts.stacked():
        every = torch.cat(gathered(stacked))
        for e in range(layer.n_experts):
            copies = every[slots == e]
            assert len(copies) > 0 and copies.eq(copies[0]).all(), f"the replicas of expert {e} differ"


def step_with(model, optimizer, parts, clip, norm_type):
    optimizer.zero_grad()
    loss = model(*parts)
    loss.backward()
    norm = clip(model, 0.05, norm_type)
    optimizer.step()
    return loss.item(), norm.item()


def torchs_clip(model, max_norm, norm_type):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def case_clipping_is_that_of_one_process(rank, n):
    for options in placements(rank, n):
        for norm_type in (2.0, math.inf, 1.0):
            model, whole = Model(**options), Model(group=alone(), average=False)
            wrapped = DistributedDataParallel(mt.ignore_experts(model))
            optimizers = [torch.optim.SGD(m.parameters(), lr=2.0, momentum=0.9) for m in (model, whole)]
            got, wanted = [], []
            for step in range(4):
                loss, norm = step_with(wrapped, optimizers[0], batch(step, rank), mt.clip_grad_norm_, norm_type)
                got.append((mean(loss), norm))
                every = [torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(n)))]
                wanted.append(step_with(whole, optimizers[1], every, torchs_clip, norm_type))
            torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), **CLOSE, msg=lambda m: f"{options}, {norm_type}: {m}")
            assert min(norm for _, norm in got) > 0.05, "nothing was clipped"
            assert_equal_on_all_ranks(replicated(model), f"{options}, {norm_type}")
            if "replica_slots" in options:
                for layer in model.layers:
                    assert_replicas_are_equal(layer)


def case_clipping_joins_the_parts_of_fsdp2(rank, n):
    needs((2, 7), "parameters that fully_shard ignores")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model, whole = Model(), Model(group=alone(), average=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)), ignored_params=set(mt.expert_parameters(model)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0) for m in (model, whole)]
    got, wanted = [], []
    for step in range(4):
        loss, norm = step_with(model, optimizers[0], batch(step, rank), mt.clip_grad_norm_, 2.0)
        got.append((mean(loss), norm))
        every = [torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(n)))]
        wanted.append(step_with(whole, optimizers[1], every, torchs_clip, 2.0))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), **CLOSE)


def case_clipping_takes_any_gradients(rank, n):
    """Gradients may have 16 bits, belong to no expert on a rank, or not be finite on one rank."""
    layer = mt.MoELayer(HIDDEN, 1, 1, ffn=8, max_tokens=TOKENS, seed=1, dtype=torch.bfloat16)
    layer(torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)).square().sum().backward()
    norm = mt.clip_grad_norm_(layer, 1e9, math.inf)
    assert norm.dtype == torch.float32 and norm > 0
    assert_equal_on_all_ranks([norm], "a rank without experts")
    for grad in (p.grad for p in layer.experts.stacked() if rank == 0):
        grad.fill_(float("nan"))
    assert mt.clip_grad_norm_(layer, 1.0).isnan()
    try:
        mt.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        assert "nan" in str(error), error
    else:
        raise AssertionError("a norm that is not finite was taken")
    dense = nn.Linear(3, 3)
    assert mt.clip_grad_norm_(dense, 1.0) == 0
    for wrong, kind, said in ((layer.parameters(), TypeError, "give the model"), (layer.experts, ValueError, "outside of a MoELayer")):
        try:
            mt.clip_grad_norm_(wrong, 1.0)
        except kind as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")


def case_all_ranks_skip_the_steps_of_one(rank, n):
    kinds = [("SGD", lambda p: torch.optim.SGD(p, lr=0.1)), ("fused", lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))]
    for options in placements(rank, n):
        for name, make in kinds:
            for clipped in (False, True):
                model = Model(**options)
                wrapped = DistributedDataParallel(mt.ignore_experts(model))
                optimizer, scaler, scales = make(model.parameters()), mt.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
                for step in range(4):
                    optimizer.zero_grad()
                    scaler.scale(wrapped(*batch(step, rank))).backward()
                    before = [p.detach().clone() for p in model.parameters()]
                    if step == 1 and rank == n - 1:
                        model.layers[0].experts.stacked()[0].grad[0] = math.inf
                    if clipped:
                        scaler.unscale_(optimizer)
                        mt.clip_grad_norm_(wrapped, 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    scales.append(scaler.get_scale())
                    skipped = all(a.equal(b) for a, b in zip(before, model.parameters()))
                    assert skipped == (step == 1), f"{options}, {name}, {clipped}: step {step} was {'' if skipped else 'not '}skipped"
                assert scales == [1024, 512, 512, 1024], scales
                assert_equal_on_all_ranks(replicated(model), f"{options}, {name}, {clipped}")


def case_a_scaler_that_is_off_does_nothing(rank, n):
    scaler = mt.GradScaler("cpu", enabled=False)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.randn(TOKENS, HIDDEN)).sum()).backward()
    if rank == 0:  # alone
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def case_stages_before_the_last_scale_the_auxiliary_loss(rank, n):
    """Two stages of a pipeline, both on each rank, with a scaler each, and two micro-batches in flight."""
    def gradients(enabled):
        torch.manual_seed(1)
        first = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, seed=1, aux_loss_weight=1.0, trials=-1)
        last = torch.nn.Linear(HIDDEN, 1)
        scalers = [mt.GradScaler("cpu", init_scale=1024.0, enabled=enabled) for _ in range(2)]
        optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in (first, last)]

        def forward(micro):
            y = scalers[0].stage_output((first(torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(10 * rank + micro))),))
            return y[0], y[0].detach().requires_grad_()

        (y0, sent0), (y1, sent1) = forward(0), forward(1)
        for y, sent in ((y0, sent0), (y1, sent1)):
            scalers[1].scale(last(sent).square().mean()).backward()
            y.backward(sent.grad)
            forward(2)  # of the next micro-batch
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.unscale_(optimizer)
        got = [p.grad.clone() for stage in (first, last) for p in stage.parameters()]
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
        return got

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-4, atol=1e-6)


def case_ranks_with_other_generators_start_with_the_same_experts(rank, n):
    torch.manual_seed(1000 + rank)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, replica_slots=EXPERTS // n + 3)
    assert_replicas_are_equal(layer)
    options = grid(rank, n)
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=8, max_tokens=TOKENS, **options)
    flat = torch.cat([w.detach().flatten() for w in layer.experts.stacked()])
    every = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(every, flat, group=options["expert_data_group"])
    assert every[0].equal(every[1]), "the groups of experts start with other values"


def case_layers_do_not_follow_the_default_device(rank, n):
    features = every_feature(n)
    x = torch.randn((2 * SAMPLE, HIDDEN), generator=torch.Generator().manual_seed(rank))
    torch.set_default_device("meta")
    try:
        for options in [*features, {"domains": "auto"}, {"group": alone(), "expert_data_group": dist.new_group()}]:
            layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=2 * SAMPLE, device="cpu", **options)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)  # an Adam may put its steps on the default device
            scaler = mt.GradScaler("cpu")
            given = x.clone().requires_grad_()
            torch.autograd.backward(scaler.scale(layer(given).square().sum()))  # Tensor.backward() turns the default device off
            scaler.unscale_(optimizer)
            assert mt.clip_grad_norm_(layer, 1.0).is_cpu and given.grad.abs().max() > 0
            scaler.step(optimizer)
            layer.rebalance(optimizer)
            layer(x).sum().backward()
            mt.load_full_state_dict(layer, mt.full_state_dict(layer))
            if options.get("replica_slots"):
                layer.placement.slot_expert = layer.placement.slot_expert
            if options.get("sample_tokens"):
                layer.follow(torch.arange(2 * SAMPLE, device="cpu"))
        later = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1)
        assert later.experts.stacked()[0].is_meta
    finally:
        torch.set_default_device(None)
    now = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1)
    later.to_empty(device="cpu")
    mt.load_full_state_dict(later, mt.full_state_dict(now))
    torch.testing.assert_close(later(x), now(x), rtol=0, atol=0)
    try:
        moeccl.torch._calls.memory(torch.zeros(2, device="meta"))
    except ValueError as error:
        assert "on meta" in str(error), error
    else:
        raise AssertionError("a tensor without memory was taken")


def case_layers_share_the_communicator_of_their_experts(rank, n):
    group = dist.new_group()
    options = {"group": group, "ffn": 32, "max_tokens": TOKENS, "seed": 1}
    layers = [mt.MoELayer(HIDDEN, EXPERTS, 2, domains=[n], **options) for _ in range(3)]
    layers.append(copy.deepcopy(layers[0]))
    shared = {id(layer.placement.experts_comm) for layer in layers}
    assert len(shared) == 1 and layers[0].placement.experts_comm is not layers[0].comm, shared
    torch.manual_seed(5)
    plain = mt.MoELayer(HIDDEN, EXPERTS, 2, **options)
    for layer in layers:
        layer.router.load_state_dict(plain.router.state_dict())
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank))
    for layer in layers[:2]:  # two gathers that nothing has waited for
        try:
            layer(torch.cat([x, x]))
        except moeccl.Error as failure:
            assert "max_tokens" in str(failure), failure
    for layer in layers[::-1]:
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-6)

    def gradients(layer):
        run = nn.Sequential(layer, layer)  # two gathers of one step, and two more where it is recomputed
        layer.zero_grad()
        given = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(run, given, use_reentrant=False).square().sum().backward()
        return [given.grad, *(p.grad.clone() for p in layer.experts.stacked())]

    torch.testing.assert_close(gradients(layers[0]), gradients(plain), rtol=1e-3, atol=1e-4)
    mt.close(group)
    assert not layers[0].placement.experts_comm.handle


def case_experts_train_the_same_with_a_shared_communicator(rank, n):
    """Two layers with domains, whose gathers and sums take turns on one communicator."""
    from layer_model_cases import reference, train
    losses, model, _ = train(rank, 4, domains=[n])
    assert model.layers[0].placement.experts_comm is model.layers[1].placement.experts_comm
    same(losses, reference(n, 4)[0])
