"""Supervision of the ranks of one attempt: forwards stop requests and leaves no process behind.

- A stop request (Ctrl-C, USR1, TERM) reaches every rank; a rank that registers later receives it later (`local_ranks`).
- A second Ctrl-C ends the attempt at once, without a checkpoint.
- A rank that fails or dies leaves the others waiting in a collective: after `END_GRACE_S` they are ended.
- Ranks without a heartbeat (`watchdog`) write their stacks into their logs, and then the attempt is ended.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from shardwise.launch.attempt.end import AttemptEnd, Observed, attempt_end
from shardwise.launch.attempt.local_ranks import Ranks
from shardwise.launch.attempt.watchdog import Silence, Watchdog, with_reference_trainers

POLL_S = 0.1
END_GRACE_S = 15.0  # torchrun has reported by then which rank failed first
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopKind(StrEnum):
    """Source of a stop request."""

    INTERRUPT = "interrupt"  # Ctrl-C
    REQUEUE = "requeue"  # TERM or USR1


class StoppedEarlyError(KeyboardInterrupt):
    """A stop before there is anything to save; handlers that clean up after Ctrl-C clean up after it as well."""


class StopRequest:
    """The stop requests that this process received as signals since `listening` began."""

    def __init__(self) -> None:
        self.kind: StopKind | None = None
        self.num_interrupts = 0
        self._is_raising = False

    def note(self, number: int, _frame: object) -> None:
        """Signal handler: records the signal, and does nothing else unless `raising`."""
        if number == signal.SIGINT:
            self.num_interrupts += 1
        if self.kind is None:
            self.kind = StopKind.INTERRUPT if number == signal.SIGINT else StopKind.REQUEUE
        if self._is_raising:
            self._is_raising = False
            raise StoppedEarlyError

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Ends the block with StoppedEarlyError at the first signal, for work that may be interrupted anywhere."""
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    @property
    def is_urgent(self) -> bool:
        """True after a second Ctrl-C."""
        return self.num_interrupts > 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles INT, TERM and USR1 while the block runs."""
        before = {number: signal.signal(number, self.note) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def watch_attempt(
    ranks: Ranks, *, attempt_dir: Path, stop: StopRequest, on_tick: Callable[[], None], watchdog: Watchdog
) -> AttemptEnd:
    """Watches ranks until they end, or have to be ended; returns their end, with their report or a made one."""
    hung: str | None = None
    try:
        silence = _watch(ranks, stop, on_tick, watchdog)
        hung = None if silence is None else with_reference_trainers(silence, ranks.dump_stacks())
        return_code = ranks.poll()
    finally:
        ranks.end()
    on_tick()
    seen = Observed(
        return_code=return_code,
        hung=hung,
        step=watchdog.step,
        was_cut_short=stop.is_urgent,
        num_oom_kills=ranks.num_oom_kills,
        lost=ranks.lost,
    )
    return attempt_end(attempt_dir, seen)


def _watch(ranks: Ranks, stop: StopRequest, on_tick: Callable[[], None], watchdog: Watchdog) -> Silence | None:
    """Returns when the attempt has ended, or has to be ended; the silence of ranks that hang, if that is why."""
    failed_since: float | None = None
    while ranks.poll() is None and not stop.is_urgent:
        if stop.kind is not None:
            ranks.request_stop()
        if failed_since is None and ranks.has_failed():
            failed_since = time.monotonic()
        if failed_since is not None and time.monotonic() - failed_since > END_GRACE_S:
            return None
        silence = watchdog.look()
        if silence is not None:  # after the last heartbeat, only the processes remain to be ended
            return None if watchdog.has_ended else silence
        on_tick()
        time.sleep(POLL_S)
    return None
