# SPDX-License-Identifier: Apache-2.0
"""Compares the Python package with known results, on thread ranks and processes, and with NumPy where it is installed."""
import array
import gc
import importlib
import inspect
import pkgutil
import queue
import unittest

import moeccl
from ranks import in_processes, in_threads

try:
    import numpy
except ImportError:
    numpy = None


def sum_of_ranks(comm):
    x = array.array("q", [comm.rank + 1])
    comm.all_reduce(x)
    return x[0]


class Collectives(unittest.TestCase):
    def test_every_collective(self):
        n = 3

        def work(comm):
            r = comm.rank
            x = array.array("f", [r + 1.0] * 5)
            y = array.array("f", [0] * 5)
            comm.all_reduce(x, y)
            self.assertEqual(list(y), [6.0] * 5)
            comm.all_reduce(x, op=moeccl.MAX)
            self.assertEqual(list(x), [3.0] * 5)
            mine, everyone = array.array("i", [r, 10 + r]), array.array("i", [0] * 2 * n)
            comm.all_gather(mine, everyone)
            self.assertEqual(list(everyone), [0, 10, 1, 11, 2, 12])
            part = array.array("i", [0] * 2)
            comm.reduce_scatter(everyone, part)
            self.assertEqual(list(part), [3 * r, 3 * (10 + r)])
            out = array.array("i", [0] * n)
            comm.all_to_all(array.array("i", [10 * r + k for k in range(n)]), out)
            self.assertEqual(list(out), [10 * k + r for k in range(n)])
            comm.broadcast(part, root=1)
            self.assertEqual(list(part), [3, 33])
            total = array.array("i", [0, 0]) if r == 2 else None
            comm.reduce(mine, total, root=2)
            self.assertEqual(r != 2 or list(total), r != 2 or [3, 33])
            gathered = array.array("i", [0] * 2 * n) if r == 0 else None
            comm.gather(mine, gathered)
            comm.scatter(gathered, part)
            self.assertEqual(list(part), list(mine))
            counts_out, counts_in = [(r + k) % 3 for k in range(n)], [(k + r) % 3 for k in range(n)]
            got = array.array("i", [-1] * sum(counts_in))
            comm.all_to_allv(array.array("i", [r] * sum(counts_out)), counts_out, got, counts_in)
            self.assertEqual(list(got), [k for k in range(n) for _ in range(counts_in[k])])
            inbox = bytearray(4)
            with moeccl.group():
                comm.send(b"abc%d" % r, (r + 1) % n)
                comm.recv(inbox, (r - 1) % n)
            self.assertEqual(inbox, b"abc%d" % ((r - 1) % n))
            half = comm.split(r % 2)
            one = array.array("l", [1])
            half.all_reduce(one)
            self.assertEqual(one[0], half.size)
            half.close()

        in_threads(n, work)

    def test_processes(self):
        self.assertEqual(in_processes(2, sum_of_ranks), [3, 3])

    def test_shrink_and_grow(self):
        n, ids = 4, queue.Queue()

        def total(comm):
            x = array.array("i", [1])
            comm.all_reduce(x)
            return x[0]

        def work(comm):
            r = comm.rank
            if r == 1:
                comm = None
            else:
                comm = comm.shrink([1])
                self.assertEqual((comm.rank, comm.size, total(comm)), (max(r - 1, 0), 3, 3))
                comm.revoke()
                with self.assertRaisesRegex(moeccl.Error, "revoked the communicator") as caught:
                    total(comm)
                self.assertEqual(caught.exception.name, "moecclAborted")
                again = comm.shrink()
                comm.close()
                comm = again
                with self.assertRaisesRegex(moeccl.Error, "exclude_ranks.0. is 3"):
                    comm.shrink([3])
                with self.assertRaisesRegex(ValueError, "exclude is"):
                    comm.shrink([2**40])
            if comm is not None and comm.rank == 0:
                meeting = comm.unique_id()
                ids.put(bytes(meeting))
            if comm is None:
                more = moeccl.Comm(n, ids.get(timeout=20), 3)
            else:
                more = comm.grow(n, meeting if comm.rank == 0 else None)
                comm.close()
            self.assertEqual((more.size, total(more)), (n, n))
            self.assertEqual(more.rank == 3, r == 1)
            more.close()

        in_threads(n, work)

    def test_mistakes_are_named(self):
        def work(comm):
            with self.assertRaisesRegex(moeccl.Error, "root is 7"):
                comm.broadcast(bytearray(4), root=7)
            with self.assertRaisesRegex(ValueError, "do not fit"):
                comm.all_gather(bytearray(4), bytearray(4))
            with self.assertRaises(BufferError):
                comm.broadcast(b"read-only")
            if comm.rank == 0:
                with self.assertRaises(moeccl.Error) as caught:
                    comm.all_reduce(bytearray(3))
            else:
                with self.assertRaises(moeccl.Error) as caught:
                    comm.all_reduce(bytearray(4))
            self.assertEqual(caught.exception.name, "moecclMismatch")

        in_threads(2, work)
        with self.assertRaises(TypeError):
            moeccl.init_all(1, colour="red")


    def test_numbers_that_c_would_cut_are_refused(self):
        with self.assertRaisesRegex(ValueError, "timeout_ms is 4294967297"):
            moeccl.init_all(1, timeout_ms=2**32 + 1)
        with self.assertRaisesRegex(ValueError, "staging_bytes is -1"):
            moeccl.init_all(1, staging_bytes=-1)
        with self.assertRaisesRegex(TypeError, "topology"):
            moeccl.init_all(1, topology="node:1\0gpu:1")
        with self.assertRaisesRegex(ValueError, "n_ranks is 1000000000"):
            moeccl.init_all(10**9)
        with self.assertRaisesRegex(ValueError, "n_ranks is 65536"):
            moeccl.init_all(65536)
        with self.assertRaisesRegex(ValueError, "128 bytes, not 3"):
            moeccl.Comm(1, b"abc", 0)
        with self.assertRaisesRegex(ValueError, "128 bytes, not 129"):
            moeccl.UniqueId.from_bytes(bytes(129))

        def work(comm):
            x = array.array("f", [1] * 4)
            for wrong in (2**32, -2**40):
                with self.assertRaisesRegex(ValueError, "root is"):
                    comm.broadcast(x, root=wrong)
                with self.assertRaisesRegex(ValueError, "op is"):
                    comm.all_reduce(x, op=wrong)
                with self.assertRaisesRegex(ValueError, "peer is"):
                    comm.send(x, wrong)
                with self.assertRaisesRegex(ValueError, "color is"):
                    comm.split(wrong)
            for wrong in (1.5, "1", None):
                with self.assertRaises(TypeError):
                    comm.send(x, wrong)
            with self.assertRaisesRegex(TypeError, "a whole number"):
                comm.all_to_allv(x, [2.5, 1], x, [2, 2])
            # The sum fits but one of the two does not: as a size_t it would be most of the address space.
            for counts in ([-1, 3], [5, -1], [2**64, 0], [1], [1, 1, 1], [3, 2]):
                with self.assertRaises(ValueError):
                    comm.all_to_allv(x, counts, array.array("f", [0] * 4), [2, 2])
                with self.assertRaises(ValueError):
                    comm.all_to_allv(x, [2, 2], array.array("f", [0] * 4), counts)

        in_threads(2, work)

    def test_types_must_agree(self):
        def work(comm):
            floats, ints = array.array("f", [1] * 4), array.array("i", [1] * 4)
            twice = array.array("i", [0] * 8)
            for call in (lambda: comm.all_reduce(floats, ints), lambda: comm.reduce(floats, ints),
                         lambda: comm.all_gather(floats, twice), lambda: comm.gather(floats, twice),
                         lambda: comm.reduce_scatter(twice, floats), lambda: comm.all_to_all(floats, ints),
                         lambda: comm.all_to_allv(floats, [2, 2], ints, [2, 2])):
                with self.assertRaisesRegex(TypeError, "elements differ"):
                    call()
            with self.assertRaisesRegex(TypeError, "elements differ"):
                comm.all_gather(floats, bytearray(32))
            comm.all_gather(floats, bytearray(32), type=moeccl.FLOAT32)  # bytes may hold any type
            with self.assertRaisesRegex(TypeError, "type= has 4 bytes"):
                comm.all_reduce(array.array("d", [1]), type=moeccl.FLOAT32)
            for wrong in (99, -1, 2**32 + 7):
                with self.assertRaises(ValueError):
                    comm.all_reduce(floats, type=wrong)
            with self.assertRaises(ValueError):
                comm.all_reduce(bytearray(3), type=moeccl.BFLOAT16)
            truth = memoryview(bytearray(4)).cast("?")
            truth[comm.rank] = True
            for op in (moeccl.SUM, moeccl.AVG):
                with self.assertRaisesRegex(TypeError, "no sum"):
                    comm.all_reduce(truth, op=op)
            comm.all_reduce(truth, op=moeccl.MAX)
            self.assertEqual(list(truth), [True, True, False, False])
            for nothing in (lambda: comm.all_reduce(None), lambda: comm.broadcast(None), lambda: comm.send(None, 0)):
                with self.assertRaises(TypeError):
                    nothing()
            comm.all_reduce(floats)  # it still works
            self.assertEqual(list(floats), [2] * 4)

        in_threads(2, work)

    def test_an_exception_abandons_the_group(self):
        comm = moeccl.init_all(1)[0]
        buffer = array.array("i", [3])
        with self.assertRaises(KeyError):
            with moeccl.group():
                with moeccl.group():
                    comm.all_reduce(buffer)
                with self.assertRaises(moeccl.Error):  # the group holds a call on it
                    comm.close()
                raise KeyError
        buffer.append(4)  # the group has released it
        comm.all_reduce(buffer)
        self.assertEqual(list(buffer), [3, 4])
        comm.close()

    def test_a_group_keeps_what_was_lent_to_it(self):
        def work(comm):
            inbox = [bytearray(40) for _ in range(20)]
            with moeccl.group():
                for i, box in enumerate(inbox):
                    comm.send(bytes([i] * 40), 1 - comm.rank)  # nothing else holds these
                    comm.recv(box, 1 - comm.rank)
                    with self.assertRaises(BufferError):
                        box.append(0)
                gc.collect()
            for i, box in enumerate(inbox):
                self.assertEqual(box, bytes([i] * 40))
                box.append(0)

        in_threads(2, work)


class Mistakes(unittest.TestCase):
    def test_version(self):
        numbers = [int(n) for n in moeccl.__version__.split(".")]
        self.assertEqual(moeccl.version(), 10000 * numbers[0] + 100 * numbers[1] + numbers[2])

    def test_what_is_no_buffer_or_no_operator_is_said_with_what_is(self):
        def work(comm):
            with self.assertRaisesRegex(TypeError, "a list is not a buffer: give a tensor"):
                comm.all_reduce([1, 2])
            with self.assertRaisesRegex(TypeError, "op is 'sum': give moeccl.SUM"):
                comm.all_reduce(array.array("f", [0]), op="sum")

        in_threads(1, work)

    def test_an_argument_of_another_kind_is_named_with_its_value_and_what_fits(self):
        def work(comm):
            moe = moeccl.Moe(comm, hidden_bytes=64, n_experts=4, top_k=1, max_tokens=4)
            hybrid = moeccl.Hybrid(comm, 4, domain=[1])
            sizes = {"hidden_bytes": 64, "n_experts": 4, "top_k": 1, "max_tokens": 4}
            for sentence, call in (
                    ("layout is 'rows': give moeccl.EXPERT_MAJOR or ROWS", lambda: moeccl.Moe(comm, **sizes, layout="rows")),
                    ("type is 'f': give a type such as moeccl.FLOAT32", lambda: moeccl.Moe(comm, **sizes, type="f")),
                    ("priority is 'EP': give moeccl.PRIORITY_AUTO", lambda: comm.set_priority("EP")),
                    ("stream is 'main': give a moeccl.Stream", lambda: comm.all_reduce(array.array("f", [0]), stream="main")),
                    ("an int is not a buffer: give a tensor", lambda: comm.register(3)),
                    ("scalar is 'two': give a number, or a buffer", lambda: comm.premul_sum("two", moeccl.FLOAT32)),
                    ("exclude is 0: give a list of numbers", lambda: comm.shrink(0)),
                    ("domain is 1: give a list of numbers", lambda: moeccl.Hybrid(comm, 4, domain=1)),
                    ("data_bytes is '1K': give a number", lambda: moeccl.Hybrid(comm, 4, data_bytes="1K")),
                    ("unknown option topk: there are data_bytes, .*, top_k", lambda: moeccl.Hybrid(comm, 4, domain=[1], topk=1)),
                    ("ratio is '50x': give a number", lambda: moeccl.Codec(64, ratio="50x")),
                    ("ratio is None: give a number", lambda: moeccl.Migration(hybrid, 64, ratio=None)),
                    ("ratio is 'x': give a number", lambda: moeccl.GradientReturn(hybrid, 64, ratio="x")),
                    ("gamma is 'x': give a number", lambda: moeccl.ExpertSwap(comm, gamma="x")),
                    ("residual is 'x': give a whole number", lambda: moeccl.Replacement(moe, residual="x")),
                    ("comm is a Moe: give a moeccl.Comm", lambda: moeccl.Moe(moe, **sizes)),
                    ("comm is a Moe: give a moeccl.Comm", lambda: moeccl.Hybrid(moe, 4)),
                    ("comm is a Moe: give a moeccl.Comm", lambda: moeccl.ExpertSwap(moe)),
                    ("comm is a Moe: give a moeccl.Comm", lambda: moeccl.pipeline.tensor_groups(moe)),
                    ("moe is a Comm: give a moeccl.Moe", lambda: moeccl.Replacement(comm)),
                    ("hybrid is a Comm: give a moeccl.Hybrid", lambda: moeccl.Migration(comm, 64)),
                    ("hybrid is a Comm: give a moeccl.Hybrid", lambda: moeccl.GradientReturn(comm, 64))):
                with self.assertRaisesRegex(TypeError, "^" + sentence):
                    call()

        in_threads(1, work)


class Names(unittest.TestCase):
    # What the package's own modules take from streams.
    INTERNAL = {"moeccl.streams": {"at_group_end", "give_back", "in_group", "stream_handle"}}

    def test_all_names_everything_public(self):
        for entry in pkgutil.iter_modules(moeccl.__path__, "moeccl."):
            if entry.name in ("moeccl.distributed", "moeccl.torch", "moeccl.jax"):  # their tests, which need torch or JAX, import them
                continue
            module = importlib.import_module(entry.name)
            own = {name for name, value in vars(module).items() if not name.startswith("_") and getattr(value, "__module__", "") == entry.name
                   and (inspect.isfunction(value) or inspect.isclass(value))}
            named = set(getattr(module, "__all__", own))
            self.assertEqual(own - named, self.INTERNAL.get(entry.name, set()), entry.name)


class Layer(unittest.TestCase):
    def test_buffers_of_other_sizes_are_refused(self):
        tokens, hidden, top_k = 3, 4, 2

        def work(comm):
            moe = moeccl.Moe(comm, 4 * hidden, n_experts=4, top_k=top_k, max_tokens=tokens)
            for wrong in ([0, 1, 2], [0]):
                with self.assertRaisesRegex(ValueError, "give \\[tokens, 2\\]"):
                    moe.routing(array.array("i", wrong))
            flat = memoryview(bytes(array.array("i", [0, 1] * tokens))).cast("B")
            with self.assertRaisesRegex(ValueError, "give \\[tokens, 2\\]"):
                moe.routing(flat.cast("i", (top_k, tokens)))
            with self.assertRaises(TypeError):
                moe.routing(array.array("q", [0, 1] * tokens))
            with self.assertRaisesRegex(ValueError, "differ in size"):
                moe.routing(array.array("i", [0, 1] * tokens), array.array("f", [1, 1]))
            routing = moe.routing(array.array("i", [(comm.rank + t + 2 * j) % 4 for t in range(tokens)
                                                    for j in range(top_k)]))
            rows, mine = array.array("f", [0] * (routing.n_rows * hidden)), array.array("f", [1] * (tokens * hidden))
            for less in (array.array("f", [0] * 3), rows[:-1], rows + rows, bytearray(3), None):
                with self.assertRaisesRegex(ValueError, "rows has"):
                    routing.dispatch(mine, less)
                with self.assertRaisesRegex(ValueError, "rows has"):
                    routing.combine(less, mine)
                with self.assertRaisesRegex(ValueError, "rows has"):
                    routing.dispatch_backward(less, mine)
            for less in (mine[:-1], mine + mine, bytearray(4 * hidden), None):
                with self.assertRaisesRegex(ValueError, "tokens has"):
                    routing.dispatch(less, rows)
                with self.assertRaisesRegex(ValueError, "tokens has"):
                    routing.combine(rows, less)
                with self.assertRaisesRegex(ValueError, "tokens has"):
                    routing.dispatch_backward(rows, less)
            with self.assertRaises(BufferError):
                routing.dispatch(mine, bytes(rows))
            with self.assertRaisesRegex(TypeError, "the layer's type"):
                routing.combine(array.array("i", [0] * len(rows)), mine)
            routing.dispatch(bytes(mine), rows)  # bytes may hold any type
            routing.combine(rows, mine)
            self.assertEqual(list(mine), [2] * len(mine))
            routing.close()
            with self.assertRaises(moeccl.Error):
                routing.dispatch(mine, rows)
            moe.close()

        in_threads(2, work)

    def test_layers_of_impossible_numbers_are_refused(self):
        def work(comm):
            good = {"hidden_bytes": 16, "n_experts": 4, "top_k": 2, "max_tokens": 8}
            for name, wrong in (("hidden_bytes", -1), ("hidden_bytes", 2**64 + 16), ("n_experts", 2**32 + 4),
                                ("top_k", -2**32 + 2), ("max_tokens", -1), ("align_rows", 2**32), ("layout", 2**32)):
                with self.assertRaisesRegex(ValueError, name):
                    moeccl.Moe(comm, **{**good, name: wrong})
            for wrong in ([0, 1], [0] * 5, []):
                with self.assertRaisesRegex(ValueError, "expert_rank has"):
                    moeccl.Moe(comm, **good, expert_rank=wrong)
            with self.assertRaisesRegex(TypeError, "unknown option"):
                moeccl.Moe(comm, **good, colour=1)
            moe = moeccl.Moe(comm, **good)
            for index, weight, said in (("q", "f", "topk_index holds elements of format .*: give int32"),
                                        ("i", "d", "topk_weight holds elements of format .*: give float32")):
                with self.assertRaisesRegex(TypeError, said):
                    moe.routing(array.array(index, [0, 1]), array.array(weight, [0, 0]))
            moe.close()
            moeccl.Moe(comm, **good, expert_rank=[1, 0, 1, 0]).close()

        in_threads(2, work)

    def test_combine_sums_what_the_experts_made(self):
        tokens, hidden, top_k = 3, 4, 2

        def work(comm):
            moe = moeccl.Moe(comm, 4 * hidden, n_experts=4, top_k=top_k, max_tokens=tokens)
            index = array.array("i", [(comm.rank + t + 2 * j) % 4 for t in range(tokens) for j in range(top_k)])
            weight = array.array("f", [0.25, 0.5] * tokens)
            routing = moe.routing(index, weight)
            rows = array.array("f", [0] * (routing.n_rows * hidden))
            mine = array.array("f", [10.0 * comm.rank + t for t in range(tokens) for _ in range(hidden)])
            routing.dispatch(mine, rows)
            for i in range(len(rows)):
                rows[i] *= 2
            out = array.array("f", [0] * (tokens * hidden))
            routing.combine(rows, out)
            self.assertEqual(list(out), [1.5 * v for v in mine])
            self.assertEqual(routing.info().n_local_experts, 2)
            routing.close()
            moe.close()

        in_threads(2, work)


@unittest.skipIf(numpy is None, "NumPy is not installed")
class Numpy(unittest.TestCase):
    def test_arrays_of_any_shape_and_type(self):
        def work(comm):
            for kind in (numpy.int8, numpy.uint8, numpy.int32, numpy.int64, numpy.float16, numpy.float32, numpy.float64):
                x = numpy.full((3, 5), comm.rank + 1, kind)
                comm.all_reduce(x)
                self.assertTrue((x == 3).all())
            out = numpy.empty((2, 3, 5), numpy.float64)
            comm.all_gather(numpy.full((3, 5), comm.rank, numpy.float64), out)
            self.assertTrue((out[1] == 1).all() and (out[0] == 0).all())
            with self.assertRaises(ValueError):
                comm.broadcast(numpy.zeros((4, 4), numpy.float32)[:, 1])
            with self.assertRaises(TypeError):
                comm.all_reduce(numpy.ones(3, numpy.float32), numpy.ones(3, numpy.int32))
            with self.assertRaises(TypeError):
                comm.all_reduce(numpy.ones(3, bool))
            for kind in (">f4", numpy.complex64, numpy.longdouble, [("a", "f4"), ("b", "i4")], numpy.int16):
                with self.assertRaises(TypeError):
                    comm.all_reduce(numpy.ones(3, kind))
            with self.assertRaises((TypeError, ValueError)):
                comm.all_reduce(numpy.array([object()]), type=moeccl.UINT8)
            comm.all_reduce(numpy.full(3, 0x3f80, numpy.uint16), type=moeccl.BFLOAT16)

        in_threads(2, work)

    def test_scalars_of_any_kind_are_numbers(self):
        def work(comm):
            for scalar in (numpy.int64(2), numpy.float32(2), numpy.uint8(2), numpy.float64(2), numpy.array([2.0])):
                x = numpy.full(3, 5.0)
                comm.all_reduce(x, op=comm.premul_sum(scalar, moeccl.FLOAT64))
                self.assertTrue((x == 20).all(), scalar)
            for wrong in (numpy.array([2]), numpy.array(2), numpy.array([2], numpy.float32)):
                with self.assertRaises((TypeError, ValueError)):
                    comm.premul_sum(wrong, moeccl.FLOAT64)
            with self.assertRaisesRegex(TypeError, "a whole number"):
                comm.premul_sum(numpy.float64(2), moeccl.INT64)
            x = numpy.full(3, 5, numpy.float16)
            comm.all_reduce(x, op=comm.premul_sum(numpy.float16(2), moeccl.FLOAT16))
            self.assertTrue((x == 20).all())
            bits = numpy.full(3, 0x4000, numpy.uint16)  # 2
            comm.all_reduce(bits, op=comm.premul_sum(numpy.array([0x3f00], numpy.uint16), moeccl.BFLOAT16), type=moeccl.BFLOAT16)
            self.assertTrue((bits == 0x4000).all())

        in_threads(2, work)


if __name__ == "__main__":
    unittest.main()
