# SPDX-License-Identifier: Apache-2.0
"""Layers, routings and re-placements end with the last object that uses them, and nobody waits there."""
import copy
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import unittest
import weakref

import moeccl
from layers import EXPERTS, HIDDEN, TOKENS, choices, floats, layer
from moeccl import _abi
from moeccl._library import lib
from ranks import in_threads

INVALID = _abi.moecclInvalidArgument
LIMIT_S = 20 * float(os.environ.get("MOECCL_TEST_PATIENCE", 1))


def in_two_threads(test, first, second):
    """Runs first() and second() on two threads; fails if one of them still waits at the end."""
    failures = []

    def run(work):
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in (first, second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    test.assertEqual([t.is_alive() for t in threads], [False, False], "a rank waits for ever")
    if failures:
        raise failures[0]


FAILS = """
import array, moeccl
comm, peer = moeccl.init_all(2, timeout_ms=600000)
stream, x = moeccl.Stream(), array.array("f", [1.0] * 1000)
comm.all_reduce(x, stream=stream)  # the peer does not come
raise RuntimeError("the program's own error")
"""


class Ends(unittest.TestCase):
    def test_a_process_that_fails_does_not_wait_for_its_peers(self):
        done = subprocess.run([sys.executable, "-c", FAILS], check=False, capture_output=True, text=True, timeout=3 * LIMIT_S)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("the program's own error", done.stderr)

    def test_what_nothing_refers_to_any_more_is_freed(self):
        def work(comm):
            moe = layer(comm)
            routing = moe.routing(choices(comm.rank))
            replacement = moeccl.Replacement(moe)
            hybrid = moeccl.Hybrid(comm, EXPERTS, domain=[1])
            handles = {name: thing.handle for name, thing in
                       (("Moe", moe), ("Replace", replacement), ("Hybrid", hybrid), ("Routing", routing))}
            del moe, replacement, hybrid
            gc.collect()
            rows = floats(routing.n_rows * HIDDEN)
            routing.dispatch(floats(TOKENS * HIDDEN, 1.0), rows)  # the routing keeps its layer
            info = routing.info()
            counts = info.expert_counts
            del routing, info
            gc.collect()
            self.assertGreaterEqual(sum(counts[:EXPERTS // comm.size]), 0)  # a pointer of info() keeps the routing
            again = layer(comm)  # a creation frees what has ended before it
            for name in ("Replace", "Hybrid"):
                self.assertEqual(getattr(lib, f"moeccl{name}Destroy")(handles[name]), INVALID, name)
            info = _abi.moecclRoutingInfo_t()
            self.assertEqual(lib.moecclRoutingGetInfo(handles["Routing"], ctypes.byref(info)), 0)
            del counts
            gc.collect()
            second = again.routing(choices(comm.rank))
            for name in ("Routing", "Moe"):
                self.assertEqual(getattr(lib, f"moeccl{name}Destroy")(handles[name]), INVALID, name)
            handle, late = second.handle, again.routing(choices(comm.rank))
            late_handle = late.handle
            del second
            gc.collect()
            comm.close()  # so does the end of the communicator
            self.assertEqual(lib.moecclRoutingDestroy(handle), INVALID)
            del late
            gc.collect()
            self.assertEqual(lib.moecclRoutingDestroy(late_handle), INVALID)

        in_threads(2, work)

    def test_a_function_that_ends_with_its_routing_waits_for_no_peer(self):
        first, second = moeccl.init_all(2)
        came = threading.Event()
        back = []

        def dispatch(comm, stream, before):
            routing = layer(comm).routing(choices(comm.rank))
            rows = floats(routing.n_rows * HIDDEN)
            before()
            routing.dispatch(floats(TOKENS * HIDDEN, 2.0), rows, stream=stream)
            return rows, weakref.ref(routing)

        def early():
            with moeccl.Stream() as stream:
                rows, routing = dispatch(first, stream, lambda: None)
                kept = routing() is not None
                came.set()
                stream.synchronize()
                back.append(kept and routing() is None and list(rows) == [2.0] * len(rows))

        def late():
            with moeccl.Stream() as stream:
                dispatch(second, stream, lambda: back.append(came.wait(LIMIT_S / 2)))

        in_two_threads(self, early, late)
        self.assertEqual(back, [True, True])

    def test_two_communicators_may_be_used_in_different_orders(self):
        ours, others = moeccl.init_all(2), moeccl.init_all(2)

        def work(rank):
            with moeccl.Stream() as stream:
                routing = layer(ours[rank]).routing(choices(rank))
                replacement = moeccl.Replacement(routing._moe, mode="keep")
                replacement.begin(routing)
                rows, tokens, one = floats(routing.n_rows * HIDDEN), floats(TOKENS * HIDDEN, 2.0), floats(1, 1.0)
                if rank == 1:
                    others[rank].all_reduce(one)
                routing.dispatch(tokens, rows, stream=stream)
                stream_rows = floats(replacement.rows() * HIDDEN)
                replacement.combine(stream_rows, tokens, stream=stream)
                del routing, replacement
                if rank == 0:
                    others[rank].all_reduce(one)
                self.assertEqual(one[0], 2.0)

        in_two_threads(self, lambda: work(0), lambda: work(1))

    def test_garbage_is_collected_on_any_thread(self):
        first, second = moeccl.init_all(2)
        made, collected = threading.Event(), []

        def leaves_garbage():
            cycle = [layer(first).routing(choices(0))]
            cycle.append(cycle)
            del cycle
            made.set()
            first.all_reduce(floats(1))

        def collects():
            layer(second).routing(choices(1))
            made.wait(LIMIT_S / 2)
            time.sleep(0.2)  # the other rank is in its all_reduce by then, as a rule
            gc.collect()
            collected.append(True)
            second.all_reduce(floats(1))

        gc.disable()
        try:
            in_two_threads(self, leaves_garbage, collects)
        finally:
            gc.enable()
        self.assertEqual(collected, [True])

    def test_a_copy_keeps_what_it_shares(self):
        def work(comm):
            moe = layer(comm)
            again = copy.deepcopy(moe)
            del moe
            gc.collect()
            routing = again.routing(choices(comm.rank))
            self.assertGreater(routing.n_rows, 0)

        in_threads(2, work)


if __name__ == "__main__":
    unittest.main()
