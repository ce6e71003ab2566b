# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests: threads of this process, or separate processes."""
import multiprocessing
import threading

import moeccl


def in_threads(n, work, **options):
    """Runs work(comm) on n thread ranks; raises the first failure."""
    comms, failures = moeccl.init_all(n, **options), []

    def run(comm):
        try:
            work(comm)
        except BaseException as failure:  # the others must not wait for this rank
            failures.append(failure)
            comm.abort()

    threads = [threading.Thread(target=run, args=(c,)) for c in comms]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for c in comms:
        try:
            c.close()
        except moeccl.Error:
            pass
    if failures:
        raise failures[0]


def _process(work, n, rank, ids, options, results):
    try:
        with moeccl.Comm(n, ids, rank, timeout_ms=20000, **options) as comm:
            results.put((rank, work(comm), None))
    except BaseException as failure:
        results.put((rank, None, f"rank {rank}: {failure!r}"))


def in_processes(n, work, **options):
    """Returns [work(comm) of each rank], run on n processes; work is a function of a module."""
    context = multiprocessing.get_context("spawn")
    results, ids = context.Queue(), bytes(moeccl.unique_id())
    ranks = [context.Process(target=_process, args=(work, n, r, ids, options, results)) for r in range(n)]
    for p in ranks:
        p.start()
    got = sorted((results.get(timeout=60) for _ in ranks), key=lambda one: one[0])
    for p in ranks:
        p.join()
    for _, _, failure in got:
        if failure is not None:
            raise AssertionError(failure)
    return [value for _, value, _ in got]
