# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine inside jax.jit against a dense layer: results, gradients, capacity, routings that wait, and errors.

    LIBMOECCL=build/libmoeccl.so PYTHONPATH=build/bindings/python python3 tests/jax/experts_test.py"""
import unittest

import with_jax  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import ranks

import moeccl.jax as mj

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 3, 5, 2, 6, 7
OWNERS = [0, 1, 0, 1, 1]  # rank 2 has none


def near(got, wanted, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance)


class Problem:
    """A rank's tokens and choices, which differ in number, and the weights of all experts."""

    def __init__(self, rank, dtype=jnp.float32, seed=0):
        keys = jax.random.split(jax.random.PRNGKey(10 * seed + rank), 3)
        n = (TOKENS, 0, TOKENS - 2)[rank]
        self.x = jax.random.normal(keys[0], (n, HIDDEN)).astype(dtype)
        scores = jax.random.normal(keys[1], (n, EXPERTS))
        self.index = jnp.argsort(scores, axis=1)[:, :TOP_K].astype(jnp.int32)
        self.index = self.index.at[:2, 1].set(-1)  # tokens with one expert
        self.index = self.index.at[3:4].set(-1)  # and without
        self.weight = jax.random.uniform(keys[2], (n, TOP_K))
        self.experts = jax.random.normal(jax.random.PRNGKey(99), (EXPERTS, HIDDEN, HIDDEN)).astype(dtype)


def dense(x, weight, experts, index, kept=None):
    """The same layer in one process: every expert computes every token. kept[T, k]: choices that capacity keeps."""
    out = jnp.tanh(jnp.einsum("th,ehj->tej", x, experts))
    chosen = jnp.where(index >= 0, weight, 0) * (1 if kept is None else kept)
    return (jnp.take_along_axis(out, jnp.maximum(index, 0)[..., None], 1) * chosen[..., None].astype(x.dtype)).sum(1)


def make(comm, **options):
    return mj.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, expert_rank=OWNERS, **options)


def layer(ep, x, weight, experts, index):
    """Experts as a batched product of their own rows."""
    rows, counts, routing = ep.dispatch(x, index, weight)
    return ep.combine(computed(ep, rows, counts, experts[jnp.asarray(ep.local_experts, int)]), routing)


def computed(ep, rows, counts, mine):
    return ep.by_rows(jnp.tanh(jnp.einsum("erh,ehj->erj", ep.by_expert(rows, counts), mine)), counts)


def whole_gradients(comm, loss_of, p, argnums):
    """Gradients of the sum of all ranks' losses of the dense layer. Those of the experts are summed over ranks."""
    got = list(jax.grad(lambda x, w, e: loss_of(dense(x, w, e, p.index)), argnums)(p.x, p.weight, p.experts))
    got[2] = mj.all_reduce(got[2], comm)
    return got


def equals_dense(comm):
    p, ep = Problem(comm.rank), make(comm)
    assert ep.local_experts == [e for e, r in enumerate(OWNERS) if r == comm.rank]

    def loss_of(y):
        return (y ** 2 + jnp.sin(y)).sum()

    for wrap in (jax.jit, lambda f: f):
        near(wrap(lambda x, w, e: layer(ep, x, w, e, p.index))(p.x, p.weight, p.experts), dense(p.x, p.weight, p.experts, p.index))
        mine = wrap(jax.grad(lambda x, w, e: loss_of(layer(ep, x, w, e, p.index)), (0, 1, 2)))(p.x, p.weight, p.experts)
        wanted = whole_gradients(comm, loss_of, p, (0, 1, 2))
        near(mine[0], wanted[0])
        near(mine[1], wanted[1])
        for e in range(EXPERTS):  # an expert's gradient is at its owner
            near(mine[2][e], wanted[2][e] if OWNERS[e] == comm.rank else 0 * wanted[2][e])
    tangents = (jnp.cos(p.x), p.weight ** 2, jnp.sin(p.experts))
    near(jax.jit(lambda *a: jax.jvp(lambda x, w, e: layer(ep, x, w, e, p.index), a, tangents)[1])(p.x, p.weight, p.experts),
         jax.jvp(lambda x, w, e: dense(x, w, e, p.index), (p.x, p.weight, p.experts), tangents)[1])
    for held in (0, 1):  # derivatives of one of both
        def one(v, held=held):
            return layer(ep, *((v, p.weight) if held == 0 else (p.x, v)), p.experts, p.index)

        def model(v, held=held):
            return dense(*((v, p.weight) if held == 0 else (p.x, v)), p.experts, p.index)
        v = (p.x, p.weight)[held]
        near(jax.jit(jax.grad(lambda v: loss_of(one(v))))(v), jax.grad(lambda v: loss_of(model(v)))(v))
    ones = ep.combine(ep.dispatch(p.x, p.index)[0], ep.route(p.index))
    near(ones, p.x * (p.index >= 0).sum(1, keepdims=True))


def rows_and_counts(comm):
    ep, p = make(comm, align_rows=4), Problem(comm.rank)
    rows, counts, routing = jax.jit(ep.dispatch)(p.x, p.index, p.weight)
    assert rows.shape == (ep.room, HIDDEN) and not (np.asarray(counts) % 4).any()
    everything = [Problem(r) for r in range(RANKS)]
    begin = 0
    for e, n, tokens in zip(ep.local_experts, np.asarray(counts), np.asarray(routing.tokens_per_expert)):
        sent = [q.x[t] for q in everything for t in range(len(q.x)) if e in np.asarray(q.index[t])]
        assert len(sent) == tokens <= n
        near(rows[begin:begin + tokens], np.stack(sent) if sent else np.zeros((0, HIDDEN)), 0)
        assert not np.asarray(rows[begin + tokens:begin + n]).any()  # padding
        begin += n
    assert not np.asarray(rows[begin:]).any()
    near(ep.by_rows(ep.by_expert(rows, counts), counts), rows, 0)
    mine = p.experts[jnp.asarray(ep.local_experts, int)]
    near(jax.lax.ragged_dot(rows, mine, counts), ep.by_rows(jnp.einsum("erh,ehj->erj", ep.by_expert(rows, counts), mine), counts))


def some_ranks_have_nothing(comm):
    """Rank 1 has no tokens, rank 2 no experts. Both make the backward calls that the others make."""
    p, ep = Problem(comm.rank), make(comm)

    # Only the experts' weights have gradients, so rank 2's calls depend on its empty ones.
    def loss(mine):
        rows, counts, routing = ep.dispatch(p.x, p.index, p.weight)
        return (ep.combine(computed(ep, rows, counts, mine), routing) ** 2).sum()

    got = jax.jit(jax.grad(loss))(p.experts[jnp.asarray(ep.local_experts, int)])
    wanted = whole_gradients(comm, lambda y: (y ** 2).sum(), p, (0, 1, 2))[2]
    near(got, wanted[jnp.asarray(ep.local_experts, int)])

    # Tokens come from a table by an index, which must not be empty: rank 1 pads.
    table, ids = jnp.cos(jnp.arange(4 * HIDDEN).reshape(4, HIDDEN)), jnp.arange(TOKENS) % 4
    index, weight = jnp.full((TOKENS, TOP_K), -1), jnp.ones((TOKENS, TOP_K))
    index, weight = index.at[:len(p.index)].set(p.index), weight.at[:len(p.index)].set(p.weight)
    near(jax.jit(jax.grad(lambda t: layer(ep, t[ids], weight, p.experts, index).sum()))(table),
         jax.grad(lambda t: dense(t[ids], weight, p.experts, index).sum())(table))


def capacity(comm):
    ep, p = make(comm, capacity=2), Problem(comm.rank)
    kept, sent = np.ones(p.index.shape), np.zeros(EXPERTS, int)
    for t, k in np.ndindex(*p.index.shape):
        e = int(p.index[t, k])
        if e >= 0:
            kept[t, k], sent[e] = sent[e] < 2, sent[e] + 1
    near(layer(ep, p.x, p.weight, p.experts, p.index), dense(p.x, p.weight, p.experts, p.index, kept))
    assert int(ep.route(p.index).n_dropped) == (kept == 0).sum()
    assert ep.room == 2 * RANKS * len(ep.local_experts)


def routings_wait(comm):
    """More steps under way than tables stay in memory: layers in a scan, a routing that leaves its program, a backward pass that runs
    twice, and one whose forward pass is repeated."""
    ep, p = make(comm, routings=1), Problem(comm.rank)
    depth = 3
    index = jnp.stack([jnp.where(p.index >= 0, (p.index + i) % EXPERTS, -1) for i in range(depth)])
    weight = jnp.stack([p.weight * (1 + i) for i in range(depth)])

    def stack(of):
        def run(x, weight, experts):
            return jax.lax.scan(lambda x, iw: (x + of(x, iw[1], experts, iw[0]), None), x, (index, weight))[0]
        return run

    def mine(x, w, e, i):
        return layer(ep, x, w, e, i)

    near(jax.jit(stack(mine))(p.x, weight, p.experts), stack(dense)(p.x, weight, p.experts))
    wanted = jax.grad(lambda x, w: (stack(dense)(x, w, p.experts) ** 2).sum(), (0, 1))(p.x, weight)
    for inner in (mine, jax.checkpoint(mine)):
        got = jax.jit(jax.grad(lambda x, w, inner=inner: (stack(inner)(x, w, p.experts) ** 2).sum(), (0, 1)))(p.x, weight)
        near(got[0], wanted[0], 1e-4)
        near(got[1], wanted[1], 1e-4)
    routings = [jax.jit(ep.route)(index[i], weight[i]) for i in range(depth)]
    for i in (2, 0, 1, 0):
        near(jax.jit(lambda r: ep.combine(ep.send(p.x, r), r))(routings[i]), p.x * jnp.where(index[i] >= 0, weight[i], 0).sum(1, keepdims=True))
    y, back = jax.vjp(lambda x: mine(x, weight[0], p.experts, index[0]), p.x)
    layer(ep, p.x, weight[1], p.experts, index[1])
    wanted = jax.vjp(lambda x: dense(x, weight[0], p.experts, index[0]), p.x)[1](y)[0]
    near(back(y)[0], wanted)
    near(back(2 * y)[0], 2 * wanted)


def mapped(comm):
    ep, p = make(comm), Problem(comm.rank)
    xs, ws = jnp.stack([p.x, 2 * p.x]), jnp.stack([p.weight, p.weight / 3])
    near(jax.jit(jax.vmap(lambda x, w: layer(ep, x, w, p.experts, p.index)))(xs, ws),
         jax.vmap(lambda x, w: dense(x, w, p.experts, p.index))(xs, ws))
    near(jax.vmap(jax.grad(lambda x, w: (layer(ep, x, w, p.experts, p.index) ** 2).sum(), 1))(xs, ws),
         jax.vmap(jax.grad(lambda x, w: (dense(x, w, p.experts, p.index) ** 2).sum(), 1))(xs, ws))


def types(comm):
    for dtype, tolerance in ((jnp.bfloat16, 0.1), (jnp.float16, 0.01)):
        p, ep = Problem(comm.rank, dtype), make(comm, dtype=dtype)
        y = jax.jit(lambda x: layer(ep, x, p.weight, p.experts, p.index))(p.x)
        assert y.dtype == dtype
        near(y, dense(*(v.astype(jnp.float32) for v in (p.x, p.weight, p.experts)), p.index), tolerance)
    with jax.enable_x64(True):
        p, ep = Problem(comm.rank, jnp.float64), make(comm, dtype=jnp.float64)
        near(layer(ep, p.x, p.weight.astype(jnp.float32), p.experts, p.index.astype(jnp.int64)),
             dense(p.x, p.weight.astype(jnp.float32), p.experts, p.index), 1e-12)


def refusals(comm):
    ep, p = make(comm), Problem(0)
    routing = ep.route(p.index, p.weight)
    wide = jnp.zeros((TOKENS, HIDDEN + 1))
    for kind, text, call in [
            (ValueError, r"x has shape \(7, 7\): give \[7, 6\]", lambda: ep.dispatch(wide, p.index)),
            (TypeError, "x holds bfloat16, and the layer's rows are float32", lambda: ep.send(p.x.astype(jnp.bfloat16), routing)),
            (ValueError, r"topk_idx has shape \(7, 1\): give \[tokens, 2\]", lambda: ep.route(p.index[:, :1])),
            (TypeError, "topk_idx holds float32: give whole numbers", lambda: ep.route(p.weight)),
            (ValueError, "topk_idx has 14 tokens: max_tokens is 7", lambda: ep.route(jnp.concatenate([p.index] * 2))),
            (ValueError, r"topk_weights has shape \(2, 7\)", lambda: ep.route(p.index, p.weight.T)),
            (TypeError, "dtype is int32: give one of float32", lambda: make(comm, dtype=jnp.int32)),
            (ValueError, "routings is 0: give a number from 1", lambda: make(comm, routings=0)),
            *[(NotImplementedError, "moeccl_combine_backward has no derivative of this order", lambda loss_of=loss_of: jax.grad(lambda w: jax.grad(
                lambda x: loss_of(layer(ep, x, w, p.experts, p.index)))(p.x).sum())(p.weight))
              for loss_of in (jnp.sum, lambda y: (y ** 2).sum())]]:
        with unittest.TestCase().assertRaisesRegex(kind, text):
            call()
    lowered = jax.jit(lambda x: ep.combine(ep.send(x, routing), routing)).trace(p.x)
    with unittest.TestCase().assertRaisesRegex(NotImplementedError, "moeccl.jax has no dispatch on cuda: run it on the CPU"):
        lowered.lower(lowering_platforms=("cuda",))
    program = jax.jit(lambda i: ep.route(i).n_dropped)
    # Every rank learns of one rank's bad choice.
    with unittest.TestCase().assertRaisesRegex(
            Exception, "moeccl.route: moecclInvalidArgument: " if comm.rank == 1 else "moeccl.route: moecclRemoteError: rank 1 could not"):
        jax.block_until_ready(program(p.index.at[0, 0].set(EXPERTS if comm.rank == 1 else 0)))
    ep.close()
    with unittest.TestCase().assertRaisesRegex(Exception, "layer [0-9]+ of this program is closed"):
        jax.block_until_ready(program(p.index))


class Experts(unittest.TestCase):
    def test_results_and_gradients_equal_a_dense_layers(self):
        ranks.in_processes(RANKS, equals_dense)

    def test_rows_are_grouped_aligned_and_zero_behind(self):
        ranks.in_processes(RANKS, rows_and_counts)

    def test_ranks_without_tokens_or_experts_make_the_same_calls(self):
        ranks.in_processes(RANKS, some_ranks_have_nothing)

    def test_capacity_drops_and_bounds_the_rows(self):
        ranks.in_processes(RANKS, capacity)

    def test_routings_may_wait_for_any_time(self):
        ranks.in_processes(RANKS, routings_wait)

    def test_vmap_calls_in_turn(self):
        ranks.in_processes(RANKS, mapped)

    def test_types(self):
        ranks.in_processes(RANKS, types)

    def test_errors_say_what_to_do(self):
        ranks.in_processes(RANKS, refusals)


if __name__ == "__main__":
    unittest.main()
