# SPDX-License-Identifier: Apache-2.0
"""Streams, heap memory, registrations, custom operators, and queries of a communicator."""
import array
import fractions
import gc
import time
import unittest
import weakref

import moeccl
from moeccl.streams import stream_handle
from ranks import in_processes, in_threads


def late_peer(comm):
    """Returns whether a call on a stream returned before the peer arrived, and what it then left in the buffer."""
    x = array.array("d", [comm.rank + 1.0] * 1000)
    with moeccl.Stream() as stream:
        if comm.rank == 1:
            time.sleep(0.5)
        begin = time.monotonic()
        comm.all_reduce(x, stream=stream)
        returned = time.monotonic() - begin
        busy = comm.async_error()
        stream.synchronize()
    return returned < 0.3, busy if comm.rank == 0 else 6, x[999]


class Streams(unittest.TestCase):
    def test_a_call_with_a_stream_returns_at_once(self):
        self.assertEqual(in_processes(2, late_peer), [(True, 6, 3.0)] * 2)

    def test_a_stream_holds_its_buffers_until_it_is_synchronized(self):
        def work(comm):
            stream, box = moeccl.Stream(), bytearray(64)
            comm.recv(box, 1 - comm.rank, stream=stream) if comm.rank else comm.send(bytes(range(64)), 1, stream=stream)
            if comm.rank:
                with self.assertRaises(BufferError):
                    box.append(0)
            gc.collect()
            stream.synchronize()
            if comm.rank:
                self.assertEqual(box, bytes(range(64)))
                box.append(0)
            stream.close()
            with self.assertRaisesRegex(ValueError, "closed"):
                comm.broadcast(box, stream=stream)

        in_threads(2, work)

    def test_synchronizing_inside_a_group_keeps_what_the_group_will_use(self):
        [comm] = moeccl.init_all(1)
        class Floats(array.array):
            pass
        stream, got = moeccl.Stream(), array.array("f", [0.0] * 1000)
        given = Floats("f", [2.0] * 1000)
        alive = weakref.ref(given)
        with moeccl.group():
            comm.all_reduce(given, got, stream=stream)
            del given
            stream.synchronize()
            gc.collect()
            self.assertIsNotNone(alive(), "the buffer of a call that has not been issued yet is gone")
        stream.synchronize()
        gc.collect()
        self.assertIsNone(alive())
        self.assertEqual(got[999], 2.0)

    def test_a_stream_that_only_a_group_uses_lives_until_the_group_has_run(self):
        [comm] = moeccl.init_all(1)
        class Floats(array.array):
            pass
        for kind in (array.array, Floats):  # both ways of a buffer into the library
            given, got = kind("f", [2.0] * 1000), array.array("f", [0.0] * 1000)
            alive = weakref.ref(given)
            with moeccl.group():
                comm.all_reduce(given, got, stream=moeccl.Stream())
                del given
                gc.collect()
                self.assertIsNotNone(alive(), "the buffer of a call that has not been issued yet is gone")
            gc.collect()
            self.assertIsNone(alive())
            self.assertEqual(set(got), {2.0})
        comm.close()

    def test_a_failure_is_told_when_the_stream_is_synchronized(self):
        def work(comm):
            stream = moeccl.Stream()
            comm.all_reduce(bytearray(3 + comm.rank), stream=stream)
            with self.assertRaises(moeccl.Error) as caught:
                stream.synchronize()
            self.assertEqual((caught.exception.name, caught.exception.code), ("moecclMismatch", 9))
            stream.close()

        in_threads(2, work)

    def test_the_default_stream_of_torch_and_cupy_is_a_stream(self):
        class Torchs:
            cuda_stream = 0

        class Cupys:
            ptr = 0

        for default in (Torchs, Cupys):
            self.assertEqual(stream_handle(default()), 1)  # CU_STREAM_LEGACY, as NULL would block
            default.ptr = default.cuda_stream = 77
            self.assertEqual(stream_handle(default()), 77)

    def test_no_stream_at_all_is_named(self):
        [comm] = moeccl.init_all(1)
        with self.assertRaisesRegex(TypeError, "stream is 'now'"):
            comm.all_reduce(bytearray(4), stream="now")
        comm.close()


class Memory(unittest.TestCase):
    def test_heap_memory_is_a_buffer_and_lives_as_long_as_its_views(self):
        def work(comm):
            memory = moeccl.mem_alloc(4096)
            view = memoryview(memory).cast("B").cast("f")
            del memory
            gc.collect()
            self.assertEqual(set(view), {0.0})
            view[5] = 2.5
            comm.all_reduce(view)
            self.assertEqual(view[5], 5.0)

        in_threads(2, work)
        with self.assertRaisesRegex(ValueError, "n_bytes is 0"):
            moeccl.mem_alloc(0)
        with self.assertRaises(moeccl.Error):
            moeccl.mem_alloc(2**55)

    def test_freed_memory_is_given_out_again(self):
        import ctypes
        seen = set()
        for _ in range(50):
            seen.add(ctypes.addressof(moeccl.mem_alloc(1 << 20)))
        self.assertLess(len(seen), 10)

    def test_registrations(self):
        def work(comm):
            buffer = bytearray(10000)
            with comm.register(buffer), comm.register(buffer) as second:
                comm.all_reduce(buffer)
                second.close()
                with self.assertRaises(BufferError):
                    buffer.append(1)
            buffer.append(1)

        in_threads(2, work)


class Communicator(unittest.TestCase):
    def test_each_rank_scales_its_own(self):
        def work(comm):
            x = array.array("f", [1.0, 2.0])
            op = comm.premul_sum(10.0**comm.rank, moeccl.FLOAT32)
            comm.all_reduce(x, op=op)
            self.assertEqual(list(x), [11.0, 22.0])
            op.close()
            half = comm.premul_sum(array.array("H", [0x3f00]), moeccl.BFLOAT16)
            y = array.array("H", [0x4000])  # 2
            comm.all_reduce(y, op=half, type=moeccl.BFLOAT16)
            self.assertEqual(y[0], 0x4000)
            for wrong, kind in ((1.5, moeccl.INT32), (300, moeccl.UINT8), (1.0, moeccl.BFLOAT16), (b"abc", moeccl.FLOAT32)):
                with self.assertRaises((TypeError, ValueError)):
                    comm.premul_sum(wrong, kind)
            for wrong, kind, wanted in (("q", moeccl.FLOAT64, "float64"), ("d", moeccl.INT64, "int64"), ("f", moeccl.INT32, "int32")):
                with self.assertRaisesRegex(TypeError, f"scalar holds elements of format '{wrong}': give {wanted}"):
                    comm.premul_sum(array.array(wrong, [2]), kind)
            z = array.array("d", [3.0])
            comm.all_reduce(z, op=comm.premul_sum(fractions.Fraction(1, 2), moeccl.FLOAT64))
            self.assertEqual(z[0], 3.0)

        in_threads(2, work)

    def test_what_a_communicator_says(self):
        in_processes(2, says)
        in_threads(2, lambda comm: None, priority=3, name="a name", deterministic=1, cuda_sms=4)


def says(comm):
    test = unittest.TestCase()
    test.assertGreater(comm.handle, 0)
    test.assertGreater(comm.memory_usage(), 0)
    comm.set_priority(moeccl.PRIORITY_CP)
    with test.assertRaises(moeccl.Error):
        comm.set_priority(99)
    before = comm.traffic()
    x = array.array("f", [1.0] * 2000)
    comm.all_reduce(x)
    comm.finalize()
    test.assertGreater(sum(one.bytes for one in comm.traffic()), sum(one.bytes for one in before))
    named = comm.split(0, -comm.rank, name="other way", timeout_ms=10000)
    test.assertEqual(named.rank, 1 - comm.rank)
    named.close()
    test.assertEqual(named.handle, 0)
    with test.assertRaises(moeccl.Error):
        named.all_reduce(x)


if __name__ == "__main__":
    unittest.main()
