# SPDX-License-Identifier: Apache-2.0
"""A table of rows that all ranks hold together, and fetches of any of its rows (V2's Engram)."""
import torch

from ._check import check_cpu, check_same, check_shape, require
from ._rows import ALIGNED, by_column, round_up

_KINDS = (torch.bfloat16, torch.float8_e4m3fn)
_SAME = {"number of entries": str, "columns of storage": str, "dtype of storage": lambda n: _KINDS[n]}


class Engram:
    """The methods of ElasticBuffer for a table of rows. They take CPU tensors."""

    _storage, _scales = None, None

    @classmethod
    def get_engram_storage_size_hint(cls, num_entries, hidden, num_max_tokens_per_rank, dtype=torch.bfloat16):
        """Returns (bytes for fetched rows, num_cpu_bytes for this rank's rows). num_max_tokens_per_rank: the most rows of a fetch."""
        row = round_up(hidden * dtype.itemsize, ALIGNED)
        return cls._aligned(row * num_max_tokens_per_rank), cls._aligned(row * num_entries)

    def engram_write(self, storage, sf=None):
        """Makes a copy of storage [entries, hidden], bfloat16 or float8_e4m3fn, this rank's part of the table: row e is the table's row
        rank * entries + e. sf: with float8_e4m3fn, the scales of all rows of the table, [ranks * entries, n] of 4 bytes each, the same
        on all ranks; otherwise None. The call is collective, and all ranks give the same number of rows."""
        check_cpu("engram_write", "storage", storage)
        check_shape("storage", storage, _KINDS, (None, None), "bfloat16 or float8_e4m3fn [entries, hidden]")
        require(storage.numel() > 0, ValueError, "storage is {}: give at least one row and column", list(storage.shape))
        require(storage.nbytes <= self.num_cpu_bytes, ValueError, "storage has {} bytes and num_cpu_bytes is {}: make the ElasticBuffer "
                "with get_engram_storage_size_hint's", storage.nbytes, self.num_cpu_bytes)
        fp8 = storage.dtype == torch.float8_e4m3fn
        require(fp8 == (sf is not None), ValueError, "sf is {} and storage is {}: give sf with float8_e4m3fn only",
                "None" if sf is None else "given", storage.dtype)
        if fp8:
            check_cpu("engram_write", "sf", sf)
            require(sf.dim() == 2 and sf.size(0) == self.num_ranks * storage.size(0) and sf.element_size() == 4, ValueError,
                    "sf is {} {}: give [{}, n] of 4 bytes each", sf.dtype, list(sf.shape), self.num_ranks * storage.size(0))
        mine = [*storage.shape, _KINDS.index(storage.dtype)]

        def work():
            told = self._comm.all_to_all(torch.tensor([mine] * self.num_ranks, dtype=torch.int32, device="cpu"))
            check_same("engram_write", _SAME, told.tolist())
            self._storage = storage.detach().clone(memory_format=torch.contiguous_format)
            self._scales = sf.detach().clone(memory_format=torch.contiguous_format) if fp8 else None

        self._stream.run(work)

    def engram_fetch(self, indices, num_qps=0, use_tma_aligned_col_major_sf=False):
        """Fetches rows of the table. The call is collective, unlike DeepEP's: ranks without a wish give indices of no rows.

        indices: int32 [T, n], the table's rows. num_qps has no effect. use_tma_aligned_col_major_sf: the scales lie column by column,
        each of a multiple of four.

        Returns wait, at once. wait() returns (rows [T, n * hidden], the scales [T, n * columns of sf] or None)."""
        self._comm.raw  # raises if the ElasticBuffer was destroyed
        require(self._storage is not None, RuntimeError, "engram_fetch: call engram_write first")
        check_cpu("engram_fetch", "indices", indices)
        check_shape("indices", indices, (torch.int32, ), (None, None), "int32 [tokens, entries of a token]")
        n_rows = self.num_ranks * self._storage.size(0)
        if indices.numel():
            least, most = (int(v) for v in torch.aminmax(indices))
            require(0 <= least and most < n_rows, ValueError, "indices holds {}: the table has the rows 0 to {}",
                    least if least < 0 else most, n_rows - 1)
        n_tokens, n_each = indices.shape
        flat = indices.reshape(-1).long()
        rows = self._memory.empty((n_tokens, n_each * self._storage.size(1)), self._storage.dtype, indices.device)
        event = self._submit(lambda: self._fetch(flat, rows.view(flat.numel(), self._storage.size(1))))
        scales = None
        if self._scales is not None:
            scales = self._scales.index_select(0, flat).view(n_tokens, n_each * self._scales.size(1))
            if use_tma_aligned_col_major_sf:
                scales = by_column(*scales.shape, scales.dtype, scales.device).copy_(scales)

        def wait():
            event.current_stream_wait()
            return rows, scales

        return wait

    def _fetch(self, wanted, out):
        """out[n, hidden] = the table's rows wanted[n]. A row that is wanted several times is fetched once."""
        comm, table = self._comm, self._storage.view(torch.uint8)
        different, inverse = torch.unique(wanted, return_inverse=True)  # in ascending order, so sorted by rank
        asked = torch.bincount(different // table.size(0), minlength=comm.size)
        told = comm.all_to_all(asked.int().view(-1, 1)).view(-1).tolist()
        asked = asked.tolist()
        requests = torch.empty((sum(told), 1), dtype=torch.int64, device="cpu")
        comm.all_to_all_v(different.view(-1, 1), asked, requests, told)
        found = torch.empty((different.numel(), table.size(1)), dtype=torch.uint8, device="cpu")
        comm.all_to_all_v(table.index_select(0, requests.view(-1) - comm.rank * table.size(0)), told, found, asked)
        if wanted.numel():
            torch.index_select(found, 0, inverse, out=out.view(torch.uint8))
