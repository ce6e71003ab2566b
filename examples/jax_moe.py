#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a MoE layer in JAX, one process for each rank: the router is on every rank, an expert on one.

    python3 examples/jax_moe.py --ranks 4                # starts four processes on this host
    mpirun -n 4 python3 examples/jax_moe.py              # or torchrun, or srun
    python3 examples/jax_moe.py --ranks 4 --check        # rank 0 also trains the same layer alone, with all tokens, and compares losses

Tokens are random, and the layer learns what a second, fixed MoE layer makes of them. Each rank has other tokens; the loss is the mean over
all ranks' tokens. One training step is one compiled program: router, dispatch, experts, combine, gradients and update."""
import argparse
import os
import socket
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import moeccl  # noqa: E402
import moeccl.jax  # noqa: E402


def make_weights(options, seed):
    """Weights of a layer with all experts, the same on each rank."""
    keys = jax.random.split(jax.random.PRNGKey(seed), 3)
    shapes = {"router": (options.hidden, options.experts), "up": (options.experts, options.hidden, options.ffn),
              "down": (options.experts, options.ffn, options.hidden)}
    return {name: jax.random.normal(key, shape) * shape[-2] ** -0.5 for key, (name, shape) in zip(keys, shapes.items())}


def choose(router, x, top_k):
    """Returns weights[T, k] and experts[T, k] of each token."""
    weights, index = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
    return weights / weights.sum(1, keepdims=True), index


def dense_layer(weights, x, options):
    """The layer in one process: every expert computes every token."""
    chosen, index = choose(weights["router"], x, options.top_k)
    hidden = jax.nn.gelu(jnp.einsum("th,ehf->tef", x, weights["up"]))
    out = jnp.einsum("tef,efh->teh", hidden, weights["down"])
    return x + (jnp.take_along_axis(out, index[..., None], 1) * chosen[..., None]).sum(1)


def moe_layer(weights, x, options, ep):
    """The layer over all ranks; weights["up"] and ["down"] are those of this rank's experts."""
    chosen, index = choose(weights["router"], x, options.top_k)
    rows, counts, routing = ep.dispatch(x, index, chosen)
    grouped = ep.by_expert(rows, counts)  # [experts here, rows, hidden]
    out = jnp.einsum("erf,efh->erh", jax.nn.gelu(jnp.einsum("erh,ehf->erf", grouped, weights["up"])), weights["down"])
    return x + ep.combine(ep.by_rows(out, counts), routing)


def tokens_of(options, step, rank):
    return jax.random.normal(jax.random.PRNGKey(1000 * step + rank + 7), (options.tokens, options.hidden))


def train(options, comm):
    ep = moeccl.jax.ExpertParallel(comm, options.experts, options.top_k, options.hidden, options.tokens, algorithm=options.algorithm)
    mine = jnp.asarray(ep.local_experts, int)  # a rank may have none
    weights, teacher = make_weights(options, 1), make_weights(options, 2)
    weights = {"router": weights["router"], "up": weights["up"][mine], "down": weights["down"][mine]}

    @jax.jit
    def step(weights, x, target):
        def loss_of(weights):  # this rank's part of the mean over all ranks' tokens
            return ((moe_layer(weights, x, options, ep) - target) ** 2).mean() / comm.size
        loss, gradient = jax.value_and_grad(loss_of)(weights)
        # Combine and dispatch have brought an expert's gradient to its rank; the router's is a sum over ranks.
        gradient["router"] = moeccl.jax.all_reduce(gradient["router"], comm)
        return jax.tree.map(lambda w, g: w - options.rate * g, weights, gradient), moeccl.jax.all_reduce(loss, comm)

    losses, times = [], []
    target_of = jax.jit(lambda x: dense_layer(teacher, x, options))
    for n in range(options.steps):
        x = tokens_of(options, n, comm.rank)
        target = jax.block_until_ready(target_of(x))
        begin = time.perf_counter()
        weights, loss = step(weights, x, target)
        losses.append(float(loss))
        times.append(1000 * (time.perf_counter() - begin))
    ep.close()
    return losses, sorted(times)[len(times) // 2]


def train_dense(options, n_ranks):
    """The same training in one process."""
    weights, teacher = make_weights(options, 1), make_weights(options, 2)

    @jax.jit
    def step(weights, x):
        target = dense_layer(teacher, x, options)
        loss, gradient = jax.value_and_grad(lambda w: ((dense_layer(w, x, options) - target) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - options.rate * g, weights, gradient), loss

    losses = []
    for n in range(options.steps):
        weights, loss = step(weights, jnp.concatenate([tokens_of(options, n, rank) for rank in range(n_ranks)]))
        losses.append(float(loss))
    return losses


def start(n_ranks):
    """Runs this program n_ranks times, with torchrun's variables; returns the worst exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(r), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": str(r),
                                                               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
             for r in range(n_ranks)]
    return max(abs(rank.wait()) for rank in ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 50), ("tokens", 256), ("hidden", 64), ("ffn", 128), ("experts", 8), ("top-k", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=2.0, help="learning rate")
    parser.add_argument("--algorithm", default="auto", help="algorithm of dispatch and combine")
    parser.add_argument("--ranks", type=int, default=0, help="start so many processes on this host; 0: a launcher has started this one")
    parser.add_argument("--check", action="store_true", help="compare with the same training in one process")
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return start(options.ranks)
    with moeccl.Comm.from_env() as comm:
        losses, ms = train(options, comm)
        if comm.rank != 0:
            return 0
        print(f"{comm.size} ranks: loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} at the last; {ms:.1f} ms a step (median)")
        if not options.check:
            return 0
        apart = max(abs(a - b) / b for a, b in zip(losses, train_dense(options, comm.size)))
        print(f"losses differ by at most {apart:.1e} (relative) from those of one process with all experts")
        return 0 if apart < 1e-4 and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
