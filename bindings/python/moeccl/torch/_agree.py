# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, so that all of them raise an error that one of them sees, and none waits for the others."""
import torch
import torch.distributed as dist

from ._group import largest
from .experts import named


def texts_of_all(comm, text):
    """Returns the texts of all ranks. The call is collective."""
    mine = text.encode()
    block = torch.zeros(max(1, largest(comm, len(mine))), dtype=torch.uint8, device="cpu")
    block[:len(mine)] = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
    every = torch.empty((comm.size, block.numel()), dtype=torch.uint8, device="cpu")
    comm.all_gather(block, every)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in every]


def wrong_on_any(comm, wrong):
    """Returns what is wrong on the first rank on which something is; None: nothing. The call is collective."""
    return next((text for text in texts_of_all(comm, wrong or "") if text), None)


def wrong_in_groups(layer, wrong=None):
    """Returns what is wrong on any rank of all expert-parallel groups of an expert_data_group, which must hold the same experts in the same
    order: their gradients are summed slot by slot. `wrong` is this group's. The call is collective over both groups."""
    mine, every = layer.experts.numbers(), [None] * dist.get_world_size(layer.data_group)
    dist.all_gather_object(every, (mine, wrong), group=layer.data_group)
    for r, (theirs, said) in enumerate(every):
        if theirs != mine:
            wrong = wrong or (f"of an expert_data_group, whose ranks sum their gradients, rank {dist.get_rank(layer.data_group)} holds "
                              f"{named(mine)} and rank {r} {named(theirs)}: give the group of the ranks at one place of their expert-parallel "
                              "groups, and set the same slot_of or slot_expert in all of these")
        wrong = wrong or said
    return wrong_on_any(layer.comm, wrong)
