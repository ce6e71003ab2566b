# SPDX-License-Identifier: Apache-2.0
"""Expert swap at run time: pairs of experts change places where that reduces the tokens' traffic (include/moeccl/swap.h).

Call begin() after the optimizer's step and finish() before the next one. Experts' numbers in a layer's routings do not change."""
import ctypes
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _abi
from ._abi import ExpertSwapInfo
from ._arrays import Given, record
from ._buffers import Buffer
from ._errors import check, number, of_kind
from ._library import lib
from ._owned import OfThisProcess, at_the_end
from .comm import Comm, fill
from .moe import Moe

_byref = ctypes.byref
MAX_FUNCTIONS = {"smooth": _abi.moecclMaxSmooth, "plain": _abi.moecclMaxPlain, "log-sum-exp": _abi.moecclMaxLogSumExp}


class ExpertSwap(OfThisProcess):
    """One object for a model. The constructor is collective: all ranks pass the same. Use it from one thread at a time.

    interval: steps from one count of a layer to its next; 0: 4. max_tokens: tokens of this rank that a count takes; 0: 4096.
    max_function and gamma: of Eq. 9 and 11; gamma 0: 10. min_gain: least share of a layer's time for which a pair moves; 0: 0.001,
    below 0: any gain. horizon: steps in which a swap must pay for itself; 0: 100. swap_us: price of a swap; 0: as measured."""

    def __init__(self, comm: Comm, interval: int = 0, max_tokens: int = 0, max_function: str = "smooth", gamma: float = 0,
                 min_gain: float = 0, horizon: float = 0, swap_us: float = 0) -> None:
        if max_function not in MAX_FUNCTIONS:
            raise ValueError(f"max_function is {max_function!r}: there are {', '.join(MAX_FUNCTIONS)}")
        config = _abi.moecclExpertSwapConfig_t()
        config.interval, config.max_tokens = number("interval", interval), number("max_tokens", max_tokens)
        config.max_function = MAX_FUNCTIONS[max_function]
        fill(config, {"gamma": gamma, "min_gain": min_gain, "horizon": horizon, "swap_us": swap_us})
        self._comm = of_kind("comm", comm, Comm)
        self._moes: List[Moe] = []
        self._kept: List[Buffer] = []  # tensors whose experts the library moves
        handle = ctypes.c_void_p()
        comm._check(lib.moecclExpertSwapCreate(_byref(handle), comm._handle, _byref(config)))
        self._handle: Optional[int] = handle.value

    @property
    def handle(self) -> int:
        """The moecclExpertSwap_t as a number; 0 after close()."""
        return self._handle or 0

    def attach(self, moe: Moe, tensors: Sequence[Union[Any, Tuple[Any, bool]]], slot_of: Any = None) -> int:
        """Attaches a layer with its tensors [moe.n_slots, ...] and returns its number in this object. The call is collective and not
        allowed between begin() and finish().

        tensors: writable buffers, each alone or as (buffer, at_finish), with at_finish True if the step between begin() and finish()
        writes it, as it writes gradients. They must live until close(). slot_of: int32 [n_experts], the slot of each expert, as a
        checkpoint stores it; None: expert e is in slot e."""
        given = (_abi.moecclSwapTensor_t * max(1, len(tensors)))()
        kept: List[Buffer] = []
        try:
            for i, thing in enumerate(tensors):
                thing, at_finish = thing if isinstance(thing, tuple) else (thing, False)
                kept.append(Buffer(thing, True))
                share, rest = divmod(kept[i].bytes, max(1, moe.n_slots))
                if rest or (kept[i].bytes and not moe.n_slots):
                    raise ValueError(f"tensors[{i}] has {kept[i].bytes} bytes, which are not {moe.n_slots} slots of one size")
                given[i].slots, given[i].slot_bytes, given[i].at_finish = kept[i].data, share, int(at_finish)
            places = Given("slot_of", slot_of, ctypes.c_int32, (moe.n_experts,) if slot_of is not None else None)
            layer = ctypes.c_int32()
            self._comm._check(lib.moecclExpertSwapAttach(self._handle, moe._handle, given, len(tensors), places.address, _byref(layer)))
        except BaseException:
            for buffer in kept:
                buffer.release()
            raise
        self._kept += kept
        self._moes.append(moe)
        return layer.value

    def begin(self) -> None:
        """Counts a step and starts the count of the layers whose turn it is. The call is collective and returns at once."""
        self._comm._check(lib.moecclExpertSwapBegin(self._handle))

    def test(self) -> bool:
        """Returns True if finish() would wait for no transfer except those of tensors with at_finish."""
        done = ctypes.c_int32()
        self._comm._check(lib.moecclExpertSwapTest(self._handle, _byref(done)))
        return bool(done.value)

    def finish(self) -> int:
        """Waits for everything that begin() started and returns how many pairs have changed places, the same on all ranks. The call is
        collective."""
        n_swaps = ctypes.c_int32()
        self._comm._check(lib.moecclExpertSwapFinish(self._handle, _byref(n_swaps)))
        return n_swaps.value

    def info(self, layer: int = 0) -> ExpertSwapInfo:
        """Returns where the layer's experts are now (slot_of and expert_in, tuples [n_experts]), and counts, swaps and measured times."""
        info = _abi.moecclExpertSwapInfo_t()
        self._comm._check(lib.moecclExpertSwapGetInfo(self._handle, number("layer", layer), _byref(info)))
        n = self._moes[layer].n_experts
        return record(ExpertSwapInfo, info, slot_of=tuple(info.slot_of[:n]), expert_in=tuple(info.expert_in[:n]))

    def close(self) -> None:
        """Waits for transfers that have begun, changes no places, and releases the tensors. Layers keep their map."""
        if self._handle is not None:
            check(lib.moecclExpertSwapDestroy(self._handle))
            self._handle = None
            for buffer in self._kept:
                buffer.release()
            self._kept, self._moes = [], []

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not at_the_end(self._kept):
            lib.moecclExpertSwapDestroy(self._handle)  # ends the transfers, which use the buffers
