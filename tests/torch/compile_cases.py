# SPDX-License-Identifier: Apache-2.0
"""Cases of compile_test.py: torch.compile takes the MoE layer into one graph, with the results of the uncompiled layer."""
import contextlib
import copy
import os
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeccl
import moeccl.distributed
import moeccl.torch as mt
from layer_model_cases import HIDDEN, TOKENS, Bare
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
