# SPDX-License-Identifier: Apache-2.0
"""Collectives inside jax.jit: results, gradients, control flow, vmap, order and errors. Each test has its own processes.

    LIBMOECCL=build/libmoeccl.so PYTHONPATH=build/bindings/python python3 tests/jax/collectives_test.py"""
import unittest

import with_jax  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import ranks

import moeccl
import moeccl.jax as mj

RANKS = 3


def all_x(dtype=np.float32):
    """The ranks' arrays, [n, 3, 4]."""
    return (np.arange(RANKS * 12).reshape(RANKS, 3, 4) % 7 + 1).astype(dtype)


def near(got, wanted, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance)


def results(comm):
    r, x = comm.rank, all_x()
    for wrap in (lambda f: f, jax.jit):
        near(wrap(lambda v: mj.all_reduce(v, comm))(x[r]), x.sum(0))
        near(wrap(lambda v: mj.all_reduce(v, comm, moeccl.MAX))(x[r]), x.max(0))
        near(wrap(lambda v: mj.all_reduce(v, comm, moeccl.AVG))(x[r]), x.mean(0))
        near(wrap(lambda v: mj.reduce(v, comm, 1))(x[r]), x.sum(0) if r == 1 else 0 * x[0])
        near(wrap(lambda v: mj.broadcast(v, comm, 2))(x[r]), x[2])
        near(wrap(lambda v: mj.all_gather(v, comm))(x[r]), x)
        near(wrap(lambda v: mj.reduce_scatter(v, comm))(x[r]), x.sum(0)[r])  # three ranks, three rows
        near(wrap(lambda v: mj.all_to_all(v, comm))(x[r]), x[:, r])


def types(comm):
    for name in ("int8", "uint8", "int32", "uint32", "float16", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"):
        mine = jnp.asarray(all_x()[comm.rank] % 3).astype(name)
        got = jax.jit(lambda v: mj.all_reduce(v, comm))(mine)
        assert got.dtype == mine.dtype
        near(got.astype(jnp.float32), (all_x() % 3).sum(0))
    for name in ("bool", "int16", "uint16"):
        mine = jnp.asarray(all_x()[comm.rank] % 2).astype(name)
        near(mj.all_gather(mine, comm).astype(jnp.float32), all_x() % 2)
    near(mj.all_reduce(jnp.asarray(comm.rank == 1), comm, moeccl.MAX), 1)
    assert mj.all_reduce(jnp.zeros((0, 4)), comm).shape == (0, 4)
    with jax.enable_x64(True):
        assert mj.all_reduce(jnp.asarray(2.0**40 + 1), comm) == RANKS * (2.0**40 + 1)


def gradients(comm):
    """Each collective's derivative against the matrix of the whole: y of all ranks is linear in x of all ranks."""
    r, n, x = comm.rank, comm.size, jnp.asarray(all_x()[comm.rank])
    cases = {
        "all_reduce": (lambda v: mj.all_reduce(v, comm), lambda xs, r: xs.sum(0)),
        "average": (lambda v: mj.all_reduce(v, comm, moeccl.AVG), lambda xs, r: xs.mean(0)),
        "reduce": (lambda v: mj.reduce(v, comm, 1), lambda xs, r: xs.sum(0) * (r == 1)),
        "broadcast": (lambda v: mj.broadcast(v, comm, 2), lambda xs, r: xs[2]),
        "all_gather": (lambda v: mj.all_gather(v, comm), lambda xs, r: xs),
        "reduce_scatter": (lambda v: mj.reduce_scatter(v, comm), lambda xs, r: xs.sum(0)[r]),
        "scatter_average": (lambda v: mj.reduce_scatter(v, comm, moeccl.AVG), lambda xs, r: xs.mean(0)[r]),
        "all_to_all": (lambda v: mj.all_to_all(v, comm), lambda xs, r: xs[:, r]),
    }
    for name, (mine, model) in cases.items():
        def loss(v, mine=mine):
            return (jnp.sin(mine(v)) * (1 + r)).sum()

        def whole(xs, model=model):  # the sum of all ranks' losses, in one process
            return sum((jnp.sin(model(xs, q)) * (1 + q)).sum() for q in range(n))

        xs = jnp.asarray(all_x())
        near(jax.jit(jax.grad(loss))(x), jax.grad(whole)(xs)[r], 2e-5)
        near(jax.grad(loss)(x), jax.grad(whole)(xs)[r], 2e-5)
        t = jnp.cos(xs)
        near(jax.jit(lambda v, d, mine=mine: jax.jvp(mine, (v,), (d,))[1])(x, t[r]), model(t, r), 2e-5)  # linear
        near(jax.jit(jax.grad(lambda v: jax.grad(loss)(v).sum()))(x),
             jax.grad(lambda v: jax.grad(whole)(v).sum())(xs)[r], 2e-5)


def control_flow(comm):
    r, x = comm.rank, all_x()

    def step(carry, _):
        y = mj.all_reduce(carry, comm, moeccl.AVG)
        return 0.5 * y + 0.25 * carry, y.sum()

    def model(xs):
        sums = []
        for _ in range(4):
            y = xs.mean(0)
            sums.append(y.sum())
            xs = 0.5 * y + 0.25 * xs
        return xs, jnp.stack(sums)

    last, sums = jax.jit(lambda v: jax.lax.scan(step, v, None, 4))(x[r])
    near(last, model(jnp.asarray(x))[0][r])
    near(sums, model(jnp.asarray(x))[1])

    def loss(v):
        return (jax.lax.scan(jax.checkpoint(step), v, None, 4)[0] ** 2).sum()
    near(jax.jit(jax.grad(loss))(x[r]), jax.grad(lambda xs: (model(xs)[0] ** 2).sum())(jnp.asarray(x))[r], 2e-5)

    def branch(flag, v):
        return jax.lax.cond(flag, lambda u: mj.all_reduce(u, comm), lambda u: mj.broadcast(u, comm, 0), v)
    for flag, wanted in ((True, x.sum(0)), (False, x[0])):
        near(jax.jit(branch)(flag, x[r]), wanted)
    near(jax.jit(lambda v: jax.lax.fori_loop(0, 3, lambda i, u: mj.all_reduce(u, comm), v))(x[r]), x.sum(0) * RANKS**2)


def mapped(comm):
    r, x = comm.rank, all_x()
    for axis in (0, 1):
        near(jax.jit(jax.vmap(lambda v: mj.all_reduce(v, comm), in_axes=axis, out_axes=axis))(x[r]), x.sum(0))
        near(jax.vmap(lambda v: mj.all_gather(v, comm), in_axes=axis, out_axes=1 + axis)(x[r]), x)
    near(jax.vmap(lambda v: mj.reduce_scatter(v, comm), in_axes=1)(x[r]), x.sum(0)[r])
    near(jax.vmap(lambda v: mj.all_to_all(v, comm), in_axes=1, out_axes=1)(x[r]), x[:, r])


def order(comm):
    """Independent calls of several kinds and sizes run in the order of the program, in one program and across programs that are not
    waited for. Any other order on a rank would be a mismatch."""
    @jax.jit
    def many(v):
        out = []
        for i in range(60):
            part = v[: 1 + 7 * i % 23] + i
            out.append(mj.all_reduce(part, comm).sum() if i % 3 else mj.broadcast(part, comm, i % comm.size).sum())
        return jnp.stack(out)

    v = jnp.arange(32.0)
    wanted = [(np.arange(1 + 7 * i % 23) + i).sum() * (RANKS if i % 3 else 1) for i in range(60)]
    other = jax.jit(lambda u: mj.all_gather(u, comm).sum())
    got = [(many(v), other(v[:5])) for _ in range(10)]
    for first, second in got:
        near(first, wanted)
        near(second, RANKS * 10)

    # One rank computes for long before the first call, another one before the second call. Without order, a rank's program begins with the
    # call whose argument is there, and the second program runs beside the first.
    def late(v, when):
        if comm.rank != when:
            return v
        return v + 0 * jax.lax.fori_loop(0, 200, lambda i, m: jnp.tanh(m @ m), jnp.full((200, 200), 0.1) + v[0])[0, 0]

    inside = jax.jit(lambda v: (mj.all_reduce(late(v, 0), comm), mj.broadcast(late(v[:3], 1), comm, 1)))
    first, second = jax.jit(lambda v: mj.all_reduce(late(v, 0), comm)), jax.jit(lambda v: mj.all_gather(late(v[:2], 1), comm))
    for _ in range(3):
        for one, other in (inside(v), (first(v), second(v))):
            near(one, RANKS * np.arange(32))
            near(other, np.arange(3) if other.ndim == 1 else [[0, 1]] * RANKS)


def refusals(comm):
    x = jnp.ones((2, 2))
    checks = [
        (ValueError, "root is 3: give a rank from 0 to 2", lambda: mj.broadcast(x, comm, 3)),
        (ValueError, r"x has shape \(2, 2\): give \[3, ...\]", lambda: mj.all_to_all(x, comm)),
        (ValueError, "op is 9: give moeccl.SUM", lambda: mj.all_reduce(x, comm, 9)),
        (TypeError, "truth values have no SUM", lambda: mj.all_reduce(x > 0, comm)),
        (TypeError, "complex numbers have no MAX", lambda: mj.all_reduce(x.astype(jnp.complex64), comm, moeccl.MAX)),
        (TypeError, "x holds int4", lambda: mj.all_gather(x.astype(jnp.int4), comm)),
        *[(TypeError, "comm is a int: give a moeccl.Comm", lambda call=call: call(x, 3))
          for call in (mj.all_reduce, mj.reduce, mj.broadcast, mj.all_gather, mj.reduce_scatter, mj.all_to_all)],
        (NotImplementedError, "all_reduce with MAX has no derivative", lambda: jax.grad(lambda v: mj.all_reduce(v, comm, moeccl.MAX).sum())(x)),
    ]
    for kind, text, call in checks:
        for wrapped in (call, jax.jit(call)):
            with unittest.TestCase().assertRaisesRegex(kind, text):
                wrapped()
    near(mj.all_reduce(x, comm), RANKS * x)  # nothing was sent, so the communicator still works
    program = jax.jit(lambda v: mj.all_reduce(v, comm))
    near(program(x), RANKS * x)
    with unittest.TestCase().assertRaisesRegex(Exception, r"moeccl.all_reduce: moecclMismatch: .*rank"):
        jax.block_until_ready(mj.all_reduce(jnp.ones(2 + comm.rank), comm))
    with unittest.TestCase().assertRaisesRegex(Exception, "moeccl.all_reduce: moecclMismatch"):  # the communicator's failure stays
        jax.block_until_ready(program(x))
    comm.close()
    with unittest.TestCase().assertRaisesRegex(Exception, "communicator 1 of this program is closed"):
        jax.block_until_ready(program(x))
    with unittest.TestCase().assertRaisesRegex(ValueError, "the communicator is closed"):
        mj.all_reduce(x, comm)


class Collectives(unittest.TestCase):
    def test_results_are_those_of_the_c_interface(self):
        ranks.in_processes(RANKS, results)

    def test_all_types(self):
        ranks.in_processes(RANKS, types)

    def test_gradients_are_those_of_the_sum_of_losses(self):
        ranks.in_processes(RANKS, gradients)

    def test_loops_branches_and_recomputation(self):
        ranks.in_processes(RANKS, control_flow)

    def test_vmap_makes_one_call(self):
        ranks.in_processes(RANKS, mapped)

    def test_calls_keep_the_programs_order(self):
        ranks.in_processes(RANKS, order)

    def test_errors_say_what_to_do(self):
        ranks.in_processes(RANKS, refusals)


if __name__ == "__main__":
    unittest.main()
