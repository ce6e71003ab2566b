# SPDX-License-Identifier: Apache-2.0
"""A newcomer's first steps: init_process_group("moeccl") without an import where the package is installed, and the README's example."""
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
import with_torch  # noqa: E402,F401
from moeccl._c10d.base import VERSION  # noqa: E402

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("moeccl")
x = torch.full((4,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(f"{dist.get_backend()} {x.tolist()} in rank {dist.get_rank()}\\n", end="", flush=True)
dist.destroy_process_group()
"""

# Rank 1 ends while rank 0 still waits for its gradients.
ENDS_EARLY = """
import time, torch, torch.distributed as dist, moeccl.torch
dist.init_process_group("gloo")
rank = dist.get_rank()
layer = moeccl.torch.ExpertParallel(n_experts=2, top_k=1, hidden=65536, max_tokens=8)
x = torch.ones(8 * (1 - rank), 65536, requires_grad=True)
rows, counts, handle = layer.dispatch(x, torch.ones(len(x), 1, dtype=torch.int64))
rows.register_hook(lambda grad: time.sleep(1 - rank))
layer.combine(rows, handle).sum().backward()
print(f"rank {rank}: {x.grad.sum().item()}\\n", end="", flush=True)
"""


def torchrun(n, program, *arguments, **environment):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", program, *arguments],
                          check=False, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    return done.returncode, done.stdout, done.stderr


class Start(unittest.TestCase):
    @unittest.skipIf(VERSION < (2, 14), f"needs torch 2.14 for entry points of backends, this is {VERSION[0]}.{VERSION[1]}")
    def test_the_entry_point_makes_the_backend_known(self):
        with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
            entry = tomllib.load(file)["project"]["entry-points"]["torch.distributed.backends"]
        with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as elsewhere:
            installed = os.path.join(place, "moeccl-0.1.0.dist-info")
            os.mkdir(installed)
            with open(os.path.join(installed, "METADATA"), "w", encoding="utf-8") as file:
                file.write("Metadata-Version: 2.1\nName: moeccl\nVersion: 0.1.0\n")
            with open(os.path.join(installed, "entry_points.txt"), "w", encoding="utf-8") as file:
                file.write("[torch.distributed.backends]\n" + "".join(f"{name} = {where}\n" for name, where in entry.items()))
            program = os.path.join(elsewhere, "program.py")  # python also searches the program's folder
            with open(program, "w", encoding="utf-8") as file:
                file.write(PROGRAM)
            path = os.environ.get("PYTHONPATH", "")
            code, said, errors = torchrun(2, program, PYTHONPATH=f"{path}:{place}")
            self.assertEqual(code, 0, errors)
            self.assertEqual(sorted(said.splitlines()), [f"moeccl [3.0, 3.0, 3.0, 3.0] in rank {r}" for r in range(2)])
            code, _, errors = torchrun(2, program)
            self.assertNotEqual(code, 0, "the backend is known without its entry point: this test shows nothing")

    def test_a_process_may_end_without_close(self):
        with tempfile.TemporaryDirectory() as place:
            program = os.path.join(place, "program.py")
            with open(program, "w", encoding="utf-8") as file:
                file.write(ENDS_EARLY)
            code, said, errors = torchrun(2, program)
        self.assertEqual((code, sorted(said.splitlines())), (0, ["rank 0: 524288.0", "rank 1: 0.0"]), errors)

    def test_the_readmes_example(self):
        code, said, errors = torchrun(4, os.path.join(ROOT, "examples/first_layer.py"))
        self.assertEqual(code, 0, errors)
        self.assertEqual(sum(said.count(f"rank {r}: |gradient of x| = 0.0") for r in range(4)), 4, said)

    def test_the_training_example_has_gloos_loss_where_rounding_decides_no_choice(self):
        """In float32 over 200 steps, as issue 17 asks, on a small model."""
        small = "--layers 2 --hidden 64 --ffn 64 --batch 2 --length 32 --steps 200".split()
        code, said, errors = torchrun(2, os.path.join(ROOT, "examples/pytorch_moe.py"), "--backend", "both", "--same-choices", *small)
        self.assertEqual(code, 0, errors)
        apart = re.search(r"losses differ by at most (\S+)", said)
        self.assertLess(float(apart[1]), 1e-5, said)
        tokens = 200 * 2 * 2 * 2 * 32  # steps, ranks, layers, sequences, their length
        self.assertRegex(said, rf"\d+ of {tokens} times a token's own choice would have been another")


if __name__ == "__main__":
    unittest.main()
