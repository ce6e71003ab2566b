# SPDX-License-Identifier: Apache-2.0
"""Point to point with tags and receives from any rank, over the library's sends and receives.

The library matches messages of a pair in the order of their calls, and runs one operation of a communicator at a time. Here
each direction of a pair is a channel: a communicator of two, made at the first message, and a thread at each end. A message is
a header (tag, bytes, and the data if it is small), the data, and one byte back when the receiver has it. The receiver's thread
works only while a receive is waiting for a message; it keeps messages with other tags until their receives are posted. Sends and
receives in any order, tags included, therefore cannot block one another, and a send has ended when its data has arrived. A thread
that waits for a send, and finds the channel idle, sends itself: handing it to the channel's thread would take longer than sending."""
import contextlib
import ctypes
import struct
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch

from .. import _abi
from .._buffers import holder
from .._library import lib
from ..comm import unique_id
from .calls import dense, room_for
from .deadlines import Deadlines
from .failure import BackendError, expired, failure
from .meeting import await_key, clamp_ms, join, own_connection
from .work import Work, copy_back

_HEADER = struct.Struct("<qq")
_SLOT = 1024  # bytes of a header with its data: small data needs one message instead of two, which take twice as long
_INLINE = _SLOT - _HEADER.size
_BYTE = _abi.moecclUint8
_MOST_MS = 2**31 - 1
_JOIN_MS = 60_000  # both ends are about to join
_here = threading.local()  # is_channel: this is a channel's thread


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class MessageWork(Work):
    """A send or a receive. `tensor` is dense memory; `target`, if any, is the tensor that a receive's data is then copied to."""

    def __init__(self, owner: "Messages", what: str, sends: bool, tensor: torch.Tensor, peer: Optional[int], tag: int,
                 target: Optional[torch.Tensor] = None) -> None:
        super().__init__(what, [tensor if target is None else target])
        self.owner, self.sends, self.tensor, self.peer, self.tag, self._target = owner, sends, tensor, peer, tag, target
        self.limit_ms, self._deadlines = owner.timeout_ms, owner.deadlines
        self.deadline: float = time.monotonic() + self.limit_ms / 1000

    def arrived(self, source: int) -> None:
        self.source = source
        try:
            if self._target is not None:
                target = self._target
                copy_back(lambda: target.copy_(self.tensor))
        except Exception as raised:  # a failed copy is reported to the thread that waits
            self.end(raised)
            return
        self.end()

    def _settle(self, given: Any) -> None:
        if getattr(_here, "is_channel", False):  # callbacks may wait for other messages of this channel
            threading.Thread(target=super()._settle, args=(given,), name="moeccl-callbacks", daemon=True).start()
        else:
            super()._settle(given)

    def _wait(self, ms: Optional[float]) -> None:
        left = max(0.0, self.deadline - time.monotonic()) * 1000
        if ms is not None and ms < left:
            super()._wait(ms)
            return
        if self.sends and self.owner.send_here(self):
            return
        with self._ended:
            if self._ended.wait_for(lambda: self.done, left / 1000):
                return
        self.expire()

    def expire(self) -> None:
        error = expired(self.what, self.limit_ms, "look for a peer that did not make the matching call")
        given = self._mark(error)
        if self.error is error:  # otherwise it has just ended
            self.owner.expire(self)
        if given is not None:
            self._settle(given)


class _Channel:
    """One end of one direction of a pair: a communicator of two whose rank 0 sends, and the thread that uses it."""

    def __init__(self, owner: "Messages", sender: int, receiver: int) -> None:
        self.owner, self.sender, self.receiver = owner, sender, receiver
        self.comm: Optional[int] = None
        self.dead: Optional[BaseException] = None
        self.slot = ctypes.create_string_buffer(_SLOT)
        self.thread: Optional[threading.Thread] = None
        self.woken = threading.Condition(owner.lock)  # by what its thread waits for

    def start(self, body: Any) -> None:
        self.thread = threading.Thread(target=self._run, args=(body,), name="moeccl-messages", daemon=True)
        self.thread.start()

    def _run(self, body: Any) -> None:
        _here.is_channel = True
        try:
            body()
        except BaseException as raised:  # any error must reach the works that wait on the channel
            self.owner.died(self, raised)
        finally:
            with self.owner.lock:
                comm, self.comm = self.comm, None
            if comm is not None:
                lib.moecclCommDestroy(comm)

    def connect(self, sends: bool, give_up: Callable[[], bool]) -> bool:
        """Connects the two ends; returns False if give_up() did so before the peer came. Each end says at the store that it is there
        (the receiver "wanted", the sender "ready") and may leave as long as the other has not answered. Only when the receiver has
        said that it "comes" do both enter the library, where a join cannot be left: so neither is there for a peer that does not
        come."""
        o = self.owner
        key = f"{o.key}/{self.sender}-{self.receiver}"
        what = f"connecting rank {self.sender} to rank {self.receiver} for messages"

        def await_peer(step: str, leave: Callable[[], bool]) -> Optional[bytes]:
            return await_key(o.store, f"{key}/{step}", what, _MOST_MS, o.unless_broken(leave))

        def closed() -> bool:
            return o.closed

        config = _abi.moecclConfig_t()
        config.timeout_ms = _MOST_MS  # each work has its own deadline
        config.init_timeout_ms = clamp_ms(min(o.timeout_ms, _JOIN_MS))
        config.staging_bytes, config.name = 1 << 16, b"messages"
        config.priority = o.priority
        if sends:
            if await_peer("wanted", give_up) is None:
                return False
            o.store.set(f"{key}/ready", b"1")
            if await_peer("comes", closed) is None:
                return False
            made: Any = unique_id()  # not earlier, because an id that nobody uses ends after MOECCL_INIT_TIMEOUT_MS
            o.store.set(f"{key}/id", bytes(made))
        else:
            o.store.set(f"{key}/wanted", b"1")
            if await_peer("ready", give_up) is None:
                with contextlib.suppress(Exception):  # a sender that comes later need not answer
                    o.store.delete_key(f"{key}/wanted")
                return False
            o.store.set(f"{key}/comes", b"1")
            made = await_peer("id", closed)
            if made is None:
                return False
        comm = join(made, 2, 0 if sends else 1, config)
        with o.lock:
            self.comm = comm
            closing = o.closed
        if closing:
            lib.moecclCommAbort(comm)
        return True

    def move(self, send: bool, where: Any, count: int) -> None:
        call = lib.moecclSend if send else lib.moecclRecv
        code = call(where, count, _BYTE, 1 if self.comm_is_sender else 0, self.comm, None)
        if code != 0:
            raise failure(f"a message from rank {self.sender} to rank {self.receiver}", code, self.comm)

    comm_is_sender = True

    def abort(self) -> None:
        if self.comm is not None:
            lib.moecclCommAbort(self.comm)


class _Outgoing(_Channel):
    def __init__(self, owner: "Messages", receiver: int) -> None:
        super().__init__(owner, owner.rank, receiver)
        self.queue: Deque[MessageWork] = deque()
        self._busy = True  # a thread uses the channel: at first its own, which connects
        self.start(self._loop)

    def _loop(self) -> None:
        if not self.connect(True, lambda: self.owner.closed):
            return
        self._leave()
        while True:
            with self.woken:
                while self._busy or not (self.queue or self.owner.closed or self.dead):
                    self.woken.wait()
                if self.owner.closed or self.dead:
                    return
                work = self.queue[0]
                self._busy = True
            self._send_first(work)

    def send_here(self, work: MessageWork) -> bool:
        """Sends on the calling thread if the channel is idle and `work` is the next. Returns whether it did; the work has then ended."""
        with self.woken:
            if self._busy or self.owner.closed or self.dead is not None or not self.queue or self.queue[0] is not work:
                return False
            self._busy = True
        self.owner.deadlines.enter(work)  # while this thread is in the library
        try:
            self._send_first(work)
        except Exception as raised:  # as in _run()
            self.owner.died(self, raised)
            self._leave()
        finally:
            self.owner.deadlines.leave(work)
        return True

    def _send_first(self, work: MessageWork) -> None:
        self._send(work)
        with self.owner.lock:
            if self.queue and self.queue[0] is work:
                self.queue.popleft()
        self._leave()
        work.end()

    def _leave(self) -> None:
        with self.woken:
            self._busy = False
            if self.queue or self.owner.closed or self.dead:
                self.woken.notify()

    def _send(self, work: MessageWork) -> None:
        n = _bytes_of(work.tensor)
        _HEADER.pack_into(self.slot, 0, work.tag, n)
        if 0 < n <= _INLINE:
            ctypes.memmove(ctypes.addressof(self.slot) + _HEADER.size, work.tensor.data_ptr(), n)
        self.move(True, self.slot, _SLOT)
        if n > _INLINE:
            self.move(True, work.tensor.data_ptr(), n)
        self.move(False, self.slot, 1)


class _Incoming(_Channel):
    comm_is_sender = False

    def __init__(self, owner: "Messages", sender: int) -> None:
        super().__init__(owner, sender, owner.rank)
        self.kept: Deque[Tuple[int, Any]] = deque()  # messages without a posted receive
        self.start(self._loop)

    def _await_wanted(self) -> bool:
        """Waits until this rank expects a message. Returns False once the channels have been closed."""
        o = self.owner
        with self.woken:
            while not o.wanted(self.sender) and not o.closed:
                self.woken.wait()
            return not o.closed

    def _loop(self) -> None:
        o, connected = self.owner, False
        while self._await_wanted():
            if connected:
                self._receive()
            else:
                connected = self.connect(False, lambda: o.closed or not o.wanted(self.sender))

    def _receive(self) -> None:
        o = self.owner
        self.move(False, self.slot, _SLOT)
        tag, n = _HEADER.unpack_from(self.slot)
        with o.lock:
            work = o.match(self.sender, tag)
        fits = work is not None and _bytes_of(work.tensor) == n
        try:
            if work is not None and fits:
                where = work.tensor.data_ptr()
            else:
                spare = torch.empty(n, dtype=torch.uint8, device="cpu")
                where = spare.data_ptr()
            if n > _INLINE:
                self.move(False, where, n)
            elif n > 0:
                ctypes.memmove(where, ctypes.addressof(self.slot) + _HEADER.size, n)
            self.move(True, self.slot, 1)
        except BaseException as raised:
            if work is not None:  # it is no longer posted, so died() does not know it
                work.end(raised)
            raise
        if work is None:
            with o.lock:
                work = o.match(self.sender, tag)  # a receive may have been posted meanwhile
                if work is None:
                    self.kept.append((tag, spare))
                    return
            fits = False
        if fits:
            work.arrived(self.sender)
        else:
            o.hand_over(work, self.sender, spare)


class Messages:
    """A rank's sends and receives."""

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout_ms: float, priority: int,
                 failed: Callable[[], Optional[Exception]], deadlines: Deadlines) -> None:
        """failed() returns the error that has broken the group; channels that wait for a peer at the store raise it."""
        self._failed, self.deadlines = failed, deadlines
        self.store, self.key, self.rank, self.size = own_connection(store), key, rank, size
        self.timeout_ms, self.priority = timeout_ms, priority
        self.lock = threading.Lock()  # of everything below and of the channels
        self.closed = False
        self._outgoing: Dict[int, _Outgoing] = {}
        self._incoming: Dict[int, _Incoming] = {}
        self._posted: List[MessageWork] = []  # receives, in the order of their calls
        self._own: Deque[Tuple[int, Any]] = deque()  # messages from this rank to itself

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        what = f"send of {_bytes_of(tensor)} bytes to rank {peer} with tag {tag}"
        self._check(what, peer)
        tensor = holder(tensor)
        work = MessageWork(self, what, True, dense(tensor), peer, tag)
        if peer == self.rank:
            copy = work.tensor.clone().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
            with self.lock:
                receive = self.match(self.rank, tag)
                if receive is None:
                    self._own.append((tag, copy))
            if receive is not None:
                self.hand_over(receive, self.rank, copy)
            work.end()
            return work
        with self.lock:
            channel = self._outgoing.get(peer)
            if channel is None:
                channel = self._outgoing[peer] = _Outgoing(self, peer)
            dead = channel.dead
            if dead is None:
                channel.queue.append(work)
                channel.woken.notify()
        if dead is not None:
            work.end(dead)
        return work

    def receive(self, tensor: torch.Tensor, peer: Optional[int], tag: int) -> Work:
        """Posts a receive; with peer None from the rank that sends first."""
        whom = "any rank" if peer is None else f"rank {peer}"
        what = f"receive of {_bytes_of(tensor)} bytes from {whom} with tag {tag}"
        if peer is not None:
            self._check(what, peer)
        tensor = holder(tensor)
        room, _ = room_for(tensor)
        work = MessageWork(self, what, False, room, peer, tag, None if room is tensor else tensor)
        with self.lock:
            found = self._take_kept(work)
            dead = None
            if found is None:
                peers = [p for p in (range(self.size) if peer is None else [peer]) if p != self.rank]
                for p in peers:
                    if p not in self._incoming:
                        self._incoming[p] = _Incoming(self, p)
                fallen = [self._incoming[p].dead for p in peers]
                if fallen and all(d is not None for d in fallen):
                    dead = fallen[0]
                else:
                    self._posted.append(work)
                    for p in peers:
                        self._incoming[p].woken.notify()
        if found is not None:
            self.hand_over(work, *found)
        elif dead is not None:
            work.end(dead)
        return work

    def _check(self, what: str, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"{what}: give a rank from 0 to {self.size - 1}")
        if self.closed:
            raise RuntimeError(f"{what}: the group is closed: make a new one")

    def unless_broken(self, give_up: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            error = None if self.closed else self._failed()
            if error is not None:
                raise error
            return give_up()

        return ask

    # The caller holds `lock`.

    def wanted(self, sender: int) -> bool:
        return any(w.peer is None or w.peer == sender for w in self._posted)

    def match(self, sender: int, tag: int) -> Optional[MessageWork]:
        for i, work in enumerate(self._posted):
            if work.tag == tag and (work.peer is None or work.peer == sender):
                work.peer = sender
                return self._posted.pop(i)
        return None

    def _take_kept(self, work: MessageWork) -> Optional[Tuple[int, Any]]:
        sources = range(self.size) if work.peer is None else [work.peer]
        for source in sources:
            channel = self._incoming.get(source)
            kept: Any = self._own if source == self.rank else channel.kept if channel is not None else ()
            for i, (tag, data) in enumerate(kept):
                if tag == work.tag:
                    del kept[i]
                    return source, data
        return None

    def hand_over(self, work: MessageWork, source: int, data: torch.Tensor) -> None:
        """Completes a receive with a message that is in our own memory."""
        n = _bytes_of(work.tensor)
        if n != data.numel():
            text = f"{work.what}: rank {source} sent {data.numel()} bytes: give a tensor of the sender's size"
            work.end(BackendError(_abi.moecclMismatch, text))
            return
        if n > 0:
            ctypes.memmove(work.tensor.data_ptr(), data.data_ptr(), n)
        work.arrived(source)

    def died(self, channel: _Channel, error: BaseException) -> None:
        """Handles a channel whose thread has ended with an error."""
        with self.lock:
            channel.dead = error
            if isinstance(channel, _Outgoing):
                ended = list(channel.queue)
                channel.queue.clear()
            else:
                alive = any(c.dead is None for c in self._incoming.values())
                ended = [w for w in self._posted if w.peer == channel.sender or w.peer is None and not alive]
                self._posted = [w for w in self._posted if w not in ended]
        for work in ended:
            work.end(error)

    def send_here(self, work: MessageWork) -> bool:
        channel = self._outgoing.get(work.peer if work.peer is not None else -1)
        return channel is not None and channel.send_here(work)

    def expire(self, work: MessageWork) -> None:
        """Handles a work whose deadline has passed."""
        with self.lock:
            if work in self._posted:  # none of its data has arrived, so the channel stays usable
                self._posted.remove(work)
                return
            if not work.sends:
                channel: Any = self._incoming.get(work.peer) if work.peer is not None else None
            else:
                channel = self._outgoing.get(work.peer if work.peer is not None else -1)
                if channel is not None and work in channel.queue and (channel.comm is None or work is not channel.queue[0]):
                    channel.queue.remove(work)
                    return
        if channel is not None:
            channel.abort()

    def abort(self) -> None:
        with self.lock:
            self.closed = True
            channels: List[Any] = list(self._outgoing.values()) + list(self._incoming.values())
            works = self._posted + [w for c in self._outgoing.values() for w in c.queue]
            self._posted = []
            for channel in channels:
                channel.woken.notify()
        for channel in channels:
            channel.abort()
        for work in works:
            work.end(BackendError(_abi.moecclAborted, f"{work.what}: the group was aborted or closed"))

    def close(self) -> None:
        """Ends all channels. Sends that are not complete end with an error."""
        self.abort()
        for channel in [*self._outgoing.values(), *self._incoming.values()]:
            thread = channel.thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=10)
