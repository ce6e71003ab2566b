# SPDX-License-Identifier: Apache-2.0
"""Tensors between neighbours of a ring of ranks (V2's pipeline-parallel send and receive)."""
import collections

import moeccl

from . import _native
from ._check import check_cpu, require
from ._rows import ALIGNED, round_up
from ._stream import CommStream

_STAGING = 1 << 20  # bytes of a link's communicator, which only sends and receives


class _Link:
    """A communicator of two ranks for one direction, so that no message waits for one of another direction."""

    def __init__(self, id_bytes, source, target, rank, timeout_ms):
        self.comm = _native.Communicator(2, 0 if rank == source else 1, id_bytes, name=f"deep_ep {source} to {target}",
                                         staging_bytes=_STAGING, timeout_ms=timeout_ms)
        self.stream, self.sent = CommStream(), collections.deque()  # events of sends

    def send(self, tensor, most):
        """Sends a tensor that nobody else writes to. At most `most` sends have not ended when it returns."""
        while self.sent and (len(self.sent) >= most or self.sent[0].is_done()):
            self.sent.popleft().current_stream_wait()
        self.sent.append(self.stream.run(lambda: self.comm.send(tensor, 1), None, True))

    def close(self):
        self.stream.stop()
        self.comm.close()


class Pipeline:
    """The methods of ElasticBuffer for pipeline parallelism. They take CPU tensors."""

    _out, _in, _most_bytes, _most_sends = None, None, 0, 0

    @classmethod
    def get_pp_buffer_size_hint(cls, num_max_tensor_bytes, num_max_inflight_tensors):
        """Returns num_bytes for an ElasticBuffer with such sends: two directions, each with sent and received tensors."""
        return cls._aligned(round_up(num_max_tensor_bytes, ALIGNED) * num_max_inflight_tensors * 4)

    def pp_set_config(self, num_max_tensor_bytes, num_max_inflight_tensors):
        """Sets the largest tensor and how many sends to a neighbour may be under way. The call is collective and waits for all ranks;
        the first one makes the communicators between neighbours."""
        require(self.num_ranks > 1, ValueError, "pp_set_config: the group has one rank, which has no neighbours; use 2 or more")
        for name, value in (("num_max_tensor_bytes", num_max_tensor_bytes), ("num_max_inflight_tensors", num_max_inflight_tensors)):
            require(value > 0, ValueError, "{} is {}: give 1 or more", name, value)
        needed = self.get_pp_buffer_size_hint(num_max_tensor_bytes, num_max_inflight_tensors)
        require(needed <= self.num_bytes, ValueError, "num_max_tensor_bytes is {} and num_max_inflight_tensors {}, which takes "
                "num_bytes={}: this ElasticBuffer has {}", num_max_tensor_bytes, num_max_inflight_tensors, needed, self.num_bytes)
        self.barrier()
        if self._out is None:
            self._connect()
        self._most_bytes, self._most_sends = num_max_tensor_bytes, num_max_inflight_tensors

    def _connect(self):
        n, me = self.num_ranks, self.rank_idx
        steps = (1, -1) if n > 2 else (1, )  # of two ranks each is the other's next and previous one
        ids = self._gather([bytes(moeccl.unique_id()) for _ in steps])
        made = {}
        with moeccl.group():
            for at, step in enumerate(steps):
                for source in (me, (me - step) % n):
                    target = (source + step) % n
                    made[source, target] = _Link(ids[source][at], source, target, me, self._timeout_ms)
        self._links.extend(made.values())
        self._out = {target: link for (source, target), link in made.items() if source == me}
        self._in = {source: link for (source, target), link in made.items() if target == me}

    def pp_send(self, t, dst_rank_idx, num_sms=0):
        """Sends a contiguous tensor to the next or the previous rank. The call copies t and returns; if num_max_inflight_tensors sends to
        this rank are under way, it first waits for the oldest. num_sms has no effect. If an earlier send failed, raises its error."""
        link = self._link(self._out, "pp_send", "dst_rank_idx", dst_rank_idx, t)
        copy = self._memory.empty(tuple(t.shape), t.dtype, t.device)
        link.send(copy.copy_(t.detach()), self._most_sends)

    def pp_recv(self, t, src_rank_idx, num_sms=0):
        """Receives into the contiguous tensor t what the next or previous rank has sent, in its order, and waits for it. t has as many
        bytes as the sent tensor. num_sms has no effect."""
        self._link(self._in, "pp_recv", "src_rank_idx", src_rank_idx, t).comm.recv(t.detach(), 0)

    def _link(self, links, call, name, rank, t):
        self._comm.raw  # raises if the ElasticBuffer was destroyed
        require(links is not None, RuntimeError, "{}: call pp_set_config first", call)
        require(rank in links, ValueError, "{} is {}: give {}, the neighbours of rank {}", name, rank, " or ".join(map(str, links)),
                self.rank_idx)
        check_cpu(call, "t", t)
        require(t.is_contiguous(), ValueError, "t has strides {}: give a contiguous tensor", t.stride())
        require(t.nbytes <= self._most_bytes, ValueError, "t has {} bytes: num_max_tensor_bytes is {}", t.nbytes, self._most_bytes)
        return links[rank]
