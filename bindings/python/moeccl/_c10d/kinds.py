# SPDX-License-Identifier: Apache-2.0
"""Element types and reduction operators: maps torch's to the library's."""
from typing import Any, Dict, Optional, Tuple

import torch
from torch.distributed import ReduceOp

from .. import _abi

# Types that the library has. All others are moved as bytes, and some of these are reduced as another type.
TYPES: Dict[torch.dtype, int] = {
    torch.float32: _abi.moecclFloat32, torch.float64: _abi.moecclFloat64, torch.float16: _abi.moecclFloat16,
    torch.bfloat16: _abi.moecclBfloat16, torch.int8: _abi.moecclInt8, torch.uint8: _abi.moecclUint8,
    torch.int32: _abi.moecclInt32, torch.int64: _abi.moecclInt64, torch.bool: _abi.moecclUint8}
REDUCED_AS: Dict[torch.dtype, torch.dtype] = {torch.int16: torch.int32}
for _name, _code in (("uint32", _abi.moecclUint32), ("uint64", _abi.moecclUint64), ("float8_e4m3fn", _abi.moecclFloat8e4m3),
                     ("float8_e5m2", _abi.moecclFloat8e5m2)):
    if hasattr(torch, _name):
        TYPES[getattr(torch, _name)] = _code
if hasattr(torch, "uint16"):
    REDUCED_AS[torch.uint16] = torch.int32

SUM, PROD, MAX, MIN, AVG = (_abi.moecclSum, _abi.moecclProd, _abi.moecclMax, _abi.moecclMin, _abi.moecclAvg)
_Kind = type(ReduceOp.SUM)
OPERATORS: Dict[Any, int] = {ReduceOp.SUM: SUM, ReduceOp.PRODUCT: PROD, ReduceOp.MAX: MAX, ReduceOp.MIN: MIN,
                             ReduceOp.AVG: AVG}
PREMUL = getattr(ReduceOp, "PREMUL_SUM", None)
BITWISE = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}
# Booleans are bytes of 0 and 1: a sum other than 0 is true.
_OF_BOOL = {ReduceOp.SUM: MAX, ReduceOp.MAX: MAX, ReduceOp.BOR: MAX, ReduceOp.PRODUCT: MIN, ReduceOp.MIN: MIN,
            ReduceOp.BAND: MIN}
COMPLEX_SUMS = (ReduceOp.SUM, ReduceOp.AVG)


def kind_of(op: Any) -> Any:
    """Returns the bare operator of a ReduceOp; a bare operator is returned as it is."""
    return op if type(op) is _Kind else op.op


def refuse(call: str, op: Any, dtype: torch.dtype) -> TypeError:
    name = str(kind_of(op)).rsplit(".", 1)[-1]
    if dtype.is_complex:
        remedy = "reduce torch.view_as_real(tensor), or use SUM or AVG"
    elif dtype is torch.bool:
        remedy = "use MAX or BOR (any), MIN or BAND (all), or tensor.to(torch.uint8)"
    elif kind_of(op) in BITWISE:
        remedy = "give a tensor of integers or truth values"
    else:
        remedy = "convert the tensor to one of " + ", ".join(str(t).replace("torch.", "") for t in TYPES)
    return TypeError(f"{call}: moeccl has no {name} of {dtype}: {remedy}")


def reduction(call: str, op: Any, dtype: torch.dtype) -> Tuple[Optional[int], Optional[torch.dtype]]:
    """Returns (the library's operator, the type to reduce in if it differs). The caller must build an operator of None: a bitwise
    one or PREMUL_SUM."""
    bare = kind_of(op)
    if dtype is torch.bool:
        if bare in _OF_BOOL:
            return _OF_BOOL[bare], None
        if bare is not ReduceOp.BXOR and bare != ReduceOp.BXOR:
            raise refuse(call, op, dtype)
        return None, None
    if bare in BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise refuse(call, op, dtype)
        return None, None
    if dtype.is_complex and bare not in COMPLEX_SUMS and bare != PREMUL:
        raise refuse(call, op, dtype)
    code = OPERATORS.get(bare)
    if code is None and bare != PREMUL:
        raise refuse(call, op, dtype)
    if dtype in TYPES or dtype.is_complex:
        return code, None
    if dtype in REDUCED_AS:
        return code, REDUCED_AS[dtype]
    raise refuse(call, op, dtype)


def as_moved(tensor: torch.Tensor) -> Tuple[int, int]:
    """Returns (count, the library's type) for moving a tensor's elements without reducing them."""
    code = TYPES.get(tensor.dtype)
    if code is not None:
        return tensor.numel(), code
    return tensor.numel() * tensor.element_size(), _abi.moecclUint8
