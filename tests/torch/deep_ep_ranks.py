# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of the deep_ep tests: functions of a buffer, which all ranks call, each in a process of its own and
with a buffer of its own."""
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
import unittest

import torch
import torch.distributed as dist
from deep_ep_support import DEVICE, on_streams, use_device

STARTS = 90  # seconds until a rank has its buffer: a CUDA context with all of its kernels takes some
SECONDS = 30 if os.environ.get("DEEP_EP_TEST_DEVICE") == "cuda" else 300  # per case; a GPU is lent for minutes


def cases_of(*modules):
    """Returns the functions of these modules that take a buffer and nothing else."""
    return [value for module in modules for name, value in list(vars(module).items())
            if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["buffer"] and
            value.__module__ == module.__name__ and name.islower()]


def _serve(rank, n_ranks, meeting, world, pipe, cases, make):
    """Serves as one rank: runs the cases whose names arrive, and sends back the results."""
    if world == "hosts":
        os.environ["MOECCL_HOST_ID"] = f"host{rank // 2}"
    if world == "late":
        os.environ["MOECCL_INIT_TIMEOUT_MS"] = "2000"
    torch.set_num_threads(1)
    use_device()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n_ranks, rank=rank)
    if world == "late" and rank == 1:
        time.sleep(4)
    buffer = make(dist.group.WORLD)
    if world == "streams":
        on_streams(buffer)
    for name in iter(pipe.recv, None):
        try:
            next(case for case in cases if case.__name__ == name)(buffer)
            pipe.send(None)
        except BaseException:
            pipe.send(f"rank {rank}: {traceback.format_exc()}")
    buffer.destroy()
    dist.destroy_process_group()
    pipe.send("ended")


class _Ranks(unittest.TestCase):
    n_ranks, world, cases, make = 0, "usual", (), None
    silent = False  # a rank has not answered
    started = False

    @classmethod
    def setUpClass(cls):
        context = multiprocessing.get_context("fork")
        cls.folder = tempfile.TemporaryDirectory()
        cls.ranks = []
        for rank in range(cls.n_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, cls.n_ranks, cls.folder.name + "/meeting", cls.world,
                                                           there, cls.cases, cls.make))
            process.start()
            there.close()
            cls.ranks.append((process, here))

    @classmethod
    def answers(cls):
        seconds = SECONDS if cls.started else max(SECONDS, STARTS)
        cls.started = True
        told, until = [], time.monotonic() + seconds
        for process, pipe in cls.ranks:
            try:
                told.append(pipe.recv() if pipe.poll(max(0, until - time.monotonic())) else f"no answer in {seconds} s")
            except EOFError:
                told.append(f"the process ended with {process.exitcode}")
        return told

    @classmethod
    def tearDownClass(cls):
        try:
            if cls.silent:
                for process, _ in cls.ranks:
                    process.kill()
                return
            for _, pipe in cls.ranks:
                pipe.send(None)
            told = cls.answers()
            assert told == ["ended"] * cls.n_ranks, told
        except BrokenPipeError:
            pass  # a case has reported that a rank ended
        finally:
            for process, _ in cls.ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
            cls.folder.cleanup()

    def run_case(self, name):
        self.assertFalse(self.silent, "a rank has not answered in an earlier case")
        for _, pipe in self.ranks:
            pipe.send(name)
        told = self.answers()
        type(self).silent = any(one is not None and one.startswith("no answer") for one in told)
        failures = [one for one in told if one is not None]
        if failures:
            self.fail("\n".join(failures))


def tests_of(cases, make, late=None):
    """Returns test classes by name, for the module that calls: each case on 2 ranks, on 4, on 4 that count as two
    hosts, and on 2 whose calls take the way of CUDA tensors. make: a function of the process group that returns a
    rank's buffer. late: the name of a case that also runs where a rank comes late."""
    worlds = {"TwoRanks": (2, "usual"), "FourRanks": (4, "usual"), "FourRanksOnTwoHosts": (4, "hosts"),
              "TwoRanksOnStreams": (2, "streams")}
    names = {world: [case.__name__ for case in cases] for world in worlds}
    if late is not None:
        # A rank may come later than the library waits, as long as the process group waits.
        worlds["ALateRank"], names["ALateRank"] = (2, "late"), [late]
    return {world: type(world, (_Ranks, ), {
        "n_ranks": n_ranks, "world": kind, "cases": cases, "make": staticmethod(make),
        **{"test_" + name: lambda self, name=name: self.run_case(name) for name in names[world]}})
        for world, (n_ranks, kind) in worlds.items()}
