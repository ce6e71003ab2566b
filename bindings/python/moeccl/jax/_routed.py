# SPDX-License-Identifier: Apache-2.0
"""The primitives of dispatch and combine, and their derivatives.

To JAX a routing is a function of topk_idx and topk_weights. Each call on it takes these arrays and the routing's number, by which the
library finds the tables; where it has them no more, it makes them again (bindings/jax/routings.h). So a routing may be carried through
scan, saved for a backward pass or dropped, and nobody frees it. `layer`, `room` and `n_local` are the parameters of all of them."""
from typing import Any, Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from ._primitives import batched_in_turn, linear, primitive, shape_of


def _counts(index: Any, weights: Any, n_local: int, **_: Any) -> Sequence[Any]:
    return [jax.ShapeDtypeStruct((2,), jnp.uint32), *[jax.ShapeDtypeStruct((n_local,), jnp.int32)] * 2, jax.ShapeDtypeStruct((), jnp.int32)]


def _rows(x: Any, *_: Any, room: int, **__: Any) -> Sequence[Any]:
    return [shape_of(x, shape=(room, x.shape[1]))]


def _tokens(rows: Any, index: Any, *_: Any, **__: Any) -> Sequence[Any]:
    return [shape_of(rows, shape=(index.shape[0], rows.shape[1]))]


def _gradients(grad_y: Any, rows: Any, index: Any, weights: Any, *_: Any, **__: Any) -> Sequence[Any]:
    return [shape_of(rows), shape_of(weights)]


_CPU = ("cpu",)
route = primitive("route", "Route", _counts, _CPU)  # topk_idx, topk_weights
dispatch = primitive("dispatch", "Dispatch", _rows, _CPU)  # x, topk_idx, topk_weights, number, as for the next three
combine = primitive("combine", "Combine", _tokens, _CPU)
_dispatch_backward = primitive("dispatch_backward", "DispatchBackward", _tokens, _CPU)
_combine_backward = primitive("combine_backward", "CombineBackward", _rows, _CPU)
# grad_y, rows, topk_idx, topk_weights, number -> gradients of rows and of topk_weights
_combine_backward_weights = primitive("combine_backward_weights", "CombineBackwardWeights", _gradients, _CPU)
# Tangents of rows and of topk_weights, then combine's own arguments.
_combine_tangent = primitive("combine_tangent", "", lambda t, _, *arguments, **params: _tokens(*arguments, **params), _CPU)

linear(dispatch, lambda c, *choices, **p: _dispatch_backward.bind(c[0], *choices, **p), fixed=3)
linear(_dispatch_backward, lambda c, *choices, **p: dispatch.bind(c[0], *choices, **p), fixed=3)
linear(_combine_backward, lambda c, *choices, **p: combine.bind(c[0], *choices, **p), fixed=3)
linear(combine, lambda c, *choices, **p: _combine_backward.bind(c[0], *choices, **p), fixed=3)
linear(_combine_tangent, lambda c, *arguments, **p: _combine_backward_weights.bind(c[0], *arguments, **p), fixed=4)
_combine_of_rows = ad.primitive_jvps[combine]


def _combine_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    rows, _, weights, _ = tangents
    if type(weights) is ad.Zero:
        return _combine_of_rows(primals, tangents, **params)
    # One linear call for both tangents, so that one backward call computes both gradients.
    return combine.bind(*primals, **params), _combine_tangent.bind(ad.instantiate_zeros(rows), weights, *primals, **params)


def _combine_tangent_parts(rows_dot: Any, weights_dot: Any, rows: Any, index: Any, weights: Any, number: Any, **params: Any) -> Sequence[Any]:
    of_rows = combine.bind(rows_dot, index, weights, number, **params)[0]
    other = route.bind(index, weights_dot, **params)[0]
    return [of_rows + combine.bind(rows, index, weights_dot, other, **params)[0]]


ad.primitive_jvps[combine] = _combine_jvp
mlir.register_lowering(_combine_tangent, mlir.lower_fun(_combine_tangent_parts, multiple_results=True), platform="cpu")

for _made in (route, dispatch, combine, _dispatch_backward, _combine_backward, _combine_backward_weights, _combine_tangent):
    batched_in_turn(_made)
