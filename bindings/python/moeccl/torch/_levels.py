# SPDX-License-Identifier: Apache-2.0
"""The levels of a communicator's topology, and what a byte costs at each."""
import ctypes

import torch

from moeccl import _abi
from ._calls import call, int32s_of

_COSTS = ("inter_alpha_us", "inter_beta_us", "intra_alpha_us", "intra_beta_us")


class Levels:
    """Levels, outermost first; the last one has a group for each rank.

    n_groups[D] and group_of_rank[D, ranks] are int32 tensors; costs: the arrays of moecclSwapProblem_t by name."""

    def __init__(self, n_groups, group_of_rank, costs):
        self.n_groups = torch.tensor(n_groups, dtype=torch.int32, device="cpu")
        self.group_of_rank, self.costs = group_of_rank, costs

    def __len__(self):
        return len(self.n_groups)

    def fill_in(self, problem, group_of_slot):
        """Makes a moecclSwapProblem_t refer to these levels, which must outlive it, as must group_of_slot."""
        problem.n_levels, problem.n_groups, problem.group_of_slot = len(self), int32s_of(self.n_groups), int32s_of(group_of_slot)
        for name, values in self.costs.items():
            setattr(problem, name, values)

    def nodes(self):
        """Returns the number of groups of the outermost level above the ranks and the group of each rank; without one, 1 and zeros."""
        if len(self) < 2:
            return 1, torch.zeros_like(self.group_of_rank[0])
        return int(self.n_groups[0]), self.group_of_rank[0].contiguous()


def levels_of(comm):
    """Returns the levels of a communicator's topology, with the figures of profile or links as the library's expert swap has them."""
    made = _abi.moecclSwapLevels_t()
    call(comm, "moecclSwapLevels", comm.handle, ctypes.byref(made), None, 0)
    groups = torch.empty((made.n_levels, made.n_ranks), dtype=torch.int32, device="cpu")
    call(comm, "moecclSwapLevels", comm.handle, ctypes.byref(made), int32s_of(groups), groups.numel())
    return Levels(made.n_groups[:made.n_levels], groups, {name: getattr(made, name) for name in _COSTS})


def even_levels(n_groups, n_ranks):
    """Returns the levels of which the caller gives the numbers of groups, for ranks in order. A byte costs the same at each level."""
    groups = torch.tensor([[r * n // n_ranks for r in range(n_ranks)] for n in n_groups], dtype=torch.int32, device="cpu")
    doubles = ctypes.c_double * len(n_groups)
    costs = {name: doubles(*[0.0 if "alpha" in name else 1e-3] * len(n_groups)) for name in _COSTS}
    return Levels(n_groups, groups, costs)
