# SPDX-License-Identifier: Apache-2.0
"""Experts and samples that move between ranks: hybrid domains, migration, the codec, expert swap and re-placing combine."""
import array
import ctypes
import gc
import unittest

import moeccl
from layers import EXPERTS, HIDDEN, TOKENS, TOP_K, choices, floats, layer
from ranks import in_processes, in_threads


def hybrid_round(comm):
    """Gathers the experts of a domain of two, sends tokens to their holders, and sums gradients at the owners."""
    with_hybrid = moeccl.Hybrid(comm, EXPERTS, domain=[comm.size])
    info = with_hybrid.info()
    own = floats(3 * with_hybrid.n_own, comm.rank + 1.0)
    held = floats(3 * with_hybrid.n_held)
    with_hybrid.gather(own, held)
    per_rank = EXPERTS // comm.size
    expected = [e // per_rank + 1.0 for e in info.held_experts for _ in range(3)]
    moe = with_hybrid.moe(4 * HIDDEN, TOP_K, TOKENS)
    routing = moe.routing(choices(comm.rank))
    rows, back = floats(routing.n_rows * HIDDEN), floats(TOKENS * HIDDEN)
    routing.dispatch(floats(TOKENS * HIDDEN, 2.0), rows)
    routing.combine(rows, back)
    grads = floats(3 * with_hybrid.n_own)
    with_hybrid.reduce(held, grads)
    page = with_hybrid.explain(12)
    out = (list(held) == expected, list(back) == [4.0] * len(back), list(grads) == [comm.size * v for v in own],
           info.n_own == per_rank, info.n_held == EXPERTS, len(page) > 100)
    for thing in (routing, moe, with_hybrid):
        thing.close()
    return out


def migrate(comm):
    """Runs two epochs of one layer's encoded experts, and calls that must be refused."""
    count = 1000
    with_hybrid = moeccl.Hybrid(comm, EXPERTS, domain=[comm.size])
    shared = floats(count)
    experts = floats(count * with_hybrid.n_own)
    for i in range(with_hybrid.n_own):
        experts[count * i + 7] = 1.0 + with_hybrid.info().own_experts[i]
    moeccl.shared_expert(comm, floats(count * with_hybrid.n_own), with_hybrid.n_own, EXPERTS, shared)
    queue = moeccl.Migration(with_hybrid, count, n_layers=2)
    errors = queue.send(experts, shared, layer=1)
    before = queue.info(1)
    queue.begin(1)
    held = floats(count * with_hybrid.n_held)
    epoch = queue.wait(held, shared, layer=1)
    right = all(held[count * i + 7] == 1.0 + e for i, e in enumerate(with_hybrid.info().held_experts))
    refused = 0
    for wrong in (lambda: queue.send(experts[:-1], shared), lambda: queue.send(experts), lambda: queue.wait(floats(3), shared)):
        try:
            wrong()
        except ValueError:
            refused += 1
    try:
        queue.begin(0)
    except moeccl.Error as failure:
        refused += failure.name == "moecclInvalidUsage"
    # Repeats this with the optimizer's step and the computation inside the codec.
    stepped, seen = floats(len(experts)), floats(count * with_hybrid.n_held)

    def step(expert, first, n):
        at = expert * count + first
        stepped[at:at + n] = experts[at:at + n]

    queue.send_fused(stepped, step, shared, layer=1)
    queue.begin(1)
    queue.wait_encoded(shared, layer=1)
    for index in range(with_hybrid.n_held):
        def compute(first, values, at=index * count):
            seen[at + first:at + first + len(values) // 4] = array.array("f", bytes(values))
        queue.use_expert(index, compute, layer=1, row=100)
    if seen != held or stepped != experts:
        raise AssertionError("fused migration gives other experts")
    out = (len(errors) == with_hybrid.n_own and errors[0].max_dropped == 0, before.to_send == 1, epoch == 1, right, queue.info(1).epoch == 2,
           refused == 4, queue.info(1).expert_bytes < 4 * count)
    queue.close()
    return out


def return_gradients(comm):
    """Returns gradients of which the codec keeps one in six: the rest comes in later steps, and the sums are those of all gradients."""
    count, steps = 600, 6
    with_hybrid = moeccl.Hybrid(comm, EXPERTS, domain=[comm.size])
    back = moeccl.GradientReturn(with_hybrid, count, ratio=4, n_layers=2)
    info = back.info(1)
    held = array.array("f", [float(1 + comm.rank + i % 3) for i in range(count * with_hybrid.n_held)])
    own, exact, sums = floats(count * with_hybrid.n_own), floats(count * with_hybrid.n_own), floats(count * with_hybrid.n_own)
    with_hybrid.reduce(held, exact)
    stream = moeccl.Stream()
    for step in range(steps):
        back.reduce(held, own, layer=1, stream=stream if step % 2 else None)
        stream.synchronize()
        sums = array.array("f", [a + b for a, b in zip(sums, own)])
    kept = back.remainders(1)
    total = array.array("f", [sum(sums) + sum(kept), 0.0])
    comm.all_reduce(total, total)
    wanted = array.array("f", [steps * sum(exact), 0.0])
    comm.all_reduce(wanted, wanted)
    used, saved = any(kept), kept.tolist()
    back.reduce(held, own, layer=1)
    again = floats(len(own))
    kept[:] = array.array("f", saved)  # back to the checkpoint
    back.reduce(held, again, layer=1)
    back.reset(1)
    refused = 0
    for wrong in (lambda: back.reduce(held[:-1], own), lambda: back.reduce(held, own[:-1])):
        try:
            wrong()
        except ValueError:
            refused += 1
    answer = (total[0] == wanted[0], used, own == again, not any(kept), refused == 2, info.n_remainders == EXPERTS - with_hybrid.n_own,
              info.sent_bytes == info.n_remainders * info.expert_bytes)
    kept.release()
    back.close()
    return answer


def replace(comm, mode="solve"):
    """Samples move to other homes and back; sums and gradients are those of the tokens that arrived."""
    moe = layer(comm)
    plan = moeccl.Replacement(moe, sample_tokens=2, mode=mode, residual=True)
    routing = moe.routing(choices(comm.rank))
    per_rank = TOKENS // 2
    homes = [(s + 1) % comm.size for s in range(per_rank * comm.size)] if mode == "given" else None
    if homes is not None:
        homes = [1 - s // per_rank for s in range(per_rank * comm.size)]
    plan.begin(routing, placement=homes)
    x = array.array("f", [100.0 * comm.rank + t for t in range(TOKENS) for _ in range(HIDDEN)])
    dispatched = floats(routing.n_rows * HIDDEN)
    routing.dispatch(x, dispatched)
    rows = floats(plan.rows() * HIDDEN)
    rows[:len(dispatched)] = dispatched  # experts that do nothing
    plan.residual(x, dispatched, rows)
    out = floats(TOKENS * HIDDEN)
    plan.combine(rows, out)
    info = plan.info()
    here = [t for s in info.local_samples for t in range(2 * s, 2 * s + 2)]
    came = [100.0 * (t // TOKENS) + t % TOKENS for t in here for _ in range(HIDDEN)]
    grad_rows, grad_weight = floats(len(rows)), floats(TOKENS * TOP_K)
    plan.combine_backward(floats(TOKENS * HIDDEN, 1.0), grad_rows, rows, grad_weight)
    grad_dispatched, grad_x = array.array("f", grad_rows[:len(dispatched)]), floats(TOKENS * HIDDEN)
    plan.residual_backward(grad_rows, grad_dispatched)
    routing.dispatch_backward(grad_dispatched, grad_x)
    plan.residual_backward(grad_rows, None, grad_x)
    sums = [HIDDEN * x[HIDDEN * t] for t in range(TOKENS) for _ in range(TOP_K)]
    answer = ([v for v in out] == [3.0 * v for v in came], list(grad_x) == [3.0] * len(grad_x), list(grad_weight) == sums,
              len(info.placement) == per_rank * comm.size and (homes is None or list(info.placement) == homes))
    plan.close()
    return answer


def replace_given(comm):
    return replace(comm, "given")


def swap(comm):
    """Rank r's tokens choose experts r and 3 - r, which are on different ranks; an exchange puts each pair on one rank."""
    moe = layer(comm)
    swapping = moeccl.ExpertSwap(comm, interval=1, gamma=20, min_gain=-1, horizon=1e6, swap_us=0.001)
    weights, gradients = floats(moe.n_slots * 3), floats(moe.n_slots)
    for slot in range(moe.n_slots):
        expert = comm.rank * moe.n_slots + slot
        weights[3 * slot:3 * slot + 3] = array.array("f", [expert + 0.5] * 3)
        gradients[slot] = expert
    number = swapping.attach(moe, [weights, (gradients, True)])
    mine = array.array("i", [comm.rank, 3 - comm.rank] * TOKENS)
    swaps, right = 0, True
    for step in range(4):
        routing = moe.routing(mine)
        tokens, back = floats(TOKENS * HIDDEN, 2.0), floats(TOKENS * HIDDEN)
        rows = floats(routing.n_rows * HIDDEN)
        routing.dispatch(tokens, rows)
        swapping.begin()
        routing.combine(rows, back)
        right = right and list(back) == [4.0] * len(back)
        swaps += swapping.finish()
        routing.close()
    info = swapping.info(number)
    first = comm.rank * moe.n_slots
    held = info.expert_in[first:first + moe.n_slots]
    answer = (right, swapping.test(), swaps, set(held) in ({0, 3}, {1, 2}), list(gradients) == [float(e) for e in held],
              list(weights) == [e + 0.5 for e in held for _ in range(3)], [info.expert_in[s] for s in info.slot_of] == list(range(EXPERTS)))
    swapping.close()
    return answer


def dropped(comm):
    """Drops a migration and an expert swap whose transfers run; both then end before their buffers go."""
    hybrid = moeccl.Hybrid(comm, EXPERTS, domain=[comm.size])
    queue = moeccl.Migration(hybrid, 1000, ratio=1)
    queue.send(floats(1000 * hybrid.n_own, 3.0))
    held = floats(1000 * hybrid.n_held)
    queue.begin_into(held)
    swapping, moe = moeccl.ExpertSwap(comm, interval=1, min_gain=-1), layer(comm)
    swapping.attach(moe, [floats(4 * moe.n_slots)])
    routing = moe.routing(choices(comm.rank))
    swapping.begin()
    handles = queue.handle, swapping.handle
    del queue, swapping
    gc.collect()
    ended = set(held) == {3.0}
    info, done = moeccl._abi.moecclMigrationInfo_t(), ctypes.c_int32()
    dead = (moeccl._library.lib.moecclMigrationGetInfo(handles[0], 0, ctypes.byref(info)),
            moeccl._library.lib.moecclExpertSwapTest(handles[1], ctypes.byref(done)))
    routing.close()
    return ended, 0 not in dead


class Hybrid(unittest.TestCase):
    def test_transfers_end_with_the_object_that_began_them(self):
        self.assertEqual(in_processes(2, dropped), [(True, True)] * 2)

    def test_experts_travel_inside_a_domain(self):
        self.assertEqual(in_processes(2, hybrid_round), [(True,) * 6] * 2)
        in_threads(2, lambda comm: self.assertEqual(hybrid_round(comm), (True,) * 6))

    def test_experts_migrate_behind_the_computation(self):
        self.assertEqual(in_processes(2, migrate), [(True,) * 7] * 2)

    def test_gradients_return_compressed(self):
        self.assertEqual(in_processes(2, return_gradients), [(True,) * 7] * 2)

    def test_experts_change_places(self):
        wanted = (True, True, 1, True, True, True, True)
        self.assertEqual(in_processes(2, swap), [wanted] * 2)
        in_threads(2, lambda comm: self.assertEqual(swap(comm), wanted))

    def test_tensors_of_swapped_experts_have_whole_slots(self):
        def work(comm):
            swapping = moeccl.ExpertSwap(comm)
            with self.assertRaisesRegex(ValueError, r"tensors\[1\] has 3 bytes, which are not 2 slots"):
                swapping.attach(layer(comm), [floats(2), bytearray(3)])
            with self.assertRaisesRegex(ValueError, "max_function is 'max'"):
                moeccl.ExpertSwap(comm, max_function="max")

        in_threads(2, work)

    def test_samples_change_their_homes(self):
        for work in (replace, replace_given):
            self.assertEqual(in_processes(2, work), [(True,) * 4] * 2)

    def test_codec(self):
        codec = moeccl.Codec(1000, ratio=20)
        expert, shared = floats(1000, 1.0), floats(1000, 1.0)
        expert[3], encoded, out = 9.0, bytearray(codec.bytes), floats(1000)
        self.assertEqual(codec.encode(expert, shared, encoded).max_dropped, 0.0)
        codec.decode(encoded, shared, out)
        self.assertEqual(out, expert)
        pieces = []
        codec.decode_fused(encoded, shared, lambda first, values: pieces.append((first, bytes(values))), first=100, count=600, row=200)
        self.assertEqual(pieces, [(100, expert[100:700].tobytes())])
        two, again = expert + expert, bytearray(2 * codec.bytes)
        self.assertEqual(len(codec.encode_fused(two, shared, again, lambda which, first, n: None)), 2)
        self.assertEqual(again, encoded + encoded)

        def fails(*_):
            raise KeyError("mine")

        with self.assertRaisesRegex(KeyError, "mine"):
            codec.decode_fused(encoded, shared, fails)
        with self.assertRaisesRegex(KeyError, "mine"):
            codec.encode_fused(two, shared, again, fails)
        with self.assertRaises(moeccl.Error):
            codec.decode(bytes(codec.bytes), shared, out)
        with self.assertRaisesRegex(ValueError, "encoded has 3 bytes"):
            codec.decode(b"abc", shared, out)


if __name__ == "__main__":
    unittest.main()
