# SPDX-License-Identifier: Apache-2.0
"""Tensors as buffers of the plain calls: types, contiguity, devices, streams, and CUDA arrays by their interface."""
import os
import sys
import unittest

sys.path[:0] = [os.path.dirname(os.path.realpath(__file__)), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../python")]
import with_torch  # noqa: E402,F401
import torch  # noqa: E402

import moeccl  # noqa: E402
from moeccl._buffers import Buffer  # noqa: E402
from ranks import in_threads  # noqa: E402


class CudaArray:
    """An array with the interface of CuPy's and Numba's."""

    def __init__(self, **interface):
        self.__cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3, **interface}


class Tensors(unittest.TestCase):
    def test_every_type(self):
        def work(comm):
            for kind in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16,
                         torch.float8_e4m3fn, torch.float8_e5m2):
                for _ in range(2):  # the first call learns the type, the second takes the fast path
                    x = torch.full((3, 5), comm.rank + 1.0).to(kind)
                    comm.all_reduce(x)
                    self.assertTrue((x.to(torch.float32) == 3).all(), kind)
                out = torch.empty(2, 3, 5, dtype=kind)
                comm.all_gather(torch.full((3, 5), comm.rank + 1.0).to(kind), out)
                self.assertEqual([out[r, 2, 4].item() for r in range(2)], [1, 2])
            stream, y = moeccl.Stream(), torch.ones(1000)
            comm.all_reduce(y, stream=stream)
            stream.synchronize()
            self.assertTrue((y == 2).all())
            stream.close()
            with moeccl.group():
                comm.send(torch.full((7,), comm.rank), 1 - comm.rank)
                inbox = torch.zeros(7, dtype=torch.int64)
                comm.recv(inbox, 1 - comm.rank)
            self.assertTrue((inbox == 1 - comm.rank).all())
            comm.all_reduce(torch.ones(0))

        in_threads(2, work)

    def test_what_cannot_be_sent_is_named(self):
        def work(comm):
            for wrong, kind, why in ((torch.ones(4, 4)[:, 1], ValueError, "not contiguous"), (torch.ones(4, device="meta"), TypeError, "on meta"),
                                     (torch.ones(4, dtype=torch.int16), TypeError, "int16"), (torch.ones(4, dtype=torch.complex64), TypeError, "complex64"),
                                     (torch.ones(4, dtype=torch.bool), TypeError, "no sum")):
                for _ in range(2):
                    with self.assertRaisesRegex(kind, why):
                        comm.all_reduce(wrong)
            with self.assertRaisesRegex(TypeError, "elements differ"):
                comm.all_reduce(torch.ones(3), torch.ones(3, dtype=torch.int32))
            with self.assertRaisesRegex(ValueError, "do not fit"):
                comm.all_gather(torch.ones(3), torch.ones(5))
            comm.all_reduce(torch.ones(4, dtype=torch.bool), op=moeccl.MAX)

        in_threads(2, work)

    def test_layers_of_tensors(self):
        def work(comm):
            moe = moeccl.Moe(comm, 16, n_experts=4, top_k=2, max_tokens=8, type=moeccl.BFLOAT16)
            routing = moe.routing(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.full((2, 2), 0.5))
            rows, tokens = torch.empty(routing.n_rows, 8, dtype=torch.bfloat16), torch.full((2, 8), 3.0, dtype=torch.bfloat16)
            routing.dispatch(tokens, rows)
            out = torch.zeros_like(tokens)
            routing.combine(rows, out)
            self.assertTrue(torch.equal(out, tokens))
            with self.assertRaisesRegex(TypeError, "the layer's type"):
                routing.combine(rows, torch.zeros(2, 4))
            with self.assertRaisesRegex(ValueError, "give \\[tokens, 2\\]"):
                moe.routing(torch.zeros(2, 3, dtype=torch.int32))

        in_threads(2, work)

    def test_cuda_arrays(self):
        buffer = Buffer(CudaArray(), True)
        self.assertEqual((buffer.data, buffer.bytes, buffer.type, buffer.shape), (4096, 24, moeccl.FLOAT32, (2, 3)))
        self.assertEqual(Buffer(CudaArray(typestr="|b1")).format, "?")
        self.assertEqual(Buffer(CudaArray(strides=(12, 4))).bytes, 24)
        self.assertIsNone(Buffer(CudaArray(typestr=">f4")).type)
        with self.assertRaisesRegex(ValueError, "not C-contiguous"):
            Buffer(CudaArray(strides=(4, 8)))
        with self.assertRaisesRegex(BufferError, "read-only"):
            Buffer(CudaArray(data=(4096, True)), True)


if __name__ == "__main__":
    unittest.main()
