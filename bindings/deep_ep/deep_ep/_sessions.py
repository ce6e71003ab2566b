# SPDX-License-Identifier: Apache-2.0
"""All-gathers in sessions (V2's AGRS): results are parts of one piece of memory, which each session uses from its beginning."""
import contextlib
import math

import torch

from ._check import check_cpu, require
from ._rows import ALIGNED, round_up


def _listed(shapes):
    """Returns (a list of shapes, whether the caller gave several)."""
    several = isinstance(shapes[0], tuple)
    return (list(shapes) if several else [tuple(shapes)]), several


def _room(n_bytes, n_ranks):
    return round_up(n_bytes * n_ranks, ALIGNED)


class Sessions:
    """The methods of ElasticBuffer for all-gathers. They take CPU tensors."""

    _memory_of_sessions, _most_gathers, _session = None, 0, None

    @staticmethod
    def get_agrs_num_max_session_bytes(group, shapes, dtype):
        """Returns the bytes of a session that gathers tensors of these shapes. shapes: one shape, or a sequence of shapes."""
        return sum(_room(math.prod(shape) * dtype.itemsize, group.size()) for shape in _listed(shapes)[0])

    @classmethod
    def get_agrs_buffer_size_hint(cls, group, num_max_session_bytes):
        """Returns num_bytes for an ElasticBuffer with such sessions."""
        return cls._aligned(num_max_session_bytes)

    def agrs_set_config(self, num_max_session_bytes, num_max_all_gathers_per_session):
        """Reserves the memory of sessions. The call is collective and waits for all ranks."""
        require(0 < num_max_session_bytes <= self.num_bytes, ValueError,
                "num_max_session_bytes is {}: give 1 to num_bytes, which is {}, or make the ElasticBuffer with "
                "num_bytes=get_agrs_buffer_size_hint(...)", num_max_session_bytes, self.num_bytes)
        require(num_max_all_gathers_per_session > 0, ValueError, "num_max_all_gathers_per_session is {}: give 1 or more",
                num_max_all_gathers_per_session)
        require(self._session is None, RuntimeError, "agrs_set_config: a session is open, call destroy_agrs_session first")
        self.barrier()
        with torch.inference_mode(False):  # so that callers may write to it in whatever mode
            self._memory_of_sessions = torch.empty(_room(num_max_session_bytes, 1), dtype=torch.uint8, device="cpu")
        self._most_gathers = num_max_all_gathers_per_session

    def create_agrs_session(self):
        """Begins a session. All ranks make the same calls in it."""
        self._comm.raw  # raises if the ElasticBuffer was destroyed
        require(self._memory_of_sessions is not None, RuntimeError, "create_agrs_session: call agrs_set_config first")
        require(self._session is None, RuntimeError, "create_agrs_session: a session is open, call destroy_agrs_session first")
        self._session = _Session(self._memory_of_sessions)

    def destroy_agrs_session(self):
        """Ends the session: its results may be overwritten from the next session on."""
        self._open("destroy_agrs_session")
        self._session = None

    @contextlib.contextmanager
    def agrs_new_session(self, enabled=True):
        """A session for the body of a `with` statement, if enabled."""
        if enabled:
            self.create_agrs_session()
        try:
            yield
        finally:
            if enabled:
                self._session = None  # unless destroy() has ended it already

    def agrs_get_inplace_tensor(self, shapes, dtype):
        """Returns this rank's part of the results of the next all-gathers, for tensors of these shapes (a tensor for one shape, a
        tuple for a sequence of shapes). What is written there need not be copied by all_gather."""
        session = self._open("agrs_get_inplace_tensor")
        shapes, several = _listed(shapes)
        begin, made = session.end, []
        for shape in shapes:
            n_bytes = math.prod(shape) * dtype.itemsize
            blocks = session.blocks(begin, n_bytes, self.num_ranks)
            made.append(blocks[self.rank_idx].view(dtype).view(shape))
            begin += _room(n_bytes, self.num_ranks)
        return tuple(made) if several else made[0]

    def all_gather(self, t):
        """Gathers a tensor, or each of a sequence of tensors, from all ranks. The call is collective and returns at once.

        Returns (gathered [ranks, ...] for each tensor, ..., wait). The results are there after wait(), and until the session
        ends."""
        session = self._open("all_gather")
        tensors = [t] if isinstance(t, torch.Tensor) else list(t)
        require(len(tensors) > 0, ValueError, "t is an empty sequence: give a tensor, or some")
        require(session.n_gathers < self._most_gathers, RuntimeError, "all_gather: the session has had {} all-gathers, as many as "
                "num_max_all_gathers_per_session: begin a new one", session.n_gathers)
        end, parts = session.end, []
        for tensor in tensors:
            check_cpu("all_gather", "t", tensor)
            blocks = session.blocks(end, tensor.nbytes, self.num_ranks)
            own = blocks[self.rank_idx]
            require(not session.holds(tensor) or tensor.data_ptr() == own.data_ptr(), ValueError, "t is a tensor of the session from "
                    "another place: gather the tensors of agrs_get_inplace_tensor in its order")
            parts.append((blocks, own, tensor.detach().contiguous().view(-1).view(torch.uint8)))
            end += _room(tensor.nbytes, self.num_ranks)
        session.end, session.n_gathers = end, session.n_gathers + 1

        def work():
            for blocks, own, given in parts:
                if given.data_ptr() != own.data_ptr():
                    own.copy_(given)
                self._comm.all_gather(blocks)

        event = self._submit(work)
        gathered = [blocks.view(tensor.dtype).view(self.num_ranks, *tensor.shape)
                    for (blocks, _, _), tensor in zip(parts, tensors)]

        def wait():
            require(self._session is session, RuntimeError, "the all-gather's session has ended: wait for it before")
            event.current_stream_wait()

        return (*gathered, wait)

    def _open(self, call):
        self._comm.raw  # raises if the ElasticBuffer was destroyed
        require(self._session is not None, RuntimeError, "{}: there is no session, call create_agrs_session first", call)
        return self._session


class _Session:

    def __init__(self, memory):
        self.memory, self.end, self.n_gathers = memory, 0, 0

    def blocks(self, begin, n_bytes, n_ranks):
        """Returns the bytes of a result, [ranks, n_bytes]."""
        end = begin + n_bytes * n_ranks
        require(end <= self.memory.numel(), RuntimeError, "the session's tensors take {} bytes, and num_max_session_bytes is {}: begin "
                "a new session, or call agrs_set_config with get_agrs_num_max_session_bytes(...)", end, self.memory.numel())
        return self.memory[begin:end].view(n_ranks, n_bytes)

    def holds(self, tensor):
        return 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.numel()
