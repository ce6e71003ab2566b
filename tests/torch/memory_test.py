# SPDX-License-Identifier: Apache-2.0
"""The layers' memory on the CPU: rows come from memory that earlier steps have left, and never from memory that is in use."""
import os
import sys
import unittest

sys.path[:0] = [os.path.dirname(os.path.realpath(__file__)), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../python")]
import with_torch  # noqa: E402,F401
import torch  # noqa: E402

import moeccl.torch  # noqa: E402
from moeccl.torch import _memory  # noqa: E402
from moeccl.torch.float8 import BLOCK, dequantize, quantize  # noqa: E402
from moeccl.torch.functions import Combine, Dispatch  # noqa: E402

ROWS, HIDDEN = 1 << 10, 1 << 10


class OneRank:
    """A handle of a routing whose dispatch and combine copy the rows, made of the calls that the autograd functions need."""
    comm = routing = None
    n_rows = n_tokens = ROWS


class LayersMemory(unittest.TestCase):
    def setUp(self):
        moeccl.torch.empty_cache()

    def test_a_step_takes_the_memory_of_the_step_before(self):
        like = torch.empty(0)
        first = _memory.new_rows(like, (ROWS, HIDDEN))
        second = _memory.new_rows(like, (ROWS, HIDDEN))
        places = {first.data_ptr(), second.data_ptr()}
        self.assertEqual(len(places), 2)
        del first, second
        for _ in range(3):
            both = [_memory.new_rows(like, (ROWS, HIDDEN)) for _ in range(2)]
            self.assertEqual({t.data_ptr() for t in both}, places)
            del both
        self.assertEqual(_memory.new_rows(like, (ROWS, HIDDEN)).shape, (ROWS, HIDDEN))

    def test_memory_in_use_is_not_given_again(self):
        like = torch.empty(0, dtype=torch.bfloat16)
        rows = _memory.new_rows(like, (ROWS, HIDDEN))
        view = rows[5:7]
        place = rows.data_ptr()
        del rows  # the view keeps the memory
        other = _memory.new_rows(like, (ROWS, HIDDEN))
        self.assertNotEqual(other.data_ptr(), place)
        self.assertEqual(view.untyped_storage().data_ptr(), place)

    def test_autograd_keeps_what_its_backward_pass_reads(self):
        weight = torch.ones(HIDDEN, requires_grad=True)
        rows = _memory.new_rows(torch.empty(0), (ROWS, HIDDEN)).fill_(3)
        y = (rows * weight).sum()
        del rows
        _memory.new_rows(torch.empty(0), (ROWS, HIDDEN)).fill_(7)
        y.backward()
        self.assertTrue((weight.grad == 3 * ROWS).all())

    def test_the_functions_use_it(self):
        from moeccl.torch import functions
        taken, new_rows = [], functions.new_rows
        calls, functions.call = functions.call, lambda *arguments: None
        functions.new_rows = lambda like, shape: taken.append(tuple(shape)) or new_rows(like, shape).zero_()
        try:
            x = torch.ones(ROWS, HIDDEN, requires_grad=True)
            y = Combine.apply(Dispatch.apply(x, None, OneRank), None, OneRank)
            y.sum().backward()
        finally:
            functions.call, functions.new_rows = calls, new_rows
        self.assertEqual(taken, [(ROWS, HIDDEN)] * 4)

    def test_empty_cache_gives_memory_back(self):
        kept = _memory.new_rows(torch.empty(0), (ROWS, HIDDEN))
        _memory.new_rows(torch.empty(0), (ROWS, HIDDEN))
        _memory.new_rows(torch.empty(0), (8, 8))  # collects
        moeccl.torch.empty_cache()
        self.assertEqual(_memory._of_layers._kept, 0)
        self.assertEqual([bytes_ for _, bytes_ in _memory._of_layers._lent], [kept.untyped_storage().nbytes()])

    def test_rows_in_8_bits_are_the_same_in_slices(self):
        generator = torch.Generator().manual_seed(2)
        for rows, hidden in ((0, 256), (1, 1), (700, 1000), (3000, 384)):
            x = torch.randn((rows, 2 * hidden), generator=generator, dtype=torch.bfloat16)[:, :hidden]
            for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
                most = torch.finfo(kind).max
                blocks = torch.nn.functional.pad(x.float(), (0, -hidden % BLOCK)).view(rows, -(-hidden // BLOCK), BLOCK)
                largest = blocks.abs().amax(-1, keepdim=True)
                scales = torch.where(largest > 0, largest / most, torch.ones_like(largest))
                want = (blocks / scales).clamp(-most, most).to(kind).flatten(1)[:, :hidden]
                got, got_scales = quantize(x, kind)
                self.assertTrue(torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8)))
                self.assertTrue(torch.equal(got_scales, scales.flatten(1)))
                wide = got_scales.repeat_interleave(BLOCK, dim=1)[:, :hidden]
                self.assertTrue(torch.equal(dequantize(got, got_scales, torch.bfloat16), (got.float() * wide).bfloat16()))

    def test_every_value_of_8_bits_is_widened_exactly(self):
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
            every = torch.arange(256, dtype=torch.uint8).view(kind)
            numbers = every[~every.float().isnan()]
            for rows in (every.view(2, 128), numbers.view(1, -1)):
                hidden = rows.shape[1]
                scales = torch.full((rows.shape[0], -(-hidden // BLOCK)), 0.75)
                for dtype in (torch.float32, torch.bfloat16):
                    torch.testing.assert_close(dequantize(rows, scales, dtype), (rows.float() * 0.75).to(dtype), rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    unittest.main()
