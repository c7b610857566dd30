"""Turns sources of data into rows of token ids, once: `python -m trainer.runtime.prepare REQUEST.json ANSWER.json`.

Three passes over the files, each in bounded memory. The first takes digests, which with the tokenizer and the settings
are the fingerprint: a prepared folder of that name ends the work. The second looks at every row: which cannot be used,
and what the split holds out. The third tokenises, on all cores, and writes rows. Where the tokenizer is to be made
from the data, that stands between the two and sees the training side only.

Progress goes to stdout, a plain line a second at most; a problem to stderr, with the exit code of its error.
"""

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from trainer.runtime.census import Census, Sources, SurveyedFile, survey_sources, take_census, units_of
from trainer.runtime.data_cache import prepared_once
from trainer.runtime.held_out import Unit, content_hash
from trainer.runtime.lengths import batch_widths, length_histogram
from trainer.runtime.row_writer import Rows, RowShape, RowWriter
from trainer.runtime.text_sources import holds_rows
from trainer.runtime.token_rows import CACHE_FORMAT, TokenLayout, TokenRows, unigram_entropy_nats
from trainer.runtime.tokenizer import (
    TextTokenizer,
    copy_tokenizer,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    write_trained_tokenizer,
)
from trainer.spec import codec
from trainer.spec.data_profile import DataProfile
from trainer.spec.data_request import PrepareRequest
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from trainer.spec.job import DataFormat

BATCH_CHARS = 2**20
BATCH_UNITS = 1024
TOKENIZER_TRAINING_CHARS = 100_000_000
_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


class _Work(NamedTuple):
    """One preparation: what is asked, of what, and the folder that it fills."""

    request: PrepareRequest
    sources: Sources
    fingerprint: str
    folder: Path

    @property
    def is_packed(self) -> bool:
        return _is_packed(self.request, self.sources)


def prepare(request: PrepareRequest, report: Callable[[str], None]) -> DataProfile:
    """The profile of the prepared data; `report` is given lines of progress."""
    if not request.files:
        raise InputError("data.train: names no file; give a file, a folder or python-stdlib")
    if request.seq_len < 2:
        raise InputError(f"train.seq_len: a row of {request.seq_len} tokens has no target; 2 are the least")
    sources = survey_sources(request, report)
    fingerprint = _fingerprint(request, sources)
    root = Path(request.cache_root, "data")
    profile = prepared_once(
        root, fingerprint, lambda folder: _build(_Work(request, sources, fingerprint, folder)), report
    )
    return msgspec.structs.replace(profile, cache_dir=str(root / fingerprint))


def _fingerprint(request: PrepareRequest, sources: Sources) -> str:
    """A name for the content of the files, the tokenizer and every setting that changes a row; paths are not in it."""
    settings = {
        "cache_format": CACHE_FORMAT,
        "train": [_identity(file) for file in sources.train],
        "held_out": [_identity(file) for file in sources.held_out],
        "tokenizer": "train" if request.tokenizer is None else tokenizer_digest(Path(request.tokenizer)).hex(),
        "eval_share": request.eval_share,
        "format": sources.reading.format,
        "fields": sorted(request.fields.items()),
        "is_packed": _is_packed(request, sources),
        "bad_rows": [request.bad_rows, request.bad_rows_max],
        "seq_len": request.seq_len,
        "vocab_size": request.vocab_size,
    }
    return blake2b(msgspec.json.encode(settings), digest_size=16).hexdigest()


def _identity(file: SurveyedFile) -> tuple[str, bool, float]:
    return file.survey.digest.hex(), holds_rows(file.source), file.source.weight


def _is_packed(request: PrepareRequest, sources: Sources) -> bool:
    """Text is packed unless the job says otherwise; rows that came tokenised stay the rows they are."""
    return sources.reading.format is DataFormat.TEXT if request.packing is None else request.packing


def _build(work: _Work) -> DataProfile:
    """Fills the folder of the work; the profile of what is in it."""
    census = take_census(work.request, work.sources)
    tokenizer = _tokenizer(work, census)
    rows = _write_rows(work, census, tokenizer)
    _check_enough(work.request, rows)
    has_eval = len(rows.held_out) > 0
    lengths = rows.train[:, 1]
    cut = np.minimum(rows.documents, work.request.seq_len) if work.is_packed else lengths
    return DataProfile(
        source="prepared",
        num_rows=len(rows.train),
        num_tokens=int(lengths.sum()),
        longest_row=int(lengths.max()),
        is_packed=work.is_packed,
        fingerprint=work.fingerprint,
        vocab_size=tokenizer.vocab_size if tokenizer else work.request.vocab_size,
        num_eval_rows=len(rows.held_out),
        num_eval_tokens=int(rows.held_out[:, 1].sum()),
        eval_unigram_entropy_nats=unigram_entropy_nats(TokenRows.open(work.folder, "eval")) if has_eval else None,
        lengths=length_histogram(lengths),
        num_documents=len(rows.documents),
        mean_document_tokens=float(rows.documents.mean()),
        mean_cut_tokens=float(cut.mean()),
        documents=length_histogram(rows.documents),
        batch_widths=batch_widths(cut, seq_len=work.request.seq_len),
        skipped_rows=census.num_bad_rows,
        cut_rows=rows.num_cut,
        dropped_tokens=rows.num_dropped_tokens,
        notes=tuple(_notes(work.request, census, rows)),
    )


def _tokenizer(work: _Work, census: Census) -> TextTokenizer | None:
    """The tokenizer, with its files in the folder; None for data that came tokenised without one."""
    request = work.request
    if request.tokenizer is not None:
        loaded = load_tokenizer(Path(request.tokenizer))
        _check_vocabulary(loaded, request)
        copy_tokenizer(loaded, Path(request.tokenizer), work.folder / "tokenizer")
        return loaded
    if work.sources.reading.format is DataFormat.TOKENS:
        return None
    work.sources.report(f"making a tokenizer of {request.vocab_size} tokens")
    trained = _interruptibly(lambda: train_tokenizer(_texts_to_train_on(work, census), vocab_size=request.vocab_size))
    write_trained_tokenizer(trained, work.folder / "tokenizer")
    return trained


def _interruptibly(call: Callable[[], T]) -> T:
    """`call` in a thread: it is seconds of native code, in which the main thread would not hear a signal."""
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        future = executor.submit(call)
        while not wait([future], timeout=0.1).done:  # a signal that comes just before a wait does not end it
            pass
        return future.result()
    finally:
        executor.shutdown(wait=False)


def _texts_to_train_on(work: _Work, census: Census) -> Iterator[str]:
    """The training side; of very much text a sample that depends on nothing but the text."""
    threshold = int(min(1.0, TOKENIZER_TRAINING_CHARS / census.num_chars) * 2**64)
    for unit in units_of(work.sources, census.split, "reading"):
        if isinstance(unit.content, str) and not unit.is_held_out and content_hash(unit.content) < threshold:
            yield unit.content


def _check_vocabulary(loaded: TextTokenizer, request: PrepareRequest) -> None:
    """InputError for the tokenizer of another model; tokens added to one count only when the text holds them."""
    num_plain = loaded.tokenizer.get_vocab_size(with_added_tokens=False)
    highest = max(num_plain - 1, loaded.eos_id, *loaded.document_prefix)
    if highest >= request.vocab_size:
        raise InputError(
            f"model.tokenizer: {request.tokenizer} has ids up to {highest}, "
            f"the model's vocabulary of {request.vocab_size} ends at {request.vocab_size - 1};\n"
            "use the tokenizer that belongs to the model"
        )


def _write_rows(work: _Work, census: Census, tokenizer: TextTokenizer | None) -> Rows:
    dtype = np.dtype("<u2" if work.request.vocab_size <= 2**16 else "<u4")
    with (work.folder / "tokens.bin").open("wb") as stream, (work.folder / "starts.bin").open("wb") as starts:
        writer = RowWriter(stream, dtype, _row_shape(work, tokenizer), starts=starts)
        for batch in _batches(units_of(work.sources, census.split, "tokenising")):
            for unit, ids in zip(batch, _encoded(batch, tokenizer, work.request), strict=True):
                writer.add(ids, opens_document=unit.opens_document, is_held_out=unit.is_held_out, weight=unit.weight)
        rows = writer.finish()
    np.save(work.folder / "train_rows.npy", rows.train)
    np.save(work.folder / "eval_rows.npy", rows.held_out)
    layout = TokenLayout(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=rows.num_tokens,
        seq_len=work.request.seq_len,
        pad_id=tokenizer.pad_id if tokenizer else 0,
        num_starts=rows.num_starts,
    )
    codec.write(work.folder / "layout.json", layout)
    return rows


def _row_shape(work: _Work, tokenizer: TextTokenizer | None) -> RowShape:
    """Text gets bos and eos; rows that came tokenised only the eos that packing needs between them."""
    is_text = work.sources.reading.format is DataFormat.TEXT
    return RowShape(
        seq_len=work.request.seq_len,
        is_packed=work.is_packed,
        eos_id=tokenizer.eos_id if tokenizer and (is_text or work.is_packed) else None,
        document_prefix=tokenizer.document_prefix if tokenizer and is_text else (),
    )


def _batches(stream: Iterable[Unit]) -> Iterator[list[Unit]]:
    batch: list[Unit] = []
    size = 0
    for unit in stream:
        batch.append(unit)
        size += len(unit.content)
        if size >= BATCH_CHARS or len(batch) >= BATCH_UNITS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(batch: Sequence[Unit], tokenizer: TextTokenizer | None, request: PrepareRequest) -> list[list[int]]:
    texts = [unit.content for unit in batch if isinstance(unit.content, str)]
    if tokenizer is None or not texts:
        return [unit.content for unit in batch if isinstance(unit.content, list)]
    encoded = tokenizer.encode(texts)
    highest = max((max(ids) for ids in encoded if ids), default=0)
    if highest >= request.vocab_size:
        raise InputError(
            f"model.tokenizer: the text holds {tokenizer.tokenizer.id_to_token(highest)!r}, id {highest}; "
            f"the model's vocabulary of {request.vocab_size} ends at {request.vocab_size - 1}"
        )
    return encoded


def _check_enough(request: PrepareRequest, rows: Rows) -> None:
    """InputError if a side that is needed has no row."""
    if not len(rows.train):
        raise InputError(
            f"data.train: the text has too few tokens for one row of {request.seq_len} ({rows.num_dropped_tokens});\n"
            "give more of it, a lower train.seq_len, or data.packing=false"
        )
    if not len(rows.held_out) and (request.eval_share is not None or request.eval_files):
        asked = "its source" if request.eval_share is None else f"{request.eval_share:.3%} of the text"
        raise InputError(
            f"data.eval: {asked} has too few tokens for one row of {request.seq_len};\n"
            "hold out more (data.eval=10%), or give a lower train.seq_len, data.packing=false or data.eval=none"
        )


def _notes(request: PrepareRequest, census: Census, rows: Rows) -> Iterator[str]:
    if census.num_bad_rows:
        yield f"{census.num_bad_rows} bad rows were left out: {census.shown_bad_rows}"
    if rows.num_cut:
        yield f"{rows.num_cut} documents were longer than {request.seq_len} tokens and lost their end"
    if census.split.piece_chars:
        yield f"few documents: the held-out part is pieces of {census.split.piece_chars} characters out of them"


def main(arguments: Sequence[str]) -> int:
    """Answers the request in the first file with a profile in the second; the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m trainer.runtime.prepare REQUEST.json ANSWER.json\n")
        return ExitCode.INPUT
    try:
        request = codec.read(Path(arguments[0]), PrepareRequest)
        codec.write(Path(arguments[1]), _prepare_or_explain(request))
    except ShardwiseError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return ExitCode.DONE


def _prepare_or_explain(request: PrepareRequest) -> DataProfile:
    """`prepare`, with what the system refuses as an EnvironmentFaultError."""
    try:
        return prepare(request, _say)
    except OSError as error:
        remedy = "free some space or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        place = error.filename or request.cache_root
        raise EnvironmentFaultError(f"{place}: {error.strerror}; {remedy}name another cache folder") from error


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Ends this process, cleaning up, when the one that started it is gone or asks for it."""
    signal.signal(signal.SIGTERM, _raise_asked_to_end)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _raise_asked_to_end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    end_with_parent()
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as ending:
        os._exit(int(ending.code or 0))  # a thread may still be in native code; nothing is left to clean up
