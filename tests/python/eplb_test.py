# SPDX-License-Identifier: Apache-2.0
"""moeccl.eplb beside what EPLB's interface says: shapes, types, maps that agree, moves and bad input."""
import math
import random
import unittest

from moeccl import eplb

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None

# EPLB's README
WEIGHT = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
PLACED = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
SHAPE = (16, 4, 2, 8)


def fullest(loads, slots, n_gpus):
    """Returns the load of the fullest GPU."""
    share = [load / slots.count(e) for e, load in enumerate(loads)]
    width = len(slots) // n_gpus
    return max(sum(share[e] for e in slots[at:at + width]) for at in range(0, len(slots), width))


class Eplb(unittest.TestCase):
    def maps_agree(self, physical, logical, count):
        most = max(map(max, count))
        for slots, of, counts in zip(physical, logical, count):
            self.assertEqual(sum(counts), len(slots))
            for expert, places in enumerate(of):
                self.assertEqual(len(places), most)
                self.assertEqual(places, [s for s, e in enumerate(slots) if e == expert] + [-1] * (most - counts[expert]))

    def test_example_of_eplb(self):
        physical, logical, count = eplb.rebalance_experts(WEIGHT, *SHAPE)
        self.maps_agree(physical, logical, count)
        for loads, ours, theirs in zip(WEIGHT, physical, PLACED):
            self.assertLessEqual(fullest(loads, ours, 8), fullest(loads, theirs, 8) * (1 + 1e-12))
            for node in (ours[:8], ours[8:]):
                self.assertEqual(len({e // 3 for e in node}), 2)  # two groups of three experts
        self.assertEqual(eplb.rebalance(WEIGHT, *SHAPE, max_work=-1).physical_to_logical_map, PLACED)

    def test_global_policy_where_nodes_do_not_divide_groups(self):
        found = eplb.rebalance(WEIGHT, 16, 1, 2, 8)
        self.maps_agree(*found[:3])
        self.assertGreater(found.answer.balance, found.answer.balance_greedy)
        self.assertLessEqual(found.answer.balance, found.answer.balance_bound)
        mean, most = (sum(sum(loads) / 8 for loads in WEIGHT), sum(fullest(loads, slots, 8) for loads, slots in zip(WEIGHT, found[0])))
        self.assertAlmostEqual(found.answer.balance, mean / most)

    def test_float_loads_and_integers_give_the_same(self):
        floats = [[float(w) for w in row] for row in WEIGHT]
        self.assertEqual(eplb.rebalance_experts(floats, *SHAPE), eplb.rebalance_experts(WEIGHT, *SHAPE))
        self.assertEqual(eplb.rebalance_experts(WEIGHT[1:], *SHAPE)[0][0], eplb.rebalance_experts(WEIGHT, *SHAPE)[0][1])

    def test_moves_from_the_current_placement(self):
        rng = random.Random(1)
        weight = [[50 + rng.random() for _ in range(64)]]
        first = eplb.rebalance(weight, 72, 1, 1, 8)
        self.assertEqual((first.answer.moved, first.answer.balance_before), (0, 0))
        weight[0][5] *= 3
        current = first.physical_to_logical_map
        after = eplb.rebalance(weight, 72, 1, 1, 8, current=current, move_cost=0.5)
        self.assertGreater(after.answer.balance, 0.985)
        moved = sum(len(set(after[0][0][at:at + 9]) - set(current[0][at:at + 9])) for at in range(0, 72, 9))
        self.assertEqual(after.answer.moved, moved)
        self.assertTrue(0 < moved <= 20, moved)
        dear = eplb.rebalance(weight, 72, 1, 1, 8, current=current, move_cost=1e6)
        self.assertEqual((dear.answer.moved, dear.answer.balance >= dear.answer.balance_before > 0.5), (0, True))

    def test_layers_without_load_and_empty_slots(self):
        physical, logical, count = eplb.rebalance_experts([[0] * 4], 8, 1, 1, 2)
        self.assertEqual(count, [[2, 2, 2, 2]])
        self.maps_agree(physical, logical, count)
        found = eplb.rebalance([[1, 2, 3, 4]], 8, 1, 1, 2, current=[[-1] * 8], move_cost=1)
        self.assertEqual((found.answer.balance_before, found.answer.moved), (0, sum(len(set(found[0][0][at:at + 4])) for at in (0, 4))))

    def refuses(self, kind, sentence, *arguments, **options):
        with self.assertRaisesRegex(kind, sentence):
            eplb.rebalance(*arguments, **options)

    def test_errors_name_argument_value_and_remedy(self):
        self.refuses(ValueError, r"^num_replicas is 15: give a multiple of num_gpus \(8\) from weight's experts \(12\) to 65536", WEIGHT, 15, 4, 2, 8)
        self.refuses(ValueError, r"^num_groups is 5: give a divisor of weight's experts \(12\)", WEIGHT, 16, 5, 1, 8)
        self.refuses(ValueError, r"^num_nodes is 3: give a divisor of num_gpus \(8\)", WEIGHT, 16, 6, 3, 8)
        self.refuses(ValueError, r"^num_gpus is 0: give a number from 1", WEIGHT, 16, 4, 2, 0)
        self.refuses(ValueError, r"^num_replicas is 2147483648: give a number from 1 to 65536", WEIGHT, 2**31, 4, 2, 8)
        self.refuses(TypeError, r"^num_groups is 'a': give a whole number", WEIGHT, 16, "a", 2, 8)
        self.refuses(ValueError, r"^weight\[1\]\[2\] is nan: give a number from 0", [[1, 2, 3], [1, 2, math.nan]], 4, 1, 1, 2)
        self.refuses(ValueError, r"^weight\[0\]\[0\] is -1: give a number from 0", [[-1, 2]], 4, 1, 1, 2)
        self.refuses(ValueError, r"^weight is list \[1, 2, 3\]: give \[layers, experts\], such as", [1, 2, 3], 4, 1, 1, 2)
        self.refuses(ValueError, r"^weight is str 'loads': give \[layers, experts\]", "loads", 4, 1, 1, 2)
        self.refuses(ValueError, r"^weight has rows of 1 and of 2 numbers", [[1, 2], [1]], 4, 1, 1, 2)
        self.refuses(TypeError, r"^weight holds something else than numbers", [["a", 2]], 4, 1, 1, 2)
        self.refuses(ValueError, r"^current has 1 layers of 3 slots: give \[1, 4\]", [[1, 2]], 4, 1, 1, 2, current=[[0, 1, 0]])
        self.refuses(ValueError, r"^current\[0\]\[3\] is 2: give an expert from 0 to 1", [[1, 2]], 4, 1, 1, 2, current=[[0, 1, 0, 2]])
        self.refuses(TypeError, r"^current holds something else than numbers of experts", [[1, 2]], 4, 1, 1, 2, current=[[0, 1, 0, 0.5]])
        self.refuses(ValueError, r"^move_cost is -1", [[1, 2]], 4, 1, 1, 2, move_cost=-1)
        self.refuses(TypeError, r"^unknown option curent: there are current, move_cost, tolerance, max_work$", [[1, 2]], 4, 1, 1, 2, curent=3)
        # It would say that weight is larger than it is.
        self.refuses(TypeError, r"^unknown option n_experts: there are current", [[1, 2]], 4, 1, 1, 2, n_experts=4000)

    @unittest.skipUnless(numpy, "NumPy is not installed")
    def test_numpy_arrays_come_back(self):
        for weight in (numpy.array(WEIGHT), numpy.asfortranarray(WEIGHT, dtype="float32"), numpy.array(WEIGHT, dtype="float64")[:, ::1]):
            found = eplb.rebalance_experts(weight, *SHAPE)
            for got, wanted, shape in zip(found, eplb.rebalance_experts(WEIGHT, *SHAPE), ((2, 16), (2, 12, 2), (2, 12))):
                self.assertEqual((type(got), got.dtype, got.shape[:2]), (numpy.ndarray, numpy.int64, shape[:2]))
                self.assertEqual(got.tolist(), wanted)
                got[0] = 0  # writable
        again = eplb.rebalance(numpy.array(WEIGHT), *SHAPE, current=eplb.rebalance_experts(numpy.array(WEIGHT), *SHAPE)[0])
        self.assertEqual(again.answer.moved, 0)
        self.refuses(ValueError, r"^weight has shape \(12,\): give \[layers, experts\]", numpy.array(WEIGHT[0]), *SHAPE)

    @unittest.skipUnless(torch, "torch is not installed")
    def test_torch_tensors_come_back(self):
        for dtype in (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16):
            weight = torch.tensor(WEIGHT, dtype=dtype)
            found = eplb.rebalance_experts(weight, *SHAPE)
            for got, wanted in zip(found, eplb.rebalance_experts(weight.tolist(), *SHAPE)):
                self.assertEqual((got.dtype, got.device.type), (torch.int64, "cpu"))
                self.assertEqual(got.tolist(), wanted)
        self.assertEqual(eplb.rebalance(weight, *SHAPE, current=found[0]).answer.moved, 0)


if __name__ == "__main__":
    unittest.main()
