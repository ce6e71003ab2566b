# SPDX-License-Identifier: Apache-2.0
"""Batches of messages: what torch calls coalescing, as in batch_isend_irecv.

Messages of CUDA tensors lie on one stream, where a send would wait for its peer's receive behind the peer's own send. The messages of
a batch are therefore kept until its end and then issued as one group of the library, which runs them beside each other. Messages
of CPU tensors need no group: they start at once, and the batch's work waits for them all."""
import datetime
import time
from typing import Any, List, Optional, Sequence, Tuple

import torch

from .work import DoneWork, Work


class Batch:
    """What a rank has called since the batch began."""

    def __init__(self) -> None:
        self.works: List[Work] = []
        self.messages: List[Tuple[int, Any, torch.Tensor]] = []  # of CUDA tensors: communicator, call, tensor

    def end(self, backend: Any) -> Work:
        works = self.works
        if self.messages:
            from . import cuda
            works = works + cuda.run_together(backend, self.messages)
        if len(works) == 1:
            return works[0]
        return BatchWork(works) if works else DoneWork("a batch", [])


class BatchWork(Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__(f"a batch of {len(works)} operations", [t for work in works for t in work.outputs])
        self._works = works

    def _wait(self, ms: Optional[float]) -> None:
        until = None if ms is None else time.monotonic() + ms / 1000
        for work in self._works:
            # 0 would stand for the group's own timeout
            work.wait(None if until is None else datetime.timedelta(seconds=max(0.001, until - time.monotonic())))
        self.end()

    def is_completed(self) -> bool:
        if not self.done and all([work.is_completed() for work in self._works]):  # asks each, which starts what ends it
            self.end(next((work.error for work in self._works if work.error is not None), None))
        return self.done

    def get_future(self) -> Any:
        if self._future is None:
            devices = {t.device for t in self.outputs if t.is_cuda}
            if devices:
                for work in self._works:
                    work.wait()  # puts the current stream behind it, and waits only for CPU tensors
                self._future = torch.futures.Future(devices=sorted(devices, key=str))
                self._future.set_result(self.outputs)
            else:
                every = torch.futures.collect_all([work.get_future() for work in self._works])
                self._future = every.then(lambda ended: [t for one in ended.value() for t in one.value()])
        self._let_go()
        return self._future
