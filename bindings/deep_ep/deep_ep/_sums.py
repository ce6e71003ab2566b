# SPDX-License-Identifier: Apache-2.0
"""Sums of rows on one rank, in an order that the caller gives. MoECCL forms them in host memory, as combine of a layer on a communicator
of this rank alone. torch forms those of CUDA tensors, of lists that have several rows of one group, and of rows
that are too wide for the staging."""
import moeccl
import torch
from moeccl import _abi

from . import _native, _rows

# The bytes of the rows that are added at a time. On a CPU (EPYC, 4096 tokens, hidden 2048) sums take 11 ms with 3 to 6 MiB, 16 with 1 MiB or
# 16 MiB; on a GPU, where nothing was measured, the number only limits the memory.
_BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class Alone:
    """A communicator of this rank alone, which is made when it is first needed."""

    def __init__(self, stream):
        """stream: what orders calls on it."""
        self.stream, self._comm = stream, None

    def comm(self):
        if self._comm is None:
            self._comm = _native.Communicator(1, 0, bytes(moeccl.unique_id()), name="deep_ep alone", staging_bytes=4 << 20,
                                              topology="")
        return self._comm

    def close(self):
        if self._comm is not None:
            self._comm.close()


def front(values, kept, width):
    """Returns int32 [n, width]: of each row of values[n, k] those that are kept, in their order, and then -1; None if a row has more."""
    place = kept.cumsum(1)
    if place.numel() and place[:, -1].max() > width:
        return None
    index = torch.full((values.size(0), width + 1), -1, dtype=torch.int32, device=values.device)
    return index.scatter_(1, (place - 1).masked_fill_(~kept, width), values.int())[:, :width].contiguous()


class Sums:
    """The sums over lists of rows, in the order of the lists. A sum does not depend on what else is summed, or where. The rows lie in groups,
    one group after another, and each group has its rows in the order of lists."""

    def __init__(self, index, n_groups, rows, align=1):
        """index: int32 [n, k], the groups in which each list has a row; -1 is skipped. None: MoECCL cannot form these sums. rows(): int64
        [n, any], the numbers of each list's rows; -1 is skipped. align: what groups begin at multiples of; more than 1 only without biases."""
        self._index, self._n_groups, self._rows, self._align = index, n_groups, rows, align
        self._lists, self._sets = None, {}

    def run(self, alone, whole, biases, out):
        """out[n, H] = for each list, the biases[n, H] plus its rows, in fp32 (fp64 for fp64), rounded once. whole[:, H]: room for the rows of
        the biases, then the rows; it is overwritten. alone: an Alone."""
        room = len(biases) * out.size(0)
        if out.device.type == "cpu" and self._by_moeccl(alone, whole, biases, out):
            return
        if self._lists is None:
            self._lists = _Lists(self._rows())
        self._lists.run(whole[room:], biases, out)

    def _by_moeccl(self, alone, whole, biases, out):
        """Does it and returns True, if MoECCL can."""
        n_biases, n = len(biases), out.size(0)
        if self._index is None or self._index.size(1) + n_biases > _native.MOST_CHOICES:
            return False
        if n == 0:
            return True
        for at, bias in enumerate(biases):
            whole[at * n:(at + 1) * n].copy_(bias)
        comm = alone.comm()
        try:
            self._set(n_biases).combine(comm, whole, out)
        except moeccl.Error as failure:
            if failure.code not in (_abi.moecclInvalidArgument, _abi.moecclOutOfMemory):
                raise
            self._index = None  # a list has two rows of a group, or rows are too wide for the staging
            return False
        return True

    def _set(self, n_biases):
        found = self._sets.get(n_biases)
        if found is None:
            index = torch.where(self._index < 0, -1, self._index + n_biases)
            first = torch.arange(n_biases, dtype=torch.int32, device=index.device).expand(index.size(0), -1)
            found = self._sets[n_biases] = _Set(torch.cat((first, index), 1), self._n_groups + n_biases, self._align)
        return found


class _Set(_rows.Routed):
    """Lists as the tokens of a layer, and groups as its experts."""
    layout, ordered = _native.EXPERT_MAJOR, True

    def __init__(self, index, n_groups, align):
        super().__init__(index.size(0), 1, n_groups)
        self.index, self.align = index, align

    def combine(self, comm, table, out):
        self.max_tokens = comm.room_for(self.n_tokens)
        self.routing(comm, out.size(1) * out.element_size(), _native.TYPES[out.dtype]).combine(table, out)


class _Lists:
    """The same sums by torch."""

    def __init__(self, rows):
        """rows: int64 [n, width], the numbers of the rows of each list; -1 is skipped."""
        kept = rows >= 0
        self._rows, self._lists = rows[kept], kept.nonzero()[:, 0]  # of all lists, one after another: each row, and its list
        ends = kept.sum(1).cumsum(0)
        self._begins = torch.cat((ends.new_zeros(1), ends))  # of each list, and the end of the last one
        self._host_begins = self._begins.tolist()

    def run(self, table, biases, out):
        """out[n, H] = for each list, the biases[n, H] plus the rows of table[:, H], in fp32 (fp64 for fp64), rounded once."""
        n, width, kind = out.size(0), out.size(1), torch.promote_types(out.dtype, torch.float32)
        of_list = len(biases) + self._rows.numel() / max(n, 1)  # rows, on average
        step = max(16, int(_BLOCK_BYTES[out.device.type] / (width * kind.itemsize * max(of_list, 1))))
        begins = range(0, n, step)
        most = max((self._host_begins[min(b + step, n)] - self._host_begins[b] for b in begins), default=0)
        gathered = table.new_empty((most, width))
        block = torch.empty((len(biases) * step + most, width), dtype=kind, device=out.device)
        for begin in begins:
            end = min(begin + step, n)
            first, last = self._host_begins[begin], self._host_begins[end]
            found = torch.index_select(table, 0, self._rows[first:last], out=gathered[:last - first])
            at = 0
            for part in (*(bias[begin:end] for bias in biases), found):
                block[at:at + part.size(0)].copy_(part)
                at += part.size(0)
            lists = torch.arange(begin, end, device=out.device)
            order = torch.cat([lists] * len(biases) + [self._lists[first:last]]).argsort(stable=True)  # each list's biases come first
            starts = self._begins[begin:end] - first + len(biases) * (lists - begin)
            # It adds the rows of a list one after another, in the type of the block.
            out[begin:end] = torch.nn.functional.embedding_bag(order, block[:at], starts, mode="sum")
