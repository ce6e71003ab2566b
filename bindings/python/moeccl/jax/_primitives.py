# SPDX-License-Identifier: Apache-2.0
"""JAX primitives that call a handler, in the order of the program.

Every rank must run the same collectives in the same order, and XLA may reorder what it does not know to be ordered. So all primitives have
one ordered effect: JAX passes a token from each call to the next, also through control flow, and from each program of a thread to the
next. JAX has no public name for effects, so this module uses private ones, as mpi4jax does (tests/jax runs on several versions)."""
import functools
from typing import Any, Callable, Optional, Sequence, Tuple

import jax
import numpy as np
from jax._src import dispatch, effects
from jax._src.core import abstract_token
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._native import target


class CollectiveEffect(effects.Effect):
    """The effect of all of MoECCL's calls."""

    def __repr__(self) -> str:
        return "MoECCL"


ORDER = CollectiveEffect()
for _kinds in (effects.lowerable_effects, effects.ordered_effects, effects.control_flow_allowed_effects,
               effects.custom_derivatives_allowed_effects, effects.remat_allowed_effects):
    _kinds.add_type(CollectiveEffect)


def _lower(name: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    """Makes XLA's custom call, with the token as its first operand and result."""
    with_token = ctx.replace(avals_in=[abstract_token, *ctx.avals_in], avals_out=[abstract_token, *ctx.avals_out])
    attributes = {k: np.int64(v) for k, v in params.items() if isinstance(v, int)}
    token, *results = jax.ffi.ffi_lowering(target(name), has_side_effect=True)(
        with_token, ctx.tokens_in.get(ORDER), *operands, **attributes)
    ctx.set_tokens_out(mlir.TokenSet({ORDER: token}))
    return results


def _refuse(name: str, ctx: Any, *_: Any, **__: Any) -> Sequence[Any]:
    raise NotImplementedError(f"moeccl.jax has no {name} on {ctx.module_context.platforms[0]}: run it on the CPU (JAX_PLATFORMS=cpu), or "
                              "use moeccl.torch, which has it on CUDA")


def primitive(name: str, handler: str, shapes: Callable[..., Sequence[Any]], platforms: Tuple[str, ...] = ("cpu", "cuda")) -> Primitive:
    """Makes a primitive with several results.

    handler: which of the library's. shapes(*avals, **params): the results' jax.ShapeDtypeStruct. Parameters that are integers are the
    handler's attributes; others, such as tuples, are only for `shapes`."""
    made = Primitive(f"moeccl_{name}")
    made.multiple_results = True
    made.def_impl(functools.partial(dispatch.apply_primitive, made))

    def abstract(*avals: Any, **params: Any) -> Any:
        return [jax.core.ShapedArray(s.shape, s.dtype) for s in shapes(*avals, **params)], {ORDER}

    made.def_effectful_abstract_eval(abstract)
    for platform in ("cpu", "cuda", "rocm"):
        rule = functools.partial(_lower, handler) if platform in platforms else functools.partial(_refuse, name)
        mlir.register_lowering(made, rule, platform=platform)
    return made


def linear(made: Primitive, transpose: Callable[..., Sequence[Any]], refusal: Optional[Callable[..., Optional[str]]] = None,
           fixed: int = 0) -> None:
    """Gives a primitive derivatives: it is linear in its first arguments and has `fixed` more, which have none.

    transpose(cotangents, *fixed arguments, **params): the cotangents of the linear ones. refusal(**params): why the primitive has no
    derivative with these parameters, or None. JAX makes no call where no tangent reaches its arguments or no cotangent its results. It
    decides this from the program and its shapes, so ranks must have shapes with which it decides alike (docs/jax.md, "Ranks may differ")."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        n = len(primals) - fixed
        why = refusal(**params) if refusal is not None else None
        if why is not None:
            raise NotImplementedError(why)
        if any(type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents[n:]):
            raise NotImplementedError(f"{made.name} has no derivative of this order with respect to the router's weights")
        return made.bind(*primals, **params), made.bind(*[ad.instantiate_zeros(t) for t in tangents[:n]], *primals[n:], **params)

    def transposed(cotangents: Sequence[Any], *arguments: Any, **params: Any) -> Any:
        n = len(arguments) - fixed
        if all(type(c) is ad.Zero for c in cotangents):
            return [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in arguments]
        found = transpose([ad.instantiate_zeros(c) for c in cotangents], *arguments[n:], **params)
        return [f if ad.is_undefined_primal(a) else None for f, a in zip(found, arguments)] + [None] * fixed

    ad.primitive_jvps[made] = jvp
    ad.primitive_transposes[made] = transposed


def batched_by_axis(made: Primitive, axis_in: int, axis_out: int) -> None:
    """Gives a primitive of one argument a vmap rule: one call with the mapped axis at axis_in of the argument and axis_out of the result."""

    def rule(arguments: Sequence[Any], axes: Sequence[int], **params: Any) -> Any:
        return made.bind(jax.numpy.moveaxis(arguments[0], axes[0], axis_in), **params), [axis_out]

    batching.primitive_batchers[made] = rule


def batched_in_turn(made: Primitive) -> None:
    """Gives a primitive a vmap rule: one call after the other."""

    def rule(arguments: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        mapped = [jax.numpy.moveaxis(a, x, 0) for a, x in zip(arguments, axes) if x is not None]

        def one(parts: Sequence[Any]) -> Any:
            rest = iter(parts)
            return made.bind(*[a if x is None else next(rest) for a, x in zip(arguments, axes)], **params)

        out = jax.lax.map(one, mapped)
        return out, [0] * len(out)

    batching.primitive_batchers[made] = rule


def shape_of(like: Any, **changes: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and type, with changes."""
    return jax.ShapeDtypeStruct(**{"shape": like.shape, "dtype": like.dtype, **changes})
