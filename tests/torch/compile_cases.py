# SPDX-License-Identifier: Apache-2.0
"""Cases of compile_test.py: torch.compile takes the MoE layer into one graph, with the results of the uncompiled layer."""
import contextlib
import copy
import os
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moeccl
import moeccl.distributed
import moeccl.torch as mt
from layer_cases import gathered
from layer_model_cases import HIDDEN, TOKENS, Bare, alone
from moeccl.torch import _traced, aux_loss, functions

BACKEND = os.environ.get("MOECCL_TEST_COMPILER", "aot_eager")  # or inductor, which takes minutes and needs a C++ compiler
EXPERTS = 4
CLOSE = {"rtol": 0, "atol": 0} if BACKEND == "aot_eager" else {"rtol": 1e-4, "atol": 1e-4}


def made(**options):
    return mt.MoELayer(HIDDEN, EXPERTS, 2, **{"ffn": 32, "max_tokens": 64, "seed": 1, "aux_loss_weight": 0.1, **options})


def compiled(what, **options):
    """Compiles into one graph, which is the same for all numbers of tokens but 0 and 1."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(what, backend=BACKEND, **{"fullgraph": True, "dynamic": True, **options})


def n_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def tokens_of(rank, step, n=TOKENS):
    return torch.randn((n, HIDDEN), generator=torch.Generator().manual_seed(10 * step + rank))


def results(run, model, x, scale=1.0):
    """Returns the result of a training step and all gradients."""
    model.zero_grad()
    given = x.clone().requires_grad_()
    y = run(given)
    mt.set_aux_loss_scale(scale)  # after the forward pass
    y.square().sum().backward()
    mt.set_aux_loss_scale(1)
    return y.detach(), given.grad, *(p.grad.clone() for p in model.parameters())


@contextlib.contextmanager
def recorded():
    """Yields a list, to which each call that sends something adds its name and its layer's top_k."""
    said = []

    def told(name, real):
        def run(handle, *rest):
            said.append((name, handle.layer.top_k))
            return real(handle, *rest)
        return run

    with contextlib.ExitStack() as stack:
        for module in (functions, _traced):
            for name in ("move_rows", "move_back", "move_combined", "combine_gradients"):
                stack.enter_context(mock.patch.object(module, name, told(name, getattr(module, name))))
        yield said


def case_one_graph_gives_the_results_of_the_layer(rank, n):
    """The numbers of tokens differ by step and rank, down to none. A graph for 0 or 1 tokens is another one, as always in torch."""
    for model in (made(shared_expert=8), Bare()):
        run = compiled(model)
        for step, count in enumerate((TOKENS, 15, 9 + 3 * rank, 2 + rank)):
            x = tokens_of(rank, step, count)
            torch.testing.assert_close(results(run, model, x, 1 + step), results(model, model, x, 1 + step), msg=lambda m: f"{step}: {m}", **CLOSE)
            assert n_graphs() == 1 and _traced.n_routings() == 0, (n_graphs(), _traced.n_routings())
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), **CLOSE)
        if n == 2:
            x = tokens_of(rank, 9, 0 if rank else 7)
            torch.testing.assert_close(results(run, model, x), results(model, model, x), **CLOSE)
        assert _traced.n_routings() == 0
        assert not torch._dynamo.utils.counters["graph_break"]


def case_without_fullgraph_it_is_one_graph_too(rank, n):
    model, x = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), made(), nn.Tanh()), tokens_of(rank, 0)
    expected = results(model, model, x)
    torch.testing.assert_close(results(compiled(model, fullgraph=False), model, x), expected, **CLOSE)
    assert n_graphs() == 1 and not torch._dynamo.utils.counters["graph_break"]
    assert model[1].handle.n_tokens == TOKENS and model[1].expert_counts().sum() == 2 * TOKENS * n
    shown = model[1].aux_loss
    model(x)
    torch.testing.assert_close(shown, model[1].aux_loss, **CLOSE)


def case_routings_live_until_their_backward_pass(rank, n):
    layer = made()
    run, x = compiled(layer), tokens_of(rank, 0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(50):
        loss = run(x).square().sum()
        assert _traced.n_routings() == 1
        loss.backward()
        optimizer.step()
        assert _traced.n_routings() == 0  # although `loss` lives
    parts = [run(part) for part in x.chunk(2)]  # two micro-batches
    assert _traced.n_routings() == 2
    parts[0].sum().backward()
    assert _traced.n_routings() == 1
    parts[1].sum().backward()
    assert _traced.n_routings() == 0
    y = run(x)
    y.register_hook(lambda grad: 1 / 0)
    try:
        y.sum().backward()
    except ZeroDivisionError:
        assert _traced.n_routings() == 1
    del y
    assert _traced.n_routings() == 0
    assert all(len(made_for._free) <= 3 for made_for in layer.ep._layers.values())  # as many as lived at once, and the layer's handle


class Apart(nn.Module):
    """Layers between which no data flows, a result that nobody reads, and a layer that runs twice on the same tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.second = made(aux_loss_weight=0), mt.MoELayer(HIDDEN, EXPERTS, 3, ffn=8, max_tokens=64, seed=2, aux_loss_weight=0)

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        self.second(x.detach())
        return a * b + self.first(x)


def case_calls_keep_the_order_of_the_program(rank, n):
    model = Apart()
    run = compiled(model)
    for count in (TOKENS, 3 + rank):
        x, said = tokens_of(rank, 0, count), []
        with recorded() as calls:
            for callee in (model, run):
                calls.clear()
                got = results(callee, model, x)
                said.append((list(calls), got))
        (eager, expected), (traced, got) = said
        forward = [(name, top_k) for top_k in (2, 3, 3, 2) for name in ("move_rows", "move_combined")]
        assert traced[:8] == eager[:8] == forward, traced
        assert sorted(traced[8:]) == sorted(eager[8:]) and len(traced) == 14, (traced, eager)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # gradients of x may be added in another order


def case_checkpointing_repeats_no_call_in_a_graph(rank, n):
    layer, x = made(), tokens_of(rank, 0)
    expected = results(layer, layer, x)
    run = compiled(lambda x: checkpoint(layer, x, use_reentrant=False))
    with recorded() as calls:
        torch.testing.assert_close(results(run, layer, x), expected, **CLOSE)
    assert [name for name, _ in calls] == ["move_rows", "move_combined", "combine_gradients", "move_back"], calls
    run = compiled(layer)
    with recorded() as calls:  # around a graph it repeats the whole graph
        torch.testing.assert_close(results(lambda x: checkpoint(run, x, use_reentrant=False), layer, x), expected, **CLOSE)
    assert [name for name, _ in calls].count("move_rows") == 2 and _traced.n_routings() == 0


def case_blocks_share_a_graph(rank, n):
    """More of them than torch compiles graphs for a function (8)."""
    if n > 2:
        return
    blocks, x = [made() for _ in range(10)], tokens_of(rank, 0)
    run = [compiled(block) for block in blocks[:1]] + [torch.compile(block, backend=BACKEND, fullgraph=True, dynamic=True) for block in blocks[1:]]
    for block, one in zip(blocks, run):
        torch.testing.assert_close(one(x), block(x), **CLOSE)
    assert n_graphs() == 1, n_graphs()
    copied = copy.deepcopy(blocks[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(copied, backend=BACKEND, fullgraph=True, dynamic=True)(x), blocks[0](x), **CLOSE)
    assert copied.handle is not None and copied.handle is not blocks[0].handle


def case_other_options_break_the_graph_and_say_why(rank, n):
    x = tokens_of(rank, 0)
    for options in ({"swap": True}, {"replica_slots": EXPERTS // n + 1}, {"domains": [n]}):
        layer = made(**options)
        try:
            compiled(layer)(x)
        except torch._dynamo.exc.Unsupported as error:
            assert f"a MoELayer with {next(iter(options))} cannot be traced: call torch.compile without fullgraph=True" in str(error), error
        else:
            raise AssertionError(f"{options} compiled")


def case_experts_outside_of_a_graph_are_compiled_once(rank, n):
    """Experts that are compiled by themselves get numbers of rows that change at each step, and often 0 or 1."""
    layer = mt.MoELayer(HIDDEN, 4 * n, 2, ffn=32, max_tokens=64, seed=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.experts.compile(backend=BACKEND)
    graphs = []
    for step in range(10):
        x = tokens_of(rank, step, 3)
        torch.testing.assert_close(layer(x), copy.deepcopy(layer).forward(x), **CLOSE)
        graphs.append(n_graphs())
    assert graphs[-1] <= 5, graphs


def by_place(x):
    """A router without gradients."""
    place = torch.arange(x.shape[0])
    return torch.full((x.shape[0], 2), 0.5), torch.stack([place % EXPERTS, (place + 1) % EXPERTS], dim=1), None


def case_tokens_of_one_rank_need_no_gradient(rank, n):
    """Also where that rank has tokens, and so the graph of the others but for this; and where the router does not train either."""
    for model in (made(), made(router=by_place)):
        run = compiled(model, dynamic=False)
        for step, n_tokens in enumerate((TOKENS, 0)):
            x = tokens_of(rank, step, n_tokens if rank == 1 else TOKENS)
            expected = results(model, model, x)
            model.zero_grad()
            given = x.clone().requires_grad_(rank != 1)
            run(given).square().sum().backward()
            torch.testing.assert_close([p.grad for p in model.parameters()], list(expected[2:]), **CLOSE)
            if rank != 1:
                torch.testing.assert_close(given.grad, expected[1], **CLOSE)
            assert _traced.n_routings() == 0


def case_operators_say_what_they_return(rank, n):
    """Also for a loss of half precision with a GradScaler's scale, which is a tensor of one element."""
    for op in ("route", "counts", "dispatch", "dispatch_backward", "combine", "combine_backward", "loss_gradient"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.moeccl, f"moe_{op}").default.tags, op
    loss = torch.ones((), dtype=torch.bfloat16)
    aux_loss.set_scaler_scale(torch.full((1,), 2.0))
    gradient = torch.ops.moeccl.moe_loss_gradient(loss, loss)
    aux_loss.set_scaler_scale(1.0)
    assert gradient.dtype == loss.dtype and gradient.shape == loss.shape and gradient.item() == 2, gradient


def case_errors_leave_nothing_behind(rank, n):
    layer = made(router=lambda x: (torch.ones(x.shape[0], 2), torch.full((x.shape[0], 2), EXPERTS), None))
    try:
        compiled(layer)(tokens_of(rank, 0))
    except moeccl.Error as error:
        assert str(EXPERTS) in str(error), error
    else:
        raise AssertionError("an expert that does not exist was accepted")
    assert _traced.n_routings() == 0
    ticket = _traced._ticket_for(mock.Mock(rows_per_expert=[3]), None)
    assert torch.ops.moeccl.moe_counts(ticket, 1) == [3] and _traced.n_routings() == 1
    moved = ticket.clone()
    del ticket
    try:
        torch.ops.moeccl.moe_counts(moved, 1)
    except RuntimeError as error:
        assert "this is a copy" in str(error), error
    else:
        raise AssertionError("a copy of a ticket has kept its routing")


def case_functional_collectives_of_the_backend_are_in_the_graph(rank, n):
    """An exchange of uneven parts with its gradient and a sum, on a process group of backend "moeccl"."""
    group = dist.new_group(backend="moeccl")

    def exchanged(x, come, to):
        rows = fc.all_to_all_single_autograd(x * 2, come, to, group)
        return fc.all_reduce(rows.detach().sum(), "sum", group) + rows.tanh().sum()

    run = compiled(exchanged)
    for most in (3, 5):
        to, come, got = [most + r for r in range(n)], [most + rank] * n, []
        for callee in (exchanged, run):
            x = torch.arange(2.0 * sum(to)).view(-1, 2).div(10 + rank).requires_grad_()
            loss = callee(x, come, to)
            loss.backward()
            got.append((loss.detach(), x.grad))
        torch.testing.assert_close(*got, rtol=0, atol=0)
    assert n_graphs() <= 2 and not torch._dynamo.utils.counters["graph_break"]  # the second one has open sizes
    dist.destroy_process_group(group)


def case_ddp_with_several_buckets_keeps_the_graph_whole(rank, n):
    """A graph whose parameters fill several of DDP's buckets, which torch would split where they end."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), made(shared_expert=8), nn.Linear(HIDDEN, HIDDEN))
    other = copy.deepcopy(model)
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 4 * HIDDEN):
        wrapped, expected = (DistributedDataParallel(mt.ignore_experts(m), bucket_cap_mb=1e-4) for m in (model, other))
        compiled(model)  # resets torch.compile
        model.compile(backend=BACKEND, fullgraph=True, dynamic=True)
        for step in range(2):
            x = tokens_of(rank, step, TOKENS + step)
            torch.testing.assert_close(results(wrapped, model, x), results(expected, other, x), **CLOSE)
    assert n_graphs() == 1 and _traced.n_routings() == 0, n_graphs()


def case_groups_of_experts_are_summed_in_the_graph(rank, n):
    """Each rank has all experts, so that the ranks are one expert_data_group."""
    layer, x = made(group=alone(), expert_data_group=dist.group.WORLD), tokens_of(rank, 0, TOKENS - rank)
    layer.experts.down__weight.requires_grad_(False)
    expected = [g.grad for g in (results_of(layer, layer, x), layer.experts.up__weight)]
    run = compiled(layer)
    torch.testing.assert_close([g.grad for g in (results_of(run, layer, x), layer.experts.up__weight)], expected, **CLOSE)
    assert layer.experts.down__weight.grad is None and n_graphs() == 1
    assert all(torch.equal(expected[1], other) for other in gathered(expected[1])), "the gradients were not summed"


def case_a_rank_without_a_graph_sums_with_one_that_has_it(rank, n):
    """One rank may run uncompiled when torch has compiled the layer there as often as its limit allows."""
    layer, x = made(group=alone(), expert_data_group=dist.group.WORLD), tokens_of(rank, 0)
    run, summed = compiled(layer), mt.MoELayer.summed

    def step(callee):
        """Returns the gradients, and the calls of the backward pass."""
        with recorded() as said, mock.patch.object(mt.MoELayer, "summed", lambda it, grads: said.append(("summed", len(grads))) or summed(it, grads)):
            given = results_of(callee, layer, x)
        return [given.grad, *(p.grad for p in layer.parameters())], said[2:]

    expected, said = step(layer)
    for callee in (layer if rank else run, run if rank else layer, run):
        got, calls = step(callee)
        torch.testing.assert_close(got, expected, **CLOSE)
        assert calls == said == [("combine_gradients", 2), ("summed", 2), ("move_back", 2)], (calls, said)
    assert n_graphs() == 1


class UsesBoth(nn.Module):
    """An expert whose second layer some ranks do not use."""

    def __init__(self, both):
        super().__init__()
        self.first, self.second, self.both = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), both

    def forward(self, x):
        return self.first(x) + self.second(x) if self.both else self.first(x)


def case_unused_parameters_have_the_gradients_of_the_layer(rank, n):
    """They have none, or with an expert_data_group the sum over its ranks, which is zero if no rank uses the parameter."""
    x, group = tokens_of(rank, 0, TOKENS - rank), alone()
    for users in ([], [n - 1]):
        for options in ({}, {"average": False}, {"expert_data_group": dist.group.WORLD}):
            layer = made(ffn=None, expert=lambda: UsesBoth(rank in users), group=group, **options)
            got = []
            for callee in (layer, compiled(layer)):
                results_of(callee, layer, x)
                got.append([p.grad for p in layer.parameters()])
            torch.testing.assert_close(*got, **CLOSE)
            unused = layer.experts.second__weight.grad
            if "expert_data_group" in options:
                assert unused.any() == bool(users) and all(torch.equal(unused, other) for other in gathered(unused)), (users, unused)
            else:
                assert (unused is not None) == (rank in users), (users, options, unused)


def case_a_torch_with_another_splitter_compiles(rank, n):
    """Another torch may lack the function that _keep_whole() replaces."""
    import torch._dynamo.backends.distributed as splitter
    kept, x = splitter.bucket_has_external_output, tokens_of(rank, 0)
    del splitter.bucket_has_external_output
    try:
        for optimize in (False, True):
            _traced._keep_whole.cache_clear()
            with warnings.catch_warnings(record=True) as said, torch._dynamo.config.patch(optimize_ddp=optimize):
                warnings.simplefilter("always")
                for _ in range(2):
                    layer = made()
                    torch.testing.assert_close(compiled(layer)(x), layer(x), **CLOSE)
            assert sum("set torch._dynamo.config.optimize_ddp = False" in str(w.message) for w in said) == optimize, [str(w.message) for w in said]
    finally:
        splitter.bucket_has_external_output = kept
        _traced._keep_whole.cache_clear()


def results_of(run, layer, x):
    """Makes a training step, and returns its input, which has its gradient."""
    layer.zero_grad()
    given = x.clone().requires_grad_()
    run(given).square().sum().backward()
    return given


def case_autocast_may_be_in_the_graph(rank, n):
    class Amp(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    torch.manual_seed(3)
    model, x = Amp(nn.Linear(HIDDEN, HIDDEN), made(shared_expert=8), nn.Linear(HIDDEN, HIDDEN)), tokens_of(rank, 0)
    expected = results(model, model, x)
    assert expected[0].dtype == torch.bfloat16 and model[1].handle.layer.dtype == torch.bfloat16
    torch.testing.assert_close(results(compiled(model), model, x), expected, **(CLOSE if BACKEND == "aot_eager" else {"rtol": 0.1, "atol": 0.1}))
    assert model[1].handle.layer.dtype == torch.bfloat16


def case_full_states_know_nothing_of_the_compiler(rank, n):
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), made())
    inside = nn.Sequential(plain[0], torch.compile(plain[1], backend=BACKEND))
    expected = mt.full_state_dict(plain)
    names, optimizer = list(dict(plain.named_parameters())), torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    results(plain, plain, tokens_of(rank, 0))
    optimizer.step()
    moments = mt.full_optimizer_state_dict(plain, optimizer)
    assert list(moments["state"]) == names
    for wrapped in (torch.compile(plain, backend=BACKEND), DistributedDataParallel(mt.ignore_experts(torch.compile(plain, backend=BACKEND))),
                    torch.compile(DistributedDataParallel(mt.ignore_experts(plain)), backend=BACKEND), inside):
        with torch.no_grad():
            for p in plain.parameters():
                p.zero_()
        mt.load_full_state_dict(wrapped, expected)
        state = mt.full_state_dict(wrapped)
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
        assert list(state._metadata) == list(expected._metadata), (list(state._metadata), list(expected._metadata))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)
        mt.load_full_optimizer_state_dict(wrapped, optimizer, moments)
        torch.testing.assert_close(mt.full_optimizer_state_dict(wrapped, optimizer)["state"], moments["state"], rtol=0, atol=0)
