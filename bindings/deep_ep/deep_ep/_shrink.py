# SPDX-License-Identifier: Apache-2.0
"""The ranks that take part in the low-latency calls of a Buffer with enable_shrink: all but those that are masked.

A call runs on a communicator of these ranks. If it fails because a rank is gone, the others make a communicator without that rank,
mask it, and repeat the call there. They may notice the failure in different calls, so a call ends with a barrier: a rank that has
passed it knows that every rank had all that the call brings it. So when the others meet a rank that is already in the next call, theirs
is complete. A communicator that is made after a failure goes on counting calls where the last one was, because a rank may go, too,
while the others meet, and some of them have met by then."""
import moeccl
import torch
from moeccl import _abi

_NO_CALLS = (0, True)


class Participants:
    """Communicators by the ranks that are masked. One thread at a time makes calls."""

    def __init__(self, whole, stream):
        """whole: the Communicator of all ranks. stream: what orders calls on it."""
        self.masked, self.stream = frozenset(), stream
        self._whole, self._all = whole, frozenset(whole.members)
        self._of = {frozenset(): whole}

    def mask(self, rank, masked):
        self.masked = self.masked | {rank} if masked else self.masked - {rank}

    def unmask_all(self):
        """Clears the masks. The next call makes another communicator of all ranks that are not gone, because the last one may have failed
        on some of them."""
        self.masked = frozenset()
        self._drop(self._of.get(self.masked))

    def run(self, work, masked_before=frozenset):
        """Calls work(communicator). The call is collective over the ranks that are not masked, on which work may run again.
        masked_before: returns further ranks that take no part, those that did not in the call before that this one goes on from."""
        comm = self._communicator(self.masked | masked_before())
        comm.calls = (comm.calls[0] + 1, False)
        while True:
            try:
                work(comm)
                comm.calls = (comm.calls[0], True)
                comm.barrier()
                return
            except moeccl.Error:
                if not comm.failed():
                    raise
                left, told = self._meet_after_failure(comm)
                self._keep(left, self._missing(comm))
                self._drop(comm)
                if left.size == comm.size:  # nobody is gone
                    left.calls = _NO_CALLS  # it raises on all ranks, which may have failed in different calls
                    raise
            comm = left
            if _is_done(comm, told):
                return
            comm.calls = (comm.calls[0], False)

    def _meet_after_failure(self, comm):
        try:
            return self._meet(comm, comm.calls)
        except moeccl.Error as failure:
            if failure.code != _abi.moecclTimeout:
                raise
            _, sentence = str(failure).split(": ", 1)
            raise moeccl.Error(failure.code, f"{sentence}. A rank that lives is not masked by itself: mask it on all others "
                               "(low_latency_update_mask_buffer). If they have gone on without this rank, call "
                               "low_latency_clean_mask_buffer on all ranks") from failure

    def _communicator(self, masked):
        found = self._of.get(masked)
        if found is None:
            found, _ = self._meet(self._whole, _NO_CALLS, sorted(masked))
            self._keep(found, masked)
        return found

    def _meet(self, comm, calls, exclude=()):
        """Returns a communicator of the ranks of comm that stay: all but `exclude`, or without it all that are not gone; and what each
        tells: int64 [ranks, 3], its number in the Buffer, that of its last call, and whether it has all that this call brings.
        calls: (the number of this rank's last call, whether it is complete), which the new communicator takes over."""
        left, unused = comm, []
        try:
            while True:
                left, exclude = left.shrunk(exclude), ()
                unused.append(left)  # until all have told
                told = torch.zeros((left.size, 3), dtype=torch.int64, device="cpu")
                told[left.rank] = torch.tensor((self._whole.members[self._whole.rank], *calls), device="cpu")
                try:
                    left.all_gather(told.view(torch.uint8))
                except moeccl.Error:
                    if not left.failed():
                        raise
                    continue  # another rank has gone meanwhile
                left.members, left.calls = told[:, 0].tolist(), calls
                return unused.pop(), told
        finally:
            for each in unused:
                each.close()

    def _missing(self, comm):
        return self._all - frozenset(comm.members)

    def _keep(self, comm, known):
        """Takes a new communicator for later calls, and masks the ranks that are neither in it nor `known` to be missing."""
        self._drop(self._of.get(self._missing(comm)))
        self._of[self._missing(comm)] = comm
        self.masked |= self._missing(comm) - known

    def _drop(self, comm):
        """Forgets a communicator that no call uses any more, and ends it. That of all ranks does not end, because others are made from it."""
        self._of = {masked: kept for masked, kept in self._of.items() if kept is not comm}
        if comm is not None and comm is not self._whole:
            comm.close()

    def close(self):
        for comm in self._of.values():
            if comm is not self._whole:
                comm.close()
        self._of = {}


def _is_done(comm, told):
    """Returns whether this rank has all that its last call brings, after the ranks have told each other."""
    (number, complete), latest = comm.calls, told[:, 1].max().item()
    if number < latest and not complete:
        # The others have left the call without this rank, by an exception. They repeat a later one here, and wait for this rank's next.
        comm.calls = (latest - 1, False)
        raise moeccl.Error(_abi.moecclTimeout, "low-latency call: this rank has come too late. The call has failed on the others, which are in "
                           "a later one: make that one next")
    return number < latest or bool(((told[:, 1] == latest) & (told[:, 2] == 1)).all())
