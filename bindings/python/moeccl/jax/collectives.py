# SPDX-License-Identifier: Apache-2.0
"""Collectives of arrays. n is the communicator's size, `comm` a moeccl.Comm.

They run inside and outside of jax.jit, in control flow and under vmap, where all ranks map axes of the same size. Gradients are those of the
sum of all ranks' losses: the cotangent of a value that all ranks got is the sum of their cotangents. So a loss that every rank
computes alike counts n times; divide by n, or let one rank have it. Arguments that do not fit raise TypeError or ValueError before anything
is sent; a failure of the call is XLA's error with MoECCL's error text."""
from typing import Any, Optional, Tuple

import jax
import jax.numpy as jnp

import moeccl
from moeccl import AVG, MAX, MIN, PROD, SUM
from moeccl._errors import number

from ._native import number_of
from ._primitives import batched_by_axis, linear, primitive, shape_of

_OPS = {SUM: "SUM", PROD: "PROD", MAX: "MAX", MIN: "MIN", AVG: "AVG"}
_WIDE = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_MOVED = (*_WIDE, "bool", "int16", "uint16", "complex64", "complex128")


def _checked(function: str, x: Any, comm: moeccl.Comm, op: Optional[int] = None) -> Tuple[Any, int]:
    """Returns x as an array that the collective takes, and the communicator's number, or raises TypeError or ValueError."""
    member, x = number_of(comm), jnp.asarray(x)
    name = x.dtype.name
    if name not in _MOVED:
        raise TypeError(f"{function}: x holds {name}: give one of {', '.join(_MOVED)}")
    if op is None:
        return x, member
    if op not in _OPS:
        raise ValueError(f"{function}: op is {op!r}: give moeccl.SUM, PROD, MAX, MIN or AVG")
    if name == "bool" and op not in (MAX, MIN):
        raise TypeError(f"{function}: truth values have no {_OPS[op]}: give MAX (any) or MIN (all), or x.astype(jnp.int32)")
    if name.startswith("complex") and op not in (SUM, AVG):
        raise TypeError(f"{function}: complex numbers have no {_OPS[op]} here: give SUM or AVG")
    if name in ("int16", "uint16"):
        raise TypeError(f"{function}: x holds {name}, which is only moved: give x.astype(jnp.int32)")
    return x, member


def _root(function: str, root: int, comm: moeccl.Comm) -> int:
    if not 0 <= number("root", root) < comm.size:
        raise ValueError(f"{function}: root is {root}: give a rank from 0 to {comm.size - 1}")
    return int(root)


def _no_derivative(function: str) -> Any:
    def refusal(op: int, **_: Any) -> Optional[str]:
        if op in (SUM, AVG):
            return None
        return f"{function} with {_OPS[op]} has no derivative: give jax.lax.stop_gradient(x), or use SUM or AVG"
    return refusal


_all_reduce = primitive("all_reduce", "AllReduce", lambda x, **_: [shape_of(x)])
_reduce = primitive("reduce", "Reduce", lambda x, **_: [shape_of(x)])
_broadcast = primitive("broadcast", "Broadcast", lambda x, **_: [shape_of(x)])
_all_gather = primitive("all_gather", "AllGather", lambda x, n, **_: [shape_of(x, shape=(n, *x.shape))])
_reduce_scatter = primitive("reduce_scatter", "ReduceScatter", lambda x, **_: [shape_of(x, shape=x.shape[1:])])
_all_to_all = primitive("all_to_all", "AllToAll", lambda x, **_: [shape_of(x)])

for _made in (_all_reduce, _reduce, _broadcast):
    batched_by_axis(_made, 0, 0)
batched_by_axis(_all_gather, 0, 1)
batched_by_axis(_reduce_scatter, 1, 0)
batched_by_axis(_all_to_all, 1, 1)


def _only_at_root(value: Any, root: int, rank: int) -> Any:
    """Zeros on the other ranks, where the library leaves the memory as it is. All ranks have the same program but for a constant, so that
    their derivatives make the same calls."""
    return jnp.where(jnp.asarray(rank == root), value, jnp.zeros_like(value))


linear(_all_reduce, lambda c, **p: _all_reduce.bind(c[0], **p), _no_derivative("all_reduce"))
linear(_all_to_all, lambda c, **p: _all_to_all.bind(c[0], **p))
linear(_reduce, lambda c, comm, op, root, **p: [v / p["n"] if op == AVG else v for v in _broadcast.bind(c[0], comm=comm, root=root, **p)],
       _no_derivative("reduce"))
linear(_broadcast, lambda c, comm, root, rank, n: [
    _only_at_root(_reduce.bind(c[0], comm=comm, op=SUM, root=root, rank=rank, n=n)[0], root, rank)])
linear(_all_gather, lambda c, comm, n: _reduce_scatter.bind(c[0], comm=comm, op=SUM, n=n))
linear(_reduce_scatter, lambda c, comm, op, n: [v / n if op == AVG else v for v in _all_gather.bind(c[0], comm=comm, n=n)],
       _no_derivative("reduce_scatter"))


def all_reduce(x: Any, comm: moeccl.Comm, op: int = SUM) -> jax.Array:
    """Returns the reduction of x over ranks, on every rank, in x's shape and type.

    op: moeccl.SUM, PROD, MAX, MIN or AVG; SUM and AVG have gradients. All ranks give the same shape, type and op."""
    x, member = _checked("all_reduce", x, comm, op)
    return _all_reduce.bind(x, comm=member, op=int(op))[0]


def reduce(x: Any, comm: moeccl.Comm, root: int = 0, op: int = SUM) -> jax.Array:
    """Returns the reduction of x over ranks on the root, and zeros on the others."""
    x, member = _checked("reduce", x, comm, op)
    root = _root("reduce", root, comm)
    out = _reduce.bind(x, comm=member, op=int(op), root=root, rank=comm.rank, n=comm.size)[0]
    return _only_at_root(out, root, comm.rank)


def broadcast(x: Any, comm: moeccl.Comm, root: int = 0) -> jax.Array:
    """Returns the root's x. The others give an array of the same shape and type."""
    x, member = _checked("broadcast", x, comm)
    return _broadcast.bind(x, comm=member, root=_root("broadcast", root, comm), rank=comm.rank, n=comm.size)[0]


def all_gather(x: Any, comm: moeccl.Comm) -> jax.Array:
    """Returns [n, *x.shape]: block r is rank r's x."""
    x, member = _checked("all_gather", x, comm)
    return _all_gather.bind(x, comm=member, n=comm.size)[0]


def _blocks(function: str, x: Any, comm: moeccl.Comm, op: Optional[int] = None) -> Tuple[Any, int]:
    x, member = _checked(function, x, comm, op)
    if x.ndim == 0 or x.shape[0] != comm.size:
        raise ValueError(f"{function}: x has shape {x.shape}: give [{comm.size}, ...], a block for each rank")
    return x, member


def reduce_scatter(x: Any, comm: moeccl.Comm, op: int = SUM) -> jax.Array:
    """Returns the reduction over ranks of block `comm.rank` of their x[n, ...]. op: as in all_reduce."""
    x, member = _blocks("reduce_scatter", x, comm, op)
    return _reduce_scatter.bind(x, comm=member, op=int(op), n=comm.size)[0]


def all_to_all(x: Any, comm: moeccl.Comm) -> jax.Array:
    """Returns [n, ...]: block r is block `comm.rank` of rank r's x[n, ...]."""
    x, member = _blocks("all_to_all", x, comm)
    return _all_to_all.bind(x, comm=member)[0]
