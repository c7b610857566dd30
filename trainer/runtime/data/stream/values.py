"""What the processes of a stream tell each other: places in it, windows, and what the producer is asked.

data/FINGERPRINT/     the first window as prepared data, with the held-out rows and the tokenizer:
    stream.json       StreamStart: how every later window is made, and where the first one ended
    listing.json      the PrepareRequest with the files as they were last listed
streams/NAME/         the folder of one start of a run on one machine, while it lasts
    window-00000007/  rows as in prepared data, and window.json (a Window)
    reader-R          the number of the window that local rank R reads from
    error.json        a Failure: why no window will come any more
RUN/stream/           index.json (a StreamIndex) and listing.json: what a resumed run finds its place by
"""

from pathlib import Path

from trainer.spec.job.sections import DataFormat
from trainer.spec.value import Value

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
    """What the first window settled for all that follow."""

    format: DataFormat
    threshold: int  # of the split (held_out.Split)
    piece_chars: int | None
    first: Window


class StreamIndex(Value, frozen=True, kw_only=True):
    """Every window that a run has read from, in order."""

    fingerprint: str
    windows: tuple[Window, ...]


class ProducerRequest(Value, frozen=True, kw_only=True):
    """What `python -m trainer.runtime.data.stream.producer` is asked: windows from `number` on."""

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
