# SPDX-License-Identifier: Apache-2.0
"""Constants of the C interface under Python's names; their numbers come from the headers."""
from . import _abi

# Declared, because functions have them as defaults: mypy may read those before it knows what a tuple holds.
FLOAT32: int
SUM: int
EXPERT_MAJOR: int
INT8, UINT8, INT32, UINT32 = _abi.moecclInt8, _abi.moecclUint8, _abi.moecclInt32, _abi.moecclUint32
INT64, UINT64, FLOAT16, FLOAT32 = _abi.moecclInt64, _abi.moecclUint64, _abi.moecclFloat16, _abi.moecclFloat32
FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 = _abi.moecclFloat64, _abi.moecclBfloat16, _abi.moecclFloat8e4m3, _abi.moecclFloat8e5m2
SUM, PROD, MAX, MIN, AVG = _abi.moecclSum, _abi.moecclProd, _abi.moecclMax, _abi.moecclMin, _abi.moecclAvg
ROWS, EXPERT_MAJOR = _abi.moecclLayoutRows, _abi.moecclLayoutExpertMajor  # layouts of a MoE layer
ID_BYTES = _abi.MOECCL_UNIQUE_ID_BYTES
MAX_LEVELS = _abi.MOECCL_MAX_LEVELS
PRIORITY_AUTO, PRIORITY_DP, PRIORITY_CP = _abi.moecclPriorityAuto, _abi.moecclPriorityDP, _abi.moecclPriorityCP
PRIORITY_PP, PRIORITY_EP = _abi.moecclPriorityPP, _abi.moecclPriorityEP
