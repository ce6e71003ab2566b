# SPDX-License-Identifier: Apache-2.0
"""Where experts are."""
from typing import List, Optional, Sequence


def experts_of(rank: int, size: int, n_experts: int, owners: Optional[Sequence[int]] = None) -> List[int]:
    """Returns the numbers of a rank's experts, ascending. owners: the rank of each, None: contiguous, as even as possible."""
    if owners is not None:
        return [e for e, owner in enumerate(owners) if owner == rank]
    share, more = divmod(n_experts, size)
    first = rank * share + min(rank, more)
    return list(range(first, first + share + (rank < more)))
