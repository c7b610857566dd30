"""One rank that runs attempts one after another in one process: what it resets between them, and its memory."""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from shardwise.trainer.runtime.loop.memory_profile import anonymous_bytes
from shardwise.trainer.runtime.run.state import IncidentKind, RunState

INTERVAL_S = 0.002


@contextmanager
def attempt() -> Iterator[None]:
    """Restores the environment after an attempt, and resets the state of Accelerate, which is global."""
    environment = dict(os.environ)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)


def assert_as_planned(state: RunState) -> None:
    """A run in order has no line on its first steps."""
    assert state.log.texts_of(IncidentKind.FIRST_STEPS) == ()


def end_group() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


_M_MMAP_THRESHOLD = -3


class Peak:
    """The largest anonymous memory while a block runs, above the level before it."""

    def __enter__(self) -> "Peak":
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)  # what the block frees is given back, where malloc would keep some of it
        libc.malloc_trim(0)  # memory that an earlier plan freed would be used again unseen
        self.level, self.highest, self._is_done = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.at_end = anonymous_bytes() - self.level
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.is_set():
            self.highest = max(self.highest, anonymous_bytes() - self.level)
            time.sleep(INTERVAL_S)
