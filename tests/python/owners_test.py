# SPDX-License-Identifier: Apache-2.0
"""Who owns what: registered memory that nobody keeps, what calls keep until they have run, communicators that a group makes, objects
that cannot leave their process, and sizes that another rank must know."""
import array
import copy
import gc
import multiprocessing
import pickle
import unittest
import weakref

import moeccl
from moeccl._owned import OfThisProcess
from moeccl.solve import SampleSolver
from ranks import in_threads


def floats(n, value=0.0):
    return array.array("f", [value] * n)


def choices(tokens, top_k, n_experts):
    return array.array("i", [(t + j) % n_experts for t in range(tokens) for j in range(top_k)])


class Registrations(unittest.TestCase):
    def test_the_communicator_keeps_what_the_caller_does_not(self):
        comm = moeccl.init_all(1)[0]
        memory = bytearray(4096)
        comm.register(memory)
        gc.collect()
        with self.assertRaises(BufferError):
            memory.append(0)  # would move the memory from under a network card
        kept = bytearray(64)
        with comm.register(kept):
            with self.assertRaises(BufferError):
                kept.append(0)
        kept.append(0)
        self.assertEqual(len(comm._registrations), 1)
        comm.close()
        memory.append(0)

    def test_either_close_may_be_first(self):
        for comm_first in (False, True):
            comm = moeccl.init_all(1)[0]
            memory = bytearray(64)
            registration = comm.register(memory)
            for thing in (comm, registration) if comm_first else (registration, comm):
                thing.close()
            memory.append(0)


def takes(thing):
    return thing


class Lent(unittest.TestCase):
    def lent(self, buffer):
        with self.assertRaises(BufferError):
            buffer.append(0)  # would move the memory that the library uses

    def test_counts_that_a_group_writes_are_lent_to_it(self):
        [comm] = moeccl.init_all(1)
        with moeccl.group():
            counts = moeccl.experts.popularity(comm, [0, 2, 2], 3)
            self.lent(counts)
        self.assertEqual(list(counts), [1, 0, 2])
        counts.append(0)
        comm.close()

    def test_a_migration_keeps_buffers_until_the_library_has_taken_their_gather(self):
        [comm] = moeccl.init_all(1)
        queue = moeccl.Migration(moeccl.Hybrid(comm, 1, domain=[1]), 4, ratio=1, depth=4)
        first, second, third, shared = floats(4), floats(4), floats(4), floats(4)
        for value in (1.0, 2.0, 3.0):
            queue.send(floats(4, value))
        queue.begin()
        queue.begin_into(second)
        queue.begin_into(third)
        with self.assertRaisesRegex(ValueError, "held has 0 bytes"):  # the oldest is begin()'s
            queue.wait()
        self.lent(second)
        queue.wait(first)
        self.lent(second)
        for wrong in (lambda: queue.wait(third), lambda: queue.wait(None, shared), queue.wait_encoded):
            with self.assertRaisesRegex(moeccl.Error, "moecclMigrationBeginInto"):
                wrong()
            self.lent(second)
        queue.wait(second)
        self.lent(third)
        second.append(0)
        queue.wait()
        third.append(0)
        self.assertEqual((list(first), list(second), list(third)), ([1.0] * 4, [2.0] * 4 + [0.0], [3.0] * 4 + [0.0]))
        queue.close()
        comm.close()

    def test_an_operator_ends_with_its_last_reference(self):
        [comm] = moeccl.init_all(1)
        numbers = {comm.premul_sum(2.0, moeccl.FLOAT32).number for _ in range(20)}
        gc.collect()
        self.assertEqual(len(numbers), 1)
        kept = comm.premul_sum(2.0, moeccl.FLOAT32)
        comm.close()
        kept.close()

    def test_a_call_keeps_the_scalar_of_its_operator(self):
        class OnDevice:  # as CuPy's arrays describe themselves
            def __init__(self):
                self.memory = floats(1, 3.0)
                self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (self.memory.buffer_info()[0], False), "version": 3}

        [comm] = moeccl.init_all(1)
        for close in (False, True):
            scalar, x = OnDevice(), floats(1, 2.0)
            op, alive = comm.premul_sum(scalar, moeccl.FLOAT32), weakref.ref(scalar)
            with moeccl.Stream() as stream:
                comm.all_reduce(x, op=op, stream=stream)
                if close:
                    op.close()
                del op, scalar
                gc.collect()
                self.assertIsNotNone(alive(), "the scalar of a call on a stream is gone")
                stream.synchronize()
            gc.collect()
            self.assertIsNone(alive())
            self.assertEqual(x[0], 6.0)
        comm.close()


class Joined(unittest.TestCase):
    def test_one_thread_joins_several_ranks_in_a_group(self):
        meeting = moeccl.unique_id()
        with moeccl.group():
            pair = [moeccl.Comm(2, meeting, rank) for rank in range(2)]
            with moeccl.group():
                more = moeccl.init_all(2)
            self.assertEqual([c.handle for c in pair + more], [0] * 4)
        for comms in (pair, more):
            self.assertEqual([(c.rank, c.size) for c in comms], [(0, 2), (1, 2)])
            sums = [floats(3, 1.0 + rank) for rank in range(2)]
            with moeccl.group():
                for comm, x in zip(comms, sums):
                    comm.all_reduce(x)
            self.assertEqual([list(x) for x in sums], [[3.0] * 3] * 2)
            for comm in comms:
                comm.close()
                with self.assertRaisesRegex(ValueError, "the communicator is closed"):
                    comm.finalize()

    def test_a_communicator_is_not_there_before_its_group_has_ended(self):
        made = []
        for call in (lambda comm: comm.all_reduce(floats(1)), lambda comm: moeccl.Moe(comm, 16, n_experts=4, top_k=2, max_tokens=4)):
            with self.assertRaisesRegex(ValueError, "has not joined: use it after the end of the group"):
                with moeccl.group():
                    made.append(moeccl.Comm(1, moeccl.unique_id(), 0))
                    call(made[-1])
            self.assertEqual(made[-1].handle, 0)  # the group was abandoned
            made[-1].close()


class OfOneProcess(unittest.TestCase):
    def test_nothing_with_a_handle_is_pickled(self):
        comm = moeccl.init_all(1)[0]
        moe = moeccl.Moe(comm, 16, n_experts=4, top_k=2, max_tokens=4)
        with_hybrid = moeccl.Hybrid(comm, 4, domain=[1])
        things = [comm, moe, moe.routing(choices(4, 2, 4)), comm.register(bytearray(64)), comm.premul_sum(2.0, moeccl.FLOAT32), moeccl.Stream(),
                  with_hybrid, moeccl.Migration(with_hybrid, 8, ratio=1), moeccl.GradientReturn(with_hybrid, 8), moeccl.Replacement(moe),
                  moeccl.ExpertSwap(comm), SampleSolver()]
        for thing in things:
            with self.assertRaisesRegex(TypeError, f"a {type(thing).__name__} belongs to its process and cannot be pickled"):
                pickle.dumps({"inside": thing})
            self.assertIs(copy.copy(thing), thing)
            self.assertIs(copy.deepcopy([thing])[0], thing)
        with self.assertRaisesRegex(TypeError, r"moeccl.Comm\(n_ranks, id, rank\) there; save a model as its state_dict"):
            pickle.dumps(comm)
        spawned = multiprocessing.get_context("spawn").Process(target=takes, args=(comm,))
        with self.assertRaisesRegex(TypeError, "a Comm belongs to its process"):
            spawned.start()
        one = moeccl.unique_id()
        self.assertEqual(bytes(pickle.loads(pickle.dumps(bytes(one)))), bytes(one))
        del things, with_hybrid, moe
        gc.collect()
        comm.close()

    def test_every_class_with_a_handle_is_of_its_process(self):
        classes = {c for c in vars(moeccl).values() if isinstance(c, type) and hasattr(c, "close")}
        self.assertGreater(len(classes), 8)
        for c in classes:
            self.assertTrue(issubclass(c, OfThisProcess), c)


class Sizes(unittest.TestCase):
    def test_a_rank_that_holds_no_expert_says_how_large_one_is(self):
        def work(comm):
            hybrid = moeccl.Hybrid(comm, 1, domain=[1])
            holds = comm.rank == 0
            self.assertEqual(hybrid.n_held, int(holds))
            own, held = floats(6 * hybrid.n_own, 3.0), floats(6 * hybrid.n_held)
            if not holds:
                with self.assertRaisesRegex(ValueError, "moecclHybridGather: this rank holds no expert, give expert_bytes=, the bytes of an expert"):
                    hybrid.gather(own, held)
                with self.assertRaisesRegex(ValueError, "moecclHybridReduce: this rank holds no expert, give count=, the elements of an expert"):
                    hybrid.reduce(held, own)
            hybrid.gather(own, held, **({} if holds else {"expert_bytes": 24}))
            back = floats(6 * hybrid.n_own)
            hybrid.reduce(held, back, **({} if holds else {"count": 6}))
            self.assertEqual((list(held), list(back)), ([3.0] * len(held), [3.0] * len(own)))
            if holds:
                hybrid.gather(own, held, expert_bytes=24)
                hybrid.reduce(held, back, count=6)
                with self.assertRaisesRegex(ValueError, "own has 24 bytes for 1 experts"):
                    hybrid.gather(own, held, expert_bytes=20)
                with self.assertRaisesRegex(ValueError, "held has 6 elements for 1 experts"):
                    hybrid.reduce(held, back, count=5)
            else:
                hybrid.gather(None, None, expert_bytes=24)
                hybrid.reduce(None, None, count=6, type=moeccl.FLOAT32)

        in_threads(2, work, timeout_ms=20000)

    def test_a_placement_has_the_samples_of_all_ranks(self):
        """Also where ranks have other numbers of samples, and where the wrong array is another rank's."""
        def work(comm):
            tokens = 4 + 2 * comm.rank
            moe = moeccl.Moe(comm, 16, n_experts=4, top_k=2, max_tokens=6)
            plan, routing = moeccl.Replacement(moe, sample_tokens=2, mode="given"), moe.routing(choices(tokens, 2, 4))
            homes = [0, 0, 1, 1, 1]
            for wrong in (homes[:-1], homes + [0], [], None):
                for whose in (0, 1):
                    n = 0 if wrong is None else len(wrong)
                    with self.assertRaisesRegex(ValueError, f"placement has {n} numbers on rank {whose}: all ranks have 5 samples"):
                        plan.begin(routing, placement=wrong if comm.rank == whose else homes)
            plan.begin(routing, placement=array.array("i", homes))
            out = floats(4 * tokens)
            rows = floats(4 * routing.n_rows)
            routing.dispatch(floats(4 * tokens, 1.0), rows)
            plan.combine(rows, out)
            self.assertEqual(list(out), [2.0] * len(out))
            self.assertEqual(list(plan.info().placement), homes)
            solved = moeccl.Replacement(moe, sample_tokens=2)
            with self.assertRaisesRegex(ValueError, "placement is for"):
                solved.begin(routing, placement=homes)

        in_threads(2, work, timeout_ms=20000)


if __name__ == "__main__":
    unittest.main()
