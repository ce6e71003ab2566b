# SPDX-License-Identifier: Apache-2.0
"""MoECCL from Python: the C interface on buffers (torch tensors, NumPy and CUDA arrays, array.array, bytearray), using only ctypes.

    import moeccl, numpy as np
    comm = moeccl.Comm.from_env()              # under mpirun, torchrun or srun; or Comm(n_ranks, id, rank)
    x = np.ones(1024, np.float32)
    comm.all_reduce(x)                         # in place
    comm.all_gather(x, out)                    # out[n_ranks, 1024]

Buffers are C-contiguous; the element type is taken from the buffer (`type=` overrides it: bfloat16 in a uint16 array).
Counts are the sizes of the buffers, so the two cannot disagree. A buffer whose size or type does not fit the call raises
ValueError or TypeError before anything is sent. A call without a stream blocks without holding the interpreter lock, so
thread ranks run in parallel. Failures raise moeccl.Error with MoECCL's error text and `.code`. The library is found
through LIBMOECCL, next to the package, or by the dynamic linker. See docs/python.md."""
from . import _abi, codec, eplb, experts, gradient, hybrid, migrate, pipeline, plan, replace, solve, swap
from ._errors import Error
from .codec import Codec, shared_expert
from .comm import Comm, UniqueId, init_all, unique_id, version
from .constants import (AVG, BFLOAT16, EXPERT_MAJOR, FLOAT8E4M3, FLOAT8E5M2, FLOAT16, FLOAT32, FLOAT64, ID_BYTES, INT8, INT32, INT64,
                        MAX, MAX_LEVELS, MIN, PRIORITY_AUTO, PRIORITY_CP, PRIORITY_DP, PRIORITY_EP, PRIORITY_PP, PROD, ROWS, SUM, UINT8, UINT32, UINT64)
from .experts import Placement
from .gradient import GradientReturn
from .hybrid import Hybrid
from .memory import RedOp, Registration, mem_alloc
from .migrate import Migration
from .moe import Moe, Routing
from .replace import Replacement
from .streams import Stream, group
from .swap import ExpertSwap

__version__ = f"{_abi.MOECCL_VERSION_MAJOR}.{_abi.MOECCL_VERSION_MINOR}.{_abi.MOECCL_VERSION_PATCH}"  # version() is the loaded library's

__all__ = ["AVG", "BFLOAT16", "Codec", "Comm", "EXPERT_MAJOR", "Error", "ExpertSwap", "FLOAT16", "FLOAT32", "FLOAT64", "FLOAT8E4M3", "FLOAT8E5M2",
           "GradientReturn", "Hybrid", "ID_BYTES", "INT32", "INT64", "INT8", "MAX", "MAX_LEVELS", "MIN", "Migration", "Moe", "PRIORITY_AUTO", "PRIORITY_CP",
           "PRIORITY_DP", "PRIORITY_EP", "PRIORITY_PP", "PROD", "Placement", "ROWS", "RedOp", "Registration", "Replacement", "Routing",
           "SUM", "Stream", "UINT32", "UINT64", "UINT8", "UniqueId", "codec", "eplb", "experts", "gradient", "group", "hybrid", "init_all", "mem_alloc",
           "migrate", "pipeline", "plan", "replace", "shared_expert", "solve", "swap", "unique_id", "version"]
