#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend: compares every call with gloo's result at world sizes 1 to 4, and tests what gloo lacks.

    PYTHONPATH=build/bindings/python LIBMOECCL=build/libmoeccl.so.0 python3 tests/torch/backend_test.py [name or number of ranks ...]"""
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import with_torch  # noqa: F401 (skips where there is no torch)
import torch
import torch.distributed as dist
import torch.multiprocessing
import barriers
import collectives
import groups
import limits
import messages
import torch.distributed._functional_collectives  # here, so that not every rank imports what takes seconds
import torch.distributed.fsdp
import torch.distributed.tensor
import streams
import training
import works
from support import TESTS, VERSION

SECONDS = 120


def rank_of(test, rank, size, where, output):
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    status = 1
    try:
        import moeccl.distributed  # noqa: F401
        if test.init:
            store = dist.FileStore(where, size)
            dist.init_process_group("moeccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        test.body(rank, size, where)
        if VERSION < (2, 14):
            time.sleep(0.05)  # up to 2.7 at least, a gloo group that ends may wait for ever for a thread that waits for Python
        if test.init and dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(test, size):
    """Returns whether all ranks ended as the test expects; shows the output of the others."""
    fork = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as where:
        outputs = [tempfile.TemporaryFile() for _ in range(size)]
        ranks = [fork.Process(target=rank_of, args=(test, r, size, os.path.join(where, "store"), outputs[r])) for r in range(size)]
        for process in ranks:
            process.start()
        until = time.monotonic() + SECONDS
        for process in ranks:
            process.join(max(0.1, until - time.monotonic()))
        late = [r for r, process in enumerate(ranks) if process.is_alive()]
        for r in late:
            ranks[r].kill()
            ranks[r].join()
        wrong = [r for r, process in enumerate(ranks) if process.exitcode != test.status.get(r, 0)]
        for r in wrong:
            outputs[r].seek(0)
            print(f"--- {test.name}, rank {r} of {size}: " + (f"still ran after {SECONDS} s" if r in late else f"status {ranks[r].exitcode}"))
            print(outputs[r].read().decode(errors="replace"))
        return not wrong


def main():
    chosen = [a for a in sys.argv[1:] if not a.isdigit()]
    sizes = [int(a) for a in sys.argv[1:] if a.isdigit()]
    known = {m.__name__ for m in (barriers, collectives, groups, limits, messages, streams, training, works)}
    failed = count = skipped = 0
    for test in TESTS:
        if chosen and not any(c in (test.name, test.module) for c in chosen):
            continue
        if test.skipped:
            print(f"skip {test.module}.{test.name}: {test.skipped}", flush=True)
            skipped += 1
        for size in () if test.skipped else test.sizes:
            if sizes and size not in sizes:
                continue
            began = time.monotonic()
            good = run(test, size)
            count += 1
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {test.module}.{test.name}, {size} ranks, {time.monotonic() - began:.1f} s", flush=True)
    if count == skipped == 0:
        print(f"no test has one of these names: {chosen}; modules are {sorted(known)}")
        return 1
    print(f"{count - failed} of {count} passed" + (f", {skipped} tests skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
