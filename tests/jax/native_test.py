# SPDX-License-Identifier: Apache-2.0
"""Communicators and programs that end: closing while programs run, going on after a failure, and making programs anew. Also the numbers of
communicators, and which library of handlers is loaded.

    LIBMOECCL=build/libmoeccl.so PYTHONPATH=build/bindings/python python3 tests/jax/native_test.py"""
import os
import subprocess
import sys
import tempfile
import threading
import unittest

import with_jax  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import ranks

import moeccl
import moeccl.jax as mj
from moeccl.jax import _native

RANKS = 2


def same(got, wanted):
    np.testing.assert_array_equal(np.asarray(got), wanted)


def raises(text):
    return unittest.TestCase().assertRaisesRegex(Exception, text)


def after_work(v, steps=20):
    """Returns v after a computation so large that JAX runs the program beside Python."""
    return v + 0 * jax.lax.fori_loop(0, steps, lambda i, m: jnp.tanh(m @ m), jnp.full((200, 200), 0.1) + v[0])[0, 0]


def goes_on(comm):
    """A program's error goes to its results, and not to what the thread does later."""
    other = comm.split(0)
    mj.all_reduce(jnp.ones(1), other)  # so that it has a number

    def fail():
        failed = jax.jit(lambda v: mj.all_reduce(after_work(v), comm))(jnp.ones(2 + comm.rank))  # raises nothing yet
        with raises("moeccl.all_reduce: moecclMismatch"):
            jax.block_until_ready(failed)

    fail()
    new = comm.shrink()
    same(jax.jit(lambda v: mj.all_reduce(v, new))(jnp.ones(3)), RANKS)
    fail()
    ep = mj.ExpertParallel(other, 2, 1, 4, 8)
    same(ep.combine(*ep.dispatch(jnp.ones((3, 4)), jnp.zeros((3, 1), int))[::2]), 1)
    fail()
    ep.close()
    same(mj.all_reduce(jnp.ones(3), other), RANKS)
    fail()
    comm.close()
    same(mj.all_reduce(jnp.ones(3), other), RANKS)
    new.close()
    other.close()


def closes(comm):
    """Rank 0 closes while its program waits for rank 1's."""
    for _ in range(3):
        other = comm.split(0)
        program = jax.jit(lambda v, other=other: mj.all_reduce(after_work(v, 500 if comm.rank == 1 else 5), other))
        y = program(jnp.ones(100000))
        other.close()
        same(y, RANKS)
        with raises("communicator [0-9]+ of this program is closed"):
            jax.block_until_ready(program(jnp.ones(100000)))
        _native.settle()  # or JAX would raise the error again when the process ends


def made_anew(comm):
    used = comm.split(0)

    def step(v):
        return mj.all_reduce(v, used)

    x = jnp.ones(3)
    same(jax.jit(step)(x), RANKS)
    used.close()
    used = comm.split(0)
    with raises(r"is closed: make the program anew with an open communicator, from a new function or after jax.clear_caches\(\)"):
        jax.block_until_ready(jax.jit(step)(x))
    same(jax.jit(lambda v: step(v))(x), RANKS)
    jax.clear_caches()
    same(jax.jit(step)(x), RANKS)


def numbers(comm):
    sys.setswitchinterval(1e-6)
    for _ in range(20):
        other, start, got = comm.split(0), threading.Barrier(8), []

        def ask(other=other, start=start, got=got):
            start.wait()
            got.append(_native.number_of(other))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(got) == 8 and len(set(got)) == 1, got
        other.close()


class Native(unittest.TestCase):
    def test_a_thread_goes_on_after_a_program_that_failed(self):
        ranks.in_processes(RANKS, goes_on)

    def test_closing_waits_for_the_programs(self):
        ranks.in_processes(RANKS, closes)

    def test_a_program_is_made_anew_from_a_new_function_or_without_caches(self):
        ranks.in_processes(RANKS, made_anew)

    def test_threads_get_one_number_for_a_communicator(self):
        ranks.in_processes(1, numbers)

    def test_the_handlers_come_from_beside_the_named_library(self):
        ours, handlers = os.path.abspath(moeccl._library.lib._name), os.path.abspath(_native.lib._name)
        for folder in ("", "moeccl", "bindings/jax"):
            with tempfile.TemporaryDirectory() as root:
                os.makedirs(os.path.join(root, folder), exist_ok=True)
                named, wanted = os.path.join(root, "libmoeccl.so"), os.path.join(root, folder, _native.NAME)
                os.symlink(ours, named)
                os.symlink(handlers, wanted)
                run = subprocess.run([sys.executable, "-c", "from moeccl.jax import _native; print(_native.lib._name)"],
                                     env={**os.environ, "LIBMOECCL": named}, capture_output=True, text=True)
                self.assertEqual(run.stdout.strip(), wanted, run.stderr)


if __name__ == "__main__":
    unittest.main()
