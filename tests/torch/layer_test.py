#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moeccl.torch: compares values, gradients and losses with a dense reference in one process, on 2 and 4 processes.

Run with LIBMOECCL and PYTHONPATH as meson sets them.
`layer_test.py --ranks N [CASE...]` runs all cases, or those named, on N processes."""
import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import with_torch  # noqa: F401 (skips where there is no torch)
import torch

WORLDS = (2, 4)
LIMIT_S = 240


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_world(n, cases, limit_s=LIMIT_S):
    """Runs the cases on n processes, for at most limit_s. Returns {case: {rank: message or None}}."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for r in range(n):
            env = dict(os.environ, RANK=str(r), WORLD_SIZE=str(n), LOCAL_RANK=str(r), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port), OMP_NUM_THREADS="1", MOECCL_TIMEOUT_MS="60000")
            ranks.append(subprocess.Popen([sys.executable, os.path.realpath(__file__), "--worker", folder, *cases], env=env))
        deadline = time.monotonic() + limit_s
        try:
            for p in ranks:
                p.wait(max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for p in ranks:
                if p.poll() is None:
                    p.kill()
                    p.wait()
        results = {case: {} for case in cases}
        for r in range(n):
            path = os.path.join(folder, f"{r}.json")
            said = {}
            if os.path.exists(path):
                with open(path, encoding="utf-8") as f:
                    said = json.load(f)
            for case in cases:
                results[case][r] = said.get(case, f"the process ended with {ranks[r].returncode} and said nothing of this case")
        return results


def work(folder, cases):
    """Runs the cases as one rank, and writes the result of each."""
    import traceback

    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said = {}
    for case in cases:
        try:
            module, name = case.split(".")
            getattr(importlib.import_module(module), name)(dist.get_rank(), dist.get_world_size())
            said[case] = None
        except unittest.SkipTest as reason:
            print(f"skipped {case}: {reason}", flush=True)
            said[case] = None
        except BaseException:  # pylint: disable=broad-except
            said[case] = traceback.format_exc()
        with open(os.path.join(folder, f"{dist.get_rank()}.json"), "w", encoding="utf-8") as f:
            json.dump(said, f)
        if said[case]:
            break  # the other ranks may be at another point
    if not any(said.values()):
        import moeccl.torch
        moeccl.torch.close()
        dist.destroy_process_group()
    os._exit(0)  # a failed collective leaves threads that wait


def all_cases():
    """Returns the names of all cases, as module.function."""
    here, names = os.path.dirname(os.path.realpath(__file__)), []
    for module in ("layer_cases", "layer_model_cases", "layer_domain_cases", "layer_state_cases", "layer_agreement_cases", "layer_checkpoint_cases",
                   "layer_flight_cases", "layer_placement_cases", "layer_replace_cases", "layer_swap_cases", "layer_trainer_cases", "layer_use_cases",
                   "layer_wrapper_cases", "tensor_parallel_cases"):
        with open(os.path.join(here, module + ".py"), encoding="utf-8") as f:
            names += [f"{module}.{line[4:line.index('(')]}" for line in f if line.startswith("def case_")]
    return names


class LayerTest(unittest.TestCase):
    """Has one test method per world size; each case is a subtest."""

    def world(self, n):
        results = run_world(n, all_cases())
        for case, said in results.items():
            with self.subTest(case=case, ranks=n):
                wrong = {r: text for r, text in said.items() if text}
                self.assertFalse(wrong, "\n".join(f"rank {r}: {text}" for r, text in wrong.items()))


class ForgottenInit(unittest.TestCase):
    def test_ranks_without_a_process_group_do_not_train_alone(self):
        import moeccl.torch
        layer = {"hidden": 8, "n_experts": 2, "top_k": 1, "ffn": 4}
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "4"}), self.assertRaisesRegex(RuntimeError, "4 ranks.*init_process_group"):
            moeccl.torch.MoELayer(**layer)(torch.zeros(1, 8))
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
            made = [moeccl.torch.MoELayer(**layer) for _ in range(2)]
            self.assertIs(made[0].comm, made[1].comm)
            made[0](torch.zeros(1, 8))
            del made
            moeccl.torch.close()
            moeccl.torch.MoELayer(**layer)(torch.zeros(1, 8))


class ADefaultGroupThatIsMadeAgain(unittest.TestCase):
    def test_renew_closes_the_communicators_of_the_one_before(self):
        import gc

        import moeccl.distributed
        import moeccl.torch
        import torch.distributed as dist

        def begin():
            dist.init_process_group("moeccl", store=dist.HashStore(), rank=0, world_size=1)

        begin()
        layer = moeccl.torch.MoELayer(hidden=8, n_experts=2, top_k=1, ffn=4)
        layer(torch.zeros(1, 8))
        for _ in range(3):  # something in torch may hold one group, but not all of them
            old = layer.comm
            dist.destroy_process_group()
            gc.collect()
            begin()
            moeccl.torch.renew(layer)
            self.assertFalse(old.handle)
            layer(torch.zeros(1, 8))
        moeccl.torch.close()
        dist.destroy_process_group()


for _n in WORLDS:
    setattr(LayerTest, f"test_{_n}_ranks", lambda self, n=_n: self.world(n))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, choices=range(1, 17), metavar="N")
    parser.add_argument("cases", nargs="*")
    given, rest = parser.parse_known_args()
    if given.worker:
        work(given.worker, given.cases)
    elif given.ranks:
        failed = 0
        for name, said in run_world(given.ranks, [c for c in all_cases() if not given.cases or c.split(".")[1] in given.cases]).items():
            bad = {r: t for r, t in said.items() if t}
            failed += bool(bad)
            print("FAILED" if bad else "ok", name, *(f"\nrank {r}: {t}" for r, t in sorted(bad.items(), key=lambda i: "moecclRemoteError" in i[1])[:2]))
        sys.exit(bool(failed))
    else:
        unittest.main(argv=[sys.argv[0], *rest])
