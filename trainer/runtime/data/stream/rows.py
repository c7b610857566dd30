"""A stream as a rank sees it: the window that a step learns from, waited for where it is not there yet.

Window k has floor(examples / sequences of a step) steps, and the rest of it is dropped: a step never spans two windows.
So the window of a step follows from the sizes of the windows before it. The run keeps an index of them: a resumed run
begins at the window of its step, at the place in the stream where that began; without the index the stream is read
again from the start, up to there. Within a window the order is that of any prepared data (trainer.spec.data.order),
with a seed of its own: a function of the step, not of the ranks, the micro batch or the attempt.

    data/FINGERPRINT/     the first window as prepared data, with the held-out rows and the tokenizer:
        stream.json       StreamStart: how every later window is made, and where the first one ended
        listing.json      the PrepareRequest with the files as they were last listed
    streams/NAME/         the folder of one start of a run on one machine, while it lasts
        window-00000007/  rows as in prepared data, and window.json (a Window)
        reader-R          the number of the window that local rank R reads from
        error.json        a Failure: why no more windows will come
    RUN/stream/           index.json (a StreamIndex) and listing.json, for a resumed run
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.runtime.data.cache import TokenRows, lock_folder, remove_locked
from shardwise.trainer.runtime.run.state import IncidentKind, IncidentLog, RunPaths, start_of_launch
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import LISTING_NAME
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.value import Value

POLL_S = 0.02
GRACE_S = 5.0
_PRODUCER_NAME = "producer.json"
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_ENVIRONMENT = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "true"}
START_NAME = "stream.json"
ENTRY_NAME = "window.json"
ERROR_NAME = "error.json"
INDEX_NAME = "index.json"
WINDOWS_AHEAD = 2  # of the one in use


class Place(Value, frozen=True, kw_only=True):
    """Where reading a source goes on."""

    num_passes: int = 0  # that are over
    file: int = 0  # the place of the open file in the order of this pass
    num_items: int = 0  # blocks and bad rows of it that were read


class Window(Value, frozen=True, kw_only=True):
    """One stretch of the stream, and where each source stands before and after it."""

    number: int
    num_examples: int
    begin: tuple[Place, ...]
    end: tuple[Place, ...]
    num_bad_rows: int = 0
    bad_rows: str = ""  # the first of them


class StreamStart(Value, frozen=True, kw_only=True):
    """Decisions of the first window that hold for all later ones."""

    format: DataFormat
    threshold: int  # of the split (held_out.Split)
    piece_chars: int | None
    first: Window


class StreamIndex(Value, frozen=True, kw_only=True):
    """Every window that a run has read from, in order."""

    fingerprint: str
    windows: tuple[Window, ...]


class ProducerRequest(Value, frozen=True, kw_only=True):
    """Request to the process that prepares windows, from `number` on."""

    cache_dir: str  # of the first window
    folder: str
    number: int
    begin: tuple[Place, ...]
    num_readers: int  # ranks of this machine
    parent_pid: int


class Failure(Value, frozen=True, kw_only=True):
    """Why the producer ended."""

    message: str
    exit_code: int


def window_folder(folder: Path, number: int) -> Path:
    """Where a window is, once it is whole."""
    return folder / f"window-{number:08d}"


class StepRows(NamedTuple):
    """A step of the run as a step of one window, counted from 0, and the seed of its order."""

    rows: TokenRows
    step: int
    seed: int


class NodePlace(NamedTuple):
    """Position of this rank among those of its machine."""

    local_rank: int
    num_local_ranks: int

    @classmethod
    def of_this_process(cls) -> "NodePlace":
        """As torchrun numbered it; alone where nothing did."""
        return cls(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class StreamRows:
    """The windows of a run, one at a time, from that of the first step read."""

    def __init__(
        self,
        plan: Plan,
        paths: RunPaths,
        *,
        on_wait: Callable[[str], None],
        incidents: IncidentLog,
        is_first: bool = True,
        node: NodePlace | None = None,
    ) -> None:
        assert plan.data.cache_dir is not None
        self._cache_dir = Path(plan.data.cache_dir)
        self._seed, self._sequences = plan.job.train.seed, plan.schedule.sequences_per_step
        self._fingerprint, self._paths = plan.data.fingerprint, paths
        self._is_first, self._is_trial = is_first, plan.is_trial
        # Ranks that run a kernel from the hub are offline; a stream is not.
        self._environment = _ENVIRONMENT | ({"HF_HUB_OFFLINE": "0"} if plan.chosen.flash_kernel is not None else {})
        self._on_wait, self._incidents = on_wait, incidents
        self._node = node or NodePlace.of_this_process()
        self._folder = self._cache_dir.parent.parent / "streams" / _name_of_launch(paths, self._node)
        self._producer: _Producer | None = None
        self._windows = self._known_windows(resumes=plan.resume)
        self._starts = [0]  # first step of each window, and of the one after the last
        for window in self._windows:
            self._append_start(window)
        self._rows: TokenRows | None = None
        self._number = self._requested = self._waited_for = -1

    def at(self, step: int) -> StepRows:
        """Place of step `step` of the run, counted from 0; steps come in ascending order.

        Waits for its window. Raises the error that the producer ended with.
        """
        number = self._number_of(step)
        while number is None:
            self._open(len(self._windows))
            number = self._number_of(step)
        if number != self._number:
            self._open(number)
        assert self._rows is not None
        return StepRows(self._rows, step - self._starts[number], self._seed + number * _GOLDEN_GAMMA)

    def is_next_window(self, step: int) -> bool:
        """True if `at(step)` moves to another window; the same on every rank."""
        return self._number_of(step) != self._number

    def is_ready(self, step: int) -> bool:
        """True if that window is ready; raises the error with which the producer ended."""
        number = self._number_of(step)
        number = len(self._windows) if number is None else number
        return number == 0 or self._is_complete(self._request_window(number), number)

    def close(self) -> None:
        """Ends the producer, where this rank started it."""
        if self._producer is not None:
            self._producer.end()
            self._producer = None

    def _number_of(self, step: int) -> int | None:
        """The window of a step; None where it is beyond those that are known."""
        if step >= self._starts[-1]:
            return None
        return bisect_right(self._starts, step) - 1

    def _open(self, number: int) -> None:
        """Makes window `number` the one that is read from."""
        if number == 0:
            folder = self._cache_dir
            if not self._is_trial:  # a few steps are measured alone
                self._start_producer(1)
        else:
            folder = self._request_window(number)
            while not self._is_complete(folder, number):
                time.sleep(POLL_S)
        self._rows = None
        gc.collect()  # rows and their order refer to each other; what is mapped stays on the disk, removed or not
        self._rows, self._number = TokenRows.open(folder, "train"), number
        if number == len(self._windows):
            self._add(codec.read(folder / ENTRY_NAME, Window))
        if self._is_first:
            self._write_index()

    def _add(self, window: Window) -> None:
        before = self._windows[-1]
        self._windows.append(window)
        self._append_start(window)
        step = self._starts[window.number]
        for source, (begin, end) in enumerate(zip(before.end, window.end, strict=True)):
            if _is_in_second_pass(end) and not _is_in_second_pass(begin):
                which = f"source {source + 1} of the stream" if len(window.end) > 1 else "the stream"
                self._incidents.note(f"{which} came to its end, and began again in the window of step {step + 1}")
        if window.num_bad_rows:
            self._report_bad_rows()

    def _append_start(self, window: Window) -> None:
        num_steps = window.num_examples // self._sequences
        if num_steps == 0:
            raise InputError(
                f"data.streaming: window {window.number} of the stream has {window.num_examples} rows, a step needs "
                f"{self._sequences};\nlower train.tokens_per_step, or remove data.streaming, as so little data fits"
            )
        self._starts.append(self._starts[-1] + num_steps)

    def _report_bad_rows(self) -> None:
        """One incident for all windows, updated with each."""
        bad = [window for window in self._windows[1:] if window.num_bad_rows]
        count = sum(window.num_bad_rows for window in bad)
        text = f"{count} bad rows of the stream were skipped: {bad[0].bad_rows}"
        self._incidents.replace(text + (f"; in {len(bad)} windows" if bad[1:] else ""), IncidentKind.BAD_ROWS)

    def _known_windows(self, *, resumes: bool) -> list[Window]:
        """The windows in the index of the run, or the first window alone."""
        first = codec.read(self._cache_dir / START_NAME, StreamStart).first
        if not resumes:
            return [first]
        path = self._paths.resume_dir / "stream" / INDEX_NAME
        try:
            index = codec.read(path, StreamIndex)
        except InputError:
            self._incidents.note(f"{path} is missing or damaged: the stream is read again from its start")
            return [first]
        if index.fingerprint != self._fingerprint or [window.end for window in index.windows[:1]] != [first.end]:
            raise InputError(
                f"{path}: is of another stream (fingerprint {index.fingerprint[:12]}, this job has "
                f"{self._fingerprint[:12]});\nundo the change, or start a new run without --resume"
            )
        return list(index.windows)

    def _write_index(self) -> None:
        """Writes the index for a resumed run, possibly on another machine."""
        folder = self._paths.run_dir / "stream"
        folder.mkdir(parents=True, exist_ok=True)
        codec.write(folder / INDEX_NAME, StreamIndex(fingerprint=self._fingerprint, windows=tuple(self._windows)))
        if not (folder / LISTING_NAME).is_file():
            codec.write_bytes(folder / LISTING_NAME, (self._cache_dir / LISTING_NAME).read_bytes())

    def _start_producer(self, number: int) -> None:
        """Where this rank is the first of its machine; others wait for the folder that it makes."""
        if self._node.local_rank == 0 and self._producer is None:
            request = ProducerRequest(
                cache_dir=str(self._cache_dir),
                folder=str(self._folder),
                number=number,
                begin=self._windows[number].begin if number < len(self._windows) else self._windows[number - 1].end,
                num_readers=self._node.num_local_ranks,
                parent_pid=os.getpid(),
            )
            self._producer = _Producer(request, self._environment)
        while not self._folder.is_dir():
            time.sleep(POLL_S)

    def _request_window(self, number: int) -> Path:
        """Publishes that this rank has finished the windows before this one; the folder that this one will have."""
        self._start_producer(number)
        if self._requested != number:
            codec.write_bytes(self._folder / f"reader-{self._node.local_rank}", str(number).encode())
            self._requested = number
        return window_folder(self._folder, number)

    def _is_complete(self, folder: Path, number: int) -> bool:
        if folder.is_dir():
            return True
        if (self._folder / ERROR_NAME).is_file():
            raise _error_of(codec.read(self._folder / ERROR_NAME, Failure))
        if self._producer is not None:
            self._producer.check()
        if self._waited_for != number:
            self._on_wait(f"waiting for window {number} of the stream")
            self._waited_for = number
        return False


class _Producer:
    """The process that prepares windows, and the folder that it shares with the ranks of its machine."""

    def __init__(self, request: ProducerRequest, environment: dict[str, str]) -> None:
        self._folder = folder = Path(request.folder)
        self._lock = lock_folder(folder)
        path = folder / _PRODUCER_NAME
        codec.write(path, request)
        with (folder / "errors.txt").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shardwise.trainer.runtime.data.stream.windows", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | environment,
                pass_fds=(self._lock,),  # the folder is held while either of the two lives
                start_new_session=True,
            )

    def check(self) -> None:
        """Writes a Failure for every rank if the process has ended without one."""
        code = self._process.poll()
        if code is None or (self._folder / ERROR_NAME).is_file():
            return
        lines = (self._folder / "errors.txt").read_text(errors="replace").strip().splitlines()
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}; SIGKILL often means that host memory ran out"
            rest, exit_code = "go on from the last checkpoint with --resume", ExitCode.ENVIRONMENT
        else:
            how, rest, exit_code = f"failed with exit code {code}", lines[-1] if lines else "", ExitCode.INTERNAL
        message = f"the process that prepares the stream {how}:\n{rest}"
        codec.write(self._folder / ERROR_NAME, Failure(message=message, exit_code=int(exit_code)))

    def end(self) -> None:
        """Ends the process and removes the folder."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_locked(self._folder)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _is_in_second_pass(place: Place) -> bool:
    return place.num_passes > 0 and place != Place(num_passes=1)


def _name_of_launch(paths: RunPaths, node: NodePlace) -> str:
    """The same on every rank of one launch on one machine, and of no other."""
    started = start_of_launch(world_size=node.num_local_ranks)
    launcher = os.getppid() if node.num_local_ranks > 1 else os.getpid()
    identity = f"{paths.attempt_dir.resolve()} {os.uname().nodename} {launcher} {started.isoformat()}"
    return f"run-{blake2b(identity.encode(), digest_size=8).hexdigest()}"


def _error_of(failure: Failure) -> ShardwiseError:
    kinds = {ExitCode.INPUT: InputError, ExitCode.ENVIRONMENT: EnvironmentFaultError}
    return kinds.get(ExitCode(failure.exit_code), ShardwiseError)(failure.message)
