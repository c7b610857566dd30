"""`python -m launch.track.process RUN_DIR`: feeds every sink of one run from its files, until the supervisor is done.

The first line on the standard input says what to feed (`SinkOrder`), the second that the supervisor is done
(`LastWord`); its end without that line, that the supervisor died. Each sink has a thread and a reader of its own: one
that raises is switched off with a line, one that hangs holds up nobody. Requests to stop are the supervisor's to
follow, so the signals that bring them are let pass here.

Everything that is printed is in RUN/logs/sinks.log, without secrets.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from launch.track.notify import NotifySink
from launch.track.reader import RunReader
from launch.track.tracker import End, LastWord, Run, Sink, SinkOrder, say
from trainer.spec import codec
from trainer.spec.job.sections import WandbMode
from trainer.spec.secrets import redacted_output

POLL_S = 0.5
_INCIDENTS_EVERY_S = 5.0
_LONGEST_END_S = 120.0  # the supervisor, where it lives, waits less
_SWITCHED_OFF = 1
_NICENESS = 10  # a core belongs to a rank before it belongs to a chart


class Ending:
    """What the supervisor said last, once it did."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._word: LastWord | None = None

    def set(self, word: LastWord | None) -> None:
        """None: the supervisor died."""
        self._word = word
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def read_end(self, reader: RunReader) -> End:
        """How it ended, with the run's report where that tells of it."""
        if self._word is None:
            return End(None, "the supervisor of the run died without a word")
        return End(reader.read_report() if self._word.has_report else None, self._word.error)


class Feed(threading.Thread):
    """The thread of one sink, in which it is loaded as well."""

    def __init__(self, name: str, make: Callable[[], Sink], order: SinkOrder, run_dir: Path, ending: Ending) -> None:
        super().__init__(name=name, daemon=True)
        self.has_failed = False
        self._make, self._order, self._run_dir, self._ending = make, order, run_dir, ending
        self._reader = RunReader(run_dir, first_attempt=order.first_attempt)
        self._has_begun = False
        self._looked_s = 0.0

    def run(self) -> None:
        """Feeds the sink to the end, or until it fails."""
        try:
            sink = self._make()
            is_over = False
            while not is_over:
                is_over = self._ending.wait(POLL_S)
                self._feed(sink, looks=is_over or time.monotonic() - self._looked_s > _INCIDENTS_EVERY_S)
            sink.end(self._ending.read_end(self._reader))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a sink does, the others go on
            self.has_failed = True
            traceback.print_exc()
            words = (str(error).splitlines() or [""])[0]
            say(f"{self.name}: switched off: {type(error).__name__}: {words}")

    def _feed(self, sink: Sink, *, looks: bool) -> None:
        if not self._has_begun:
            plan = self._reader.first_plan()
            if plan is None:
                return
            self._has_begun = True
            sink.begin(Run(self._run_dir, self._order, plan))
        for line in self._reader.read_lines():
            sink.step(line)
            for incident in self._reader.incidents_of(line):
                sink.incident(incident)
        if looks:
            self._looked_s = time.monotonic()
            for incident in self._reader.read_incidents():
                sink.incident(incident)


def makers_of(order: SinkOrder, run_dir: Path) -> Mapping[str, Callable[[], Sink]]:
    """What makes each sink that is asked for."""
    makers: dict[str, Callable[[], Sink]] = {}
    if order.wandb is not WandbMode.OFF:
        makers["wandb"] = _make_wandb
    if order.tensorboard:
        makers["tensorboard"] = _make_tensorboard
    if order.notify is not None:
        makers["notify"] = partial(NotifySink, run_dir, name=order.name, notify=order.notify)
    return makers


def main(argv: Sequence[str]) -> int:
    """0, or 1 where a sink failed or did not end; its line in the log says why."""
    run_dir = Path(argv[1])
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _let_pass)
    order = codec.decode(sys.stdin.buffer.readline(), SinkOrder, origin="standard input")
    ending = Ending()
    feeds = [Feed(name, make, order, run_dir, ending) for name, make in makers_of(order, run_dir).items()]
    for feed in feeds:
        feed.start()
    line = sys.stdin.buffer.readline()  # returns at the end of the run
    ending.set(codec.decode(line, LastWord, origin="standard input") if line.endswith(b"\n") else None)
    return _joined(feeds)


def _joined(feeds: Sequence[Feed]) -> int:
    """Waits for the threads; where one hangs, the process ends without it."""
    until_s = time.monotonic() + _LONGEST_END_S
    for feed in feeds:
        feed.join(max(0.0, until_s - time.monotonic()))
    late = [feed.name for feed in feeds if feed.is_alive()]
    if late:
        say(f"{' and '.join(late)}: did not end")
        os._exit(_SWITCHED_OFF)
    return _SWITCHED_OFF if any(feed.has_failed for feed in feeds) else 0


def _make_wandb() -> Sink:
    from launch.track.wandb.tracker import WandbSink  # loads wandb

    return WandbSink()


def _make_tensorboard() -> Sink:
    from launch.track.tensorboard import TensorboardSink  # loads tensorboard and numpy

    return TensorboardSink()


def _let_pass(_number: int, _frame: object) -> None:
    """A handler, as a signal that is ignored would be ignored by every process started from here as well."""


if __name__ == "__main__":
    with redacted_output():
        sys.exit(main(sys.argv))
