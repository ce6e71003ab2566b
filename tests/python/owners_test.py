# SPDX-License-Identifier: Apache-2.0
"""Who owns what: registered memory that nobody keeps, objects that cannot leave their process, and sizes that another rank must know."""
import array
import copy
import gc
import multiprocessing
import pickle
import unittest

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
