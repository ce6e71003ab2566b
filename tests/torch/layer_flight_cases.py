# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about dispatches during which the shared expert computes (moeccl/torch/in_flight.py)."""
import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist

import moeccl
import moeccl.torch as mt
from moeccl.torch import in_flight
from layer_model_cases import EXPERTS, HIDDEN, TOKENS, reference, same, train
from layer_use_cases import SOON_S, refused, tokens_of


def in_nodes(n):
    """Returns options of a communicator whose ranks are in groups."""
    return {"topology": f"node:2 gpu:{n // 2}"}


def made(**options):
    torch.manual_seed(3)
    return mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, shared_expert=20, trials=-1, **options)


@contextlib.contextmanager
def order_of(layer):
    """Returns the list of what happens: the starts and waits of dispatches, and the shared expert's passes."""
    happened = []
    start, wait = in_flight.Flight.start, in_flight.Flight.wait

    def started(self, name, *rest):
        happened.append(name)
        return start(self, name, *rest)

    def waited(self):
        happened.append("wait")
        return wait(self)

    hooks = [layer.shared_expert.register_forward_hook(lambda *_: happened.append("shared")),
             layer.shared_expert.up.weight.register_hook(lambda _: happened.append("gradient"))]
    with mock.patch.object(in_flight.Flight, "start", started), mock.patch.object(in_flight.Flight, "wait", waited):
        yield happened
    for hook in hooks:
        hook.remove()


def case_the_shared_expert_computes_during_dispatch(rank, n):
    apart, together = made(comm_options=in_nodes(n)), made()
    together.load_state_dict(apart.state_dict())
    results = []
    for layer, expected in ((apart, ["moecclDispatch", "shared", "wait", "moecclDispatchBackward", "gradient", "wait"]),
                            (together, ["shared", "gradient"])):
        for x in (tokens_of(rank).requires_grad_(), tokens_of(rank)[:0].requires_grad_(), tokens_of(rank)):
            with order_of(layer) as happened:
                y = layer(x)
                y.square().sum().backward()
            assert happened == expected, happened
            results.append([y, *(p.grad.clone() for p in layer.parameters()), *([x.grad] if x.requires_grad else [])])
    with torch.no_grad():
        torch.testing.assert_close(apart(tokens_of(rank)), together(tokens_of(rank)))
    for mine, other in zip(results[:3], results[3:]):
        for a, b in zip(mine, other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def case_training_with_dispatches_in_flight_is_that_of_one_process(rank, n):
    losses = train(rank, 8, shared_expert=20, comm_options=in_nodes(n))[0]
    same(losses, reference(n, 8, shared_expert=20)[0])


def case_a_graph_with_a_flight_has_two_backward_passes(rank, n):
    layer, x = made(comm_options=in_nodes(n)), tokens_of(rank).requires_grad_()
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    refused(RuntimeError, "second time", loss.backward)


def case_a_failure_beside_a_flight_ends_the_others_wait(rank, n):
    group = dist.new_group()
    layer, x = made(group=group, comm_options=in_nodes(n)), tokens_of(rank)
    expected = layer(x)
    began = time.monotonic()
    if rank == n - 1:
        with mock.patch.object(layer.shared_expert, "forward", side_effect=RuntimeError("full")):
            refused(RuntimeError, "full", lambda: layer(x))
    else:
        refused(moeccl.Error, f"rank {n - 1} revoked", lambda: layer(x))
    assert time.monotonic() - began < SOON_S
    dist.barrier()
    mt.renew(layer)
    torch.testing.assert_close(layer(x), expected)
    mt.close(group)
    assert layer.comm not in in_flight._streams


def case_a_shared_expert_that_changes_its_input_is_refused(rank, n):
    """The rows would be those of before or after the change, as it happens. In bfloat16 no tensor that autograd has saved shows it."""
    class InPlace(torch.nn.Module):
        def forward(self, x):
            return x.relu_() * 1

    group = dist.new_group()
    layer = mt.MoELayer(HIDDEN, EXPERTS, 2, ffn=32, max_tokens=TOKENS, seed=1, shared_expert=InPlace(), trials=-1, group=group,
                        comm_options=in_nodes(n))
    said = None
    try:
        with torch.no_grad():
            layer(tokens_of(rank).to(torch.bfloat16))
    except (ValueError, moeccl.Error) as e:
        said = e
    # The first rank that sees it revokes the communicator.
    assert said is not None and ("in place" in str(said) or "revoked" in str(said)), said
    seen = torch.tensor(int(isinstance(said, ValueError)))
    dist.all_reduce(seen)
    assert seen > 0
    mt.close(group)
    unpriced = made(comm_options=in_nodes(n), swap=True)
    with order_of(unpriced) as happened:
        unpriced(tokens_of(rank))
    assert "moecclDispatch" not in happened  # its dispatches are timed
