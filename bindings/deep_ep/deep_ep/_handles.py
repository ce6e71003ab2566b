# SPDX-License-Identifier: Apache-2.0
"""Handles are V1's plain tuples. The state behind one is found by the tensor in it that its dispatch made, so a list of a handle's
items, or a tuple made anew from them, is a handle too."""
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._check import require

_states = WeakTensorKeyDictionary()


def keep(source, state):
    """Lets handles with this tensor, which the dispatch made, have this state."""
    _states[source] = state


def state_of(handle, kind, n_ranks, call, dispatch):
    """Returns the state, of class `kind`, behind the handle that `dispatch` returned on a Buffer of n_ranks."""
    for item in handle if isinstance(handle, (tuple, list)) else ():
        state = _states.get(item) if isinstance(item, torch.Tensor) else None
        if isinstance(state, kind):
            require(state.n_ranks == n_ranks, ValueError, "{}: handle is of a Buffer of {} ranks, this one has {}: give one of the same "
                    "ranks", call, state.n_ranks, n_ranks)
            return state
    raise TypeError(f"{call}: handle is a {type(handle).__name__} with nothing of a dispatch's: give what {dispatch} returned, "
                    "or its items")
