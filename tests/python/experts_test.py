# SPDX-License-Identifier: Apache-2.0
"""Layers with all their backward operations, replicated experts, and the types of buffers. Experts that move: moving_test.py."""
import array
import unittest

import moeccl
from layers import EXPERTS, HIDDEN, TOKENS, TOP_K, choices, floats, layer
from ranks import in_processes, in_threads

try:
    import numpy
except ImportError:
    numpy = None

def forward_and_back(comm):
    """Runs all four operations, blocking and then on a stream, and compares the outputs and the gradients of tokens and weights."""
    moe = layer(comm)
    weight = array.array("f", [0.25, 0.5] * TOKENS)
    routing = moe.routing(choices(comm.rank), weight)
    tokens = array.array("f", [100.0 * comm.rank + t + h for t in range(TOKENS) for h in range(HIDDEN)])
    out = []
    for stream in (None, moeccl.Stream()):
        rows, result = floats(routing.n_rows * HIDDEN), floats(TOKENS * HIDDEN)
        routing.dispatch(tokens, rows, stream=stream)
        routing.combine(rows, result, stream=stream)
        grad_rows, grad_tokens = floats(routing.n_rows * HIDDEN), floats(TOKENS * HIDDEN)
        grad_weight = floats(TOKENS * TOP_K)
        ones = floats(TOKENS * HIDDEN, 1.0)
        routing.combine_backward(ones, grad_rows, rows, grad_weight, stream=stream)
        routing.dispatch_backward(grad_rows, grad_tokens, stream=stream)
        if stream is not None:
            stream.synchronize()
            stream.close()
        out.append((list(result), list(grad_tokens), list(grad_weight)))
    if out[0] != out[1]:
        raise AssertionError(f"a stream gives {out[1]}, blocking calls {out[0]}")
    result, grad_tokens, grad_weight = out[0]
    sums = [sum(tokens[HIDDEN * t:HIDDEN * (t + 1)]) for t in range(TOKENS)]
    page = routing.explain()
    return (result == [0.75 * v for v in tokens], grad_tokens == [0.75] * len(tokens),
            grad_weight == [s for s in sums for _ in range(TOP_K)], "dispatch" in page)


class Layer(unittest.TestCase):
    def test_forward_and_back(self):
        for ranks in (1, 2):
            self.assertEqual(in_processes(ranks, forward_and_back), [(True,) * 4] * ranks)

    def test_updates_reuse_a_routing(self):
        def work(comm):
            moe = layer(comm)
            routing = moe.routing(choices(comm.rank))
            for tokens in (0, 3, TOKENS):
                routing.update(choices(comm.rank + 1, tokens))
                self.assertEqual(routing.n_tokens, tokens)
                rows, mine, back = floats(routing.n_rows * HIDDEN), floats(tokens * HIDDEN, 3.0), floats(tokens * HIDDEN)
                routing.dispatch(mine, rows)
                routing.combine(rows, back)
                self.assertEqual(list(back), [6.0] * len(back))
                weights = floats(tokens * TOP_K)
                routing.combine_backward(mine, floats(routing.n_rows * HIDDEN), rows, weights)
                self.assertEqual(list(weights), [36.0] * len(weights))
            with self.assertRaisesRegex(ValueError, "grad_weight has 4 bytes"):
                routing.combine_backward(mine, rows, rows, floats(1))
            with self.assertRaisesRegex(ValueError, "rows has 0 bytes"):
                routing.combine_backward(mine, rows, None, weights)
            with self.assertRaises(moeccl.Error) as caught:
                routing.device_info()
            self.assertEqual(caught.exception.name, "moecclUnsupported")

        in_threads(2, work)

    def test_scales_travel_with_their_rows(self):
        def work(comm):
            moe = moeccl.Moe(comm, 2 * HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, type=moeccl.BFLOAT16,
                             scaled_row_bytes=HIDDEN, scale_bytes=4)
            routing = moe.routing(choices(comm.rank))
            fp8 = bytes(16 * comm.rank + t for t in range(TOKENS) for _ in range(HIDDEN))
            scales = array.array("f", [16.0 * comm.rank + t for t in range(TOKENS)])
            rows, row_scales = bytearray(routing.n_rows * HIDDEN), floats(routing.n_rows)
            routing.dispatch_scaled(fp8, scales, rows, row_scales)
            self.assertEqual([rows[HIDDEN * r] for r in range(routing.n_rows)], [int(s) for s in row_scales])
            self.assertTrue(any(row_scales))
            with self.assertRaisesRegex(ValueError, "scales has 4 bytes"):
                routing.dispatch_scaled(fp8, floats(1), rows, row_scales)

        in_threads(2, work)

    def test_shapes_are_checked_without_a_communicator(self):
        shape = {"hidden_bytes": 16, "n_experts": 8, "top_k": 2, "max_tokens": 64}
        moeccl.Moe.check(4, "node:2 gpu:2", **shape)
        self.assertGreater(moeccl.Moe.query_size(4, **shape), 0)
        with self.assertRaisesRegex(moeccl.Error, "top_k"):
            moeccl.Moe.check(4, **{**shape, "top_k": 9})


class Experts(unittest.TestCase):
    def test_replicas_get_the_sum_of_their_gradients(self):
        placement = moeccl.Placement(3, [0, 1, 1, 2], slots_per_rank=2)
        count = 5

        def work(comm):
            mine = array.array("f", [10.0 * comm.rank + 1] * count + [10.0 * comm.rank + 2] * count)
            moeccl.experts.all_reduce(comm, placement, mine)
            self.assertEqual(list(mine), [1.0] * 5 + [13.0] * 5 if comm.rank == 0 else [13.0] * 5 + [12.0] * 5)
            part = moeccl.experts.shard(count, 2)
            shards = floats(3 * part)
            moeccl.experts.collect_gradients(comm, placement, mine, shards)
            self.assertEqual([shards[e * part] for e in range(3)], [1.0, 13.0, 12.0])
            other = moeccl.Placement(3, [[2, 2], [1, 0]], slots_per_rank=2)
            slots = floats(2 * count)
            moeccl.experts.place_weights(comm, other, shards, slots)
            self.assertEqual(list(slots), [12.0] * 10 if comm.rank == 0 else [13.0] * 5 + [1.0] * 5)
            self.assertEqual(list(moeccl.experts.popularity(comm, array.array("i", [comm.rank, 2, -1]), 3)), [1, 1, 2])
            self.assertIn(moeccl.experts.gradient_source(placement, 2, 1, 0), (0, 1))
            self.assertIn("bytes", moeccl.experts.explain(comm, "expert_allreduce", count, placement))
            with self.assertRaisesRegex(ValueError, "slot_expert has 3 slots"):
                moeccl.experts.all_reduce(comm, moeccl.Placement(3, [0, 1, 2], slots_per_rank=2), mine)
            with self.assertRaisesRegex(ValueError, "a buffer of shards has 1 elements"):
                moeccl.experts.collect_gradients(comm, placement, mine, floats(1))

        in_threads(2, work)

    def test_shards_get_the_sums_over_replicas(self):
        placement, other = moeccl.Placement(3, [0, 1, 1, 2], slots_per_rank=2), moeccl.Placement(2, [1, 0], slot_counts=[2, 0])
        count = 5

        def work(comm):
            mine = array.array("f", [10.0 * comm.rank + 1] * count + [10.0 * comm.rank + 2] * count)
            part = moeccl.experts.shard(count, 2)
            shards = floats(3 * part)
            moeccl.experts.reduce_gradients(comm, placement, mine, shards)
            self.assertEqual([shards[e * part] for e in range(3)], [1.0, 13.0, 12.0])
            moeccl.experts.reduce_gradients(comm, placement, mine, shards, moeccl.AVG)
            self.assertEqual([shards[e * part] for e in range(3)], [1.0, 6.5, 12.0])
            self.assertIn("bytes", moeccl.experts.explain(comm, "reduce_gradients", count, placement))
            # Two layers; rank 1 has no slots in the second.
            second, second_shards = array.array("f", [4.0] * count + [3.0] * count) if comm.rank == 0 else None, floats(2 * part)
            given = [(placement, mine, shards), (other, second, second_shards)]
            moeccl.experts.layers(comm, "reduce_gradients", given, count)
            self.assertEqual([shards[e * part] for e in range(3)], [1.0, 13.0, 12.0])
            self.assertEqual([second_shards[e * part] for e in range(2)], [3.0, 4.0])
            moeccl.experts.layers(comm, "place_weights", given, count)
            self.assertEqual(list(mine), [1.0] * 5 + [13.0] * 5 if comm.rank == 0 else [13.0] * 5 + [12.0] * 5)
            with self.assertRaisesRegex(ValueError, "layer 1: shards has 1 elements"):
                moeccl.experts.layers(comm, "place_weights", [given[0], (other, second, floats(1))], count)

        in_threads(2, work)

    def test_blocks_of_any_size_cross_between_groups(self):
        def work(comm):
            group = comm.rank // 2
            counts = [1, 3, 2, 0]
            send = array.array("f", [[10.0, 1.0, 2.0, 3.0], [4.0, 5.0]][group])
            recv = floats([3, 3][group])
            moeccl.pipeline.tensor_all_to_all_v(comm, send, recv, counts)
            self.assertEqual(list(recv), [[10.0, 4.0, 5.0], [1.0, 2.0, 3.0]][group])
            with self.assertRaisesRegex(ValueError, "counts has 3 numbers"):
                moeccl.pipeline.tensor_all_to_all_v(comm, send, recv, [1, 2, 3])
            with self.assertRaisesRegex(ValueError, "recv has 1 elements"):
                moeccl.pipeline.tensor_all_to_all_v(comm, send, floats(1), counts)

        in_threads(4, work, topology="node:2 gpu:2")

    @unittest.skipIf(numpy is None, "needs NumPy")
    def test_a_tensor_parallel_group_sends_each_token_once(self):
        """The layer of tests/conformance/pipeline_conformance_test.cc, forward and backward, on nodes of two sizes."""
        n_tokens, hidden, e = 37, 21, 2
        places, elements = numpy.arange(n_tokens), numpy.arange(hidden)
        weights = (1 + (places[:, None] + numpy.arange(2)) % 3).astype("f")

        def index_of(group):
            first = (places * 7 + group * 3) % (2 * e)
            index = numpy.stack([first, (first + 1 + places % (2 * e - 1)) % (2 * e)], 1)
            index[5] = -1
            return index

        def tokens_of(group, what):
            return ((group * 5 + places[:, None] * 3 + elements * 7 + what) % 11 - 5).astype("f")

        def work(comm):
            group = min(comm.rank, 1)
            index, outside = index_of(group), [r for r in range(3) if min(r, 1) != group]
            crossing = sum(int((index_of(s) // 2 == 1 - s).any(1).sum()) * hidden * 4 for s in range(e))

            def sent():
                return sum(comm.traffic()[r].bytes for r in outside)

            step = moeccl.pipeline.dispatch(comm, tokens_of(group, 0), index, 2 * e, weights)
            self.assertEqual(sum(step.row_counts), len(step.rows))
            factor = ((step.topk_index + 1) * step.topk_weights * (step.topk_index // 2 == group)).sum(1, keepdims=True).astype("f")
            wanted = ((index + 1) * weights).sum(1, keepdims=True)  # 0 for the token without experts
            bytes_of = numpy.zeros(2, "q")
            for what in (0, 1):
                at = sent()
                rows = step.send(tokens_of(group, what))
                bytes_of[0] = sent() - at
                if what == 0:
                    numpy.testing.assert_array_equal(rows, step.rows)
                y = step.combine(rows * factor)
                bytes_of[1] = sent() - at - bytes_of[0]
                numpy.testing.assert_array_equal(y, wanted * tokens_of(group, what))
                comm.all_reduce(bytes_of)
                self.assertEqual(list(bytes_of), [crossing, crossing])
            for wrong, words in ((index[:, 0], "give .tokens, hidden"), (index + 2, "give 0 to 3"), (index * 1.0, "holds float64")):
                with self.assertRaisesRegex(ValueError, words):
                    moeccl.pipeline.dispatch(comm, tokens_of(group, 0), wrong, 2 * e)
            first = numpy.maximum(index[:, :1], 0)
            wanted = moeccl.pipeline.dispatch(comm, tokens_of(group, 0), first, 2 * e)
            for kind in ("u1", "i2", "u8"):  # some have no -1
                step = moeccl.pipeline.dispatch(comm, tokens_of(group, 0), first.astype(kind), 2 * e)
                numpy.testing.assert_array_equal(step.rows, wanted.rows)
                numpy.testing.assert_array_equal(step.topk_index, wanted.topk_index)

        in_threads(3, work, topology="node:2 gpu:1+2")

    def test_choices_go_to_replicas_within_capacity(self):
        placement = moeccl.Placement(2, [0, 0, 0, 1], slots_per_rank=2)

        def work(comm):
            popularity, dropped = array.array("q", [0] * 2), array.array("q", [0] * 2)
            slots = moeccl.experts.choose_replicas(comm, placement, [[0, 1], [0, -1], [0, 1]], 2, 2, popularity, dropped)
            self.assertEqual((list(popularity), list(dropped)), ([6, 4], [0, 2]))
            # Rank 0 keeps one choice of expert 1, rank 1 the other; expert 0 has two tokens in each slot.
            self.assertEqual(list(slots), [0, 3, 0, -1, 1, -1] if comm.rank == 0 else [2, 3, 2, -1, 1, -1])
            with self.assertRaisesRegex(ValueError, "dropped has 1 numbers: give 2"):
                moeccl.experts.choose_replicas(comm, placement, [0], 1, dropped=array.array("q", [0]))
            with self.assertRaisesRegex(ValueError, "multiple of top_k, 2"):
                moeccl.experts.choose_replicas(comm, placement, [0], 2)

        in_threads(2, work)

    def test_uneven_slots(self):
        placement = moeccl.Placement(2, [0, 1, 1], slot_counts=[3, 0])

        def work(comm):
            mine = floats(9, 2.0) if comm.rank == 0 else floats(0)
            moeccl.experts.all_reduce(comm, placement, mine, op=moeccl.AVG, count=3)
            self.assertEqual(list(mine), [2.0] * len(mine))
            if comm.rank == 1:
                with self.assertRaisesRegex(ValueError, "give count="):
                    moeccl.experts.all_reduce(comm, placement, mine)
            moeccl.experts.all_reduce(comm, placement, mine if comm.rank == 0 else None, count=3, type=moeccl.FLOAT32)
            self.assertEqual(list(mine), [2.0] * 3 + [4.0] * 6 if comm.rank == 0 else [])
            shards = floats(2 * moeccl.experts.shard(3, 2))
            moeccl.experts.collect_gradients(comm, placement, mine or None, shards, count=3, type=moeccl.FLOAT32)
            moeccl.experts.place_weights(comm, placement, shards, mine or None, count=3, type=moeccl.FLOAT32)
            self.assertEqual(list(mine), [2.0] * 3 + [4.0] * 6 if comm.rank == 0 else [])

        in_threads(2, work)

    def test_elements_of_another_type_are_refused(self):
        def wrong(call, *buffers):
            with self.assertRaisesRegex(TypeError, "holds elements of format '[il]': give float32|of format 'd': give 2 of int64"):
                call(*buffers)

        def work(comm):
            def ints(n):
                return array.array("i", [0] * n)

            placement = moeccl.Placement(2, [0, 1], slots_per_rank=1)
            for name in ("popularity", "dropped"):
                wrong(lambda name=name: moeccl.experts.choose_replicas(comm, placement, [0], 1, **{name: array.array("d", [0] * 2)}))
            codec = moeccl.Codec(8, ratio=1)
            f, i, encoded = floats(8), ints(8), bytearray(codec.bytes)
            wrong(codec.encode, i, f, encoded)
            wrong(codec.encode, f, i, encoded)
            codec.encode(bytes(32), f, encoded)  # bytes may hold any type
            wrong(codec.decode, encoded, f, i)
            wrong(codec.encode_fused, i, f, encoded, lambda *_: None)
            hybrid = moeccl.Hybrid(comm, 2, domain=[2])
            queue, back = moeccl.Migration(hybrid, 8, ratio=1), moeccl.GradientReturn(hybrid, 8)
            wrong(queue.send, i)
            queue.send(f)
            wrong(queue.begin_into, ints(16))
            queue.begin()
            wrong(queue.wait, ints(16))
            queue.wait(floats(16))
            wrong(back.reduce, ints(16), f)
            wrong(back.reduce, floats(16), i)
            moe = layer(comm)
            plan, routing = moeccl.Replacement(moe, mode="keep", residual=1), moe.routing(choices(comm.rank))
            plan.begin(routing)
            n, t, r = plan.rows() * HIDDEN, TOKENS * HIDDEN, routing.n_rows * HIDDEN
            wrong(plan.residual, ints(t), floats(r), floats(n))
            wrong(plan.combine, ints(n), floats(t))
            wrong(plan.combine, floats(n), ints(t))
            plan.combine(floats(n), floats(t))
            wrong(plan.combine_backward, ints(t), floats(n))
            wrong(routing.combine, ints(r), floats(t))

        in_threads(2, work)


if __name__ == "__main__":
    unittest.main()
