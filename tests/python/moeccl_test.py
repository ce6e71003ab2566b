"""bindings/python/moeccl.py against known results: thread ranks and processes; NumPy where it is installed."""
import array
import multiprocessing
import threading
import unittest

import moeccl

try:
    import numpy
except ImportError:
    numpy = None


def in_threads(n, work, **options):
    comms, failures = moeccl.init_all(n, **options), []

    def run(comm):
        try:
            work(comm)
        except BaseException as failure:  # the others must not wait for this rank
            failures.append(failure)
            comm.abort()

    threads = [threading.Thread(target=run, args=(c,)) for c in comms]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for c in comms:
        try:
            c.close()
        except moeccl.Error:
            pass
    if failures:
        raise failures[0]


def process_rank(n, rank, ids, results):
    comm = moeccl.Comm(n, moeccl.UniqueId.from_bytes(ids), rank, timeout_ms=20000)
    x = array.array("q", [rank + 1])
    comm.all_reduce(x)
    comm.close()
    results.put(x[0])


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
        context = multiprocessing.get_context("spawn")
        results, ids = context.Queue(), bytes(moeccl.unique_id())
        ranks = [context.Process(target=process_rank, args=(2, r, ids, results)) for r in range(2)]
        for p in ranks:
            p.start()
        self.assertEqual([results.get(timeout=60) for _ in ranks], [3, 3])
        for p in ranks:
            p.join()

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


class Layer(unittest.TestCase):
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

        in_threads(2, work)


if __name__ == "__main__":
    unittest.main()
