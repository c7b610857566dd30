"""Whether the files of a stream are still those that a run has read from: by name, size, and time or commit.

Nothing of their content is known, as nobody reads all of a stream. A run keeps the list that it was started with.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

from trainer.spec import codec
from trainer.spec.data.profile import DataProfile
from trainer.spec.data.request import LISTING_NAME, PrepareRequest, SourceFile
from trainer.spec.errors import InputError

_NUM_SHOWN = 2


def refuse_other_stream(run_dir: Path, data: DataProfile, earlier: DataProfile) -> None:
    """InputError that names the files which changed since the run in `run_dir` read its stream."""
    kept = run_dir / "stream" / LISTING_NAME
    if not (data.is_stream and earlier.is_stream) or data.fingerprint == earlier.fingerprint or not kept.is_file():
        return
    assert data.cache_dir is not None
    now = codec.read(Path(data.cache_dir, LISTING_NAME), PrepareRequest).files
    changes = list(_changes(codec.read(kept, PrepareRequest).files, now))
    if changes:
        more = f"; and {len(changes) - _NUM_SHOWN} more" if len(changes) > _NUM_SHOWN else ""
        raise InputError(
            f"--resume: the stream of {run_dir} changed: {'; '.join(changes[:_NUM_SHOWN])}{more};\n"
            "put the files back as they were, or start a new run without --resume"
        )


def _changes(then: Sequence[SourceFile], now: Sequence[SourceFile]) -> Iterator[str]:
    for before, after in zip_longest(then, now):
        if before is None or after is None:
            yield f"{(before or after).path} {'is new' if before is None else 'is gone'}"
        elif _words(before) != _words(after):
            yield f"{_words(before)} then, {_words(after)} now"


def _words(file: SourceFile) -> str:
    if file.hub is not None:
        return f"{file.hub} of {file.size_bytes} bytes"
    time = datetime.fromtimestamp(file.mtime_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds")
    return f"{Path(file.path).name} of {file.size_bytes} bytes, written {time}"
