"""Turns sources into rows of token ids, once: `python -m shardwise.trainer.runtime.data.prepare REQUEST RESULT`.

Three passes over the files, each in bounded memory. The first computes digests, which with the tokenizer and the
settings are the fingerprint: a prepared folder of that name ends the work. The second finds the rows that cannot be
used and chooses the split. The third tokenises, on all cores, and writes rows. A tokenizer that is trained on the data
is trained between the two, on the training side only. Of a stream (`window_bytes`) only the first window is prepared
here; it is read once, into memory.

Progress goes to stdout, one line a second at most, errors to stderr, with their exit code.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwise.trainer.runtime.data.cache import (
    CACHE_FORMAT,
    TokenRows,
    batch_widths,
    length_histogram,
    prepared_once,
    unigram_entropy_nats,
)
from shardwise.trainer.runtime.data.chat.rendering import (
    PreferenceIds,
    Rendered,
    RenderSettings,
    rendered,
    worker_count,
)
from shardwise.trainer.runtime.data.chat.template import (
    ChatTemplate,
    load_chat_template,
    missing_tokens,
    write_chat_template,
    written_tokens,
)
from shardwise.trainer.runtime.data.row_writer import Rows, RowShape, RowWriter
from shardwise.trainer.runtime.data.sources import TokenIds, size_of, texts_of
from shardwise.trainer.runtime.data.sources.files import BadRow, holds_rows
from shardwise.trainer.runtime.data.sources.rows import LABELS
from shardwise.trainer.runtime.data.sources.scan import (
    CheckedFile,
    RowScan,
    Sources,
    Unit,
    check_sources,
    content_hash,
    scan_rows,
    units_of,
)
from shardwise.trainer.runtime.data.tokenizer import (
    TextTokenizer,
    add_special_tokens,
    copy_tokenizer,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    write_trained_tokenizer,
)
from shardwise.trainer.runtime.run.process import report_progress, run_request_and_exit
from shardwise.trainer.spec.data.profile import (
    DataProfile,
    PrepareRequest,
    SourceFile,
    content_suffix,
    copies_note,
)
from shardwise.trainer.spec.data.shapes import SHAPES, Encoding, ShapeFacts, check_shape
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import DataFormat

TOKENIZER_TRAINING_CHARS = 100_000_000
RENDERING_FORMAT = 4  # another for each change of what is learned of the same rows
BATCH_CHARS = 2**20
BATCH_UNITS = 1024
NUM_KEYS_SHOWN = 20
T = TypeVar("T")


class Work(NamedTuple):
    """One preparation: the request, its sources, and the folder that it fills."""

    request: PrepareRequest
    sources: Sources
    fingerprint: str
    folder: Path

    @property
    def is_packed(self) -> bool:
        return is_packed(self.request, self.shape)

    @property
    def facts(self) -> ShapeFacts:
        return SHAPES[self.shape]

    @property
    def shape(self) -> DataFormat:
        return self.sources.reading.format


def is_packed(request: PrepareRequest, shape: DataFormat) -> bool:
    """The job's setting, or the default: rows of token ids and pairs are not packed."""
    return SHAPES[shape].packs_by_default if request.packing is None else request.packing


def prepare(request: PrepareRequest, report: Callable[[str], None]) -> DataProfile:
    """The profile of the prepared data; `report` is given lines of progress."""
    if not request.files:
        raise InputError("data.train: names no file; give a file, a folder or python-stdlib")
    if request.seq_len < 2:
        raise InputError(f"train.seq_len: a row of {request.seq_len} tokens has no target; 2 are the least")
    if request.window_bytes is not None and request.drop_copies:
        raise InputError(
            "data.drop_copies: a stream is not known as a whole before it is learned; use data.streaming=false"
        )
    if request.window_bytes is not None:
        from shardwise.trainer.runtime.data.stream.windows import prepare_first_window  # which builds by this module

        return prepare_first_window(request, report)
    return prepare_cached(request, check_sources(request, report), lambda work: build(work).profile)


def prepare_cached(request: PrepareRequest, sources: Sources, build: Callable[[Work], DataProfile]) -> DataProfile:
    check_shape(sources.reading.format, packing=request.packing, loss_on=request.loss_on)
    fingerprint = _fingerprint(request, sources)
    root = Path(request.cache_root, "data")
    profile = prepared_once(
        root, fingerprint, lambda folder: build(Work(request, sources, fingerprint, folder)), sources.report
    )
    return replace(profile, cache_dir=str(root / fingerprint))


def _fingerprint(request: PrepareRequest, sources: Sources) -> str:
    """Digest of the content of the files (of a stream, of their listing), the tokenizer and every setting of rows.

    Paths are not part of it.
    """
    template = _template(request, sources.reading.format)
    settings: dict[str, object] = {
        "cache_format": CACHE_FORMAT,
        "train": [_identity(file) for file in sources.train],
        "held_out": [_identity(file) for file in sources.held_out],
        "tokenizer": "train" if request.tokenizer is None else tokenizer_digest(Path(request.tokenizer)).hex(),
        "eval_share": request.eval_share,
        "format": sources.reading.format,
        "fields": sorted(request.fields.items()),
        "is_packed": is_packed(request, sources.reading.format),
        "bad_rows": [request.bad_rows, request.bad_rows_max],
        "seq_len": request.seq_len,
        "vocab_size": request.vocab_size,
        "loss_on": request.loss_on,
        "template": None if template is None else (template.source, template.tool_source),
        "format_row": None if sources.reading.format_row is None else request.extension,
    }
    if any(map(holds_rows, (*request.files, *request.eval_files))):
        settings["rendering"] = RENDERING_FORMAT
    if request.drop_copies:
        settings["drop_copies"] = True
    if request.window_bytes is not None:
        settings["stream"] = [request.window_bytes, [_identity_in_stream(file) for file in request.files]]
    return blake2b(msgspec.json.encode(settings), digest_size=16).hexdigest()


def _identity(file: CheckedFile) -> tuple[str, str, float]:
    """The same bytes as .csv and as .tsv are other rows; texts are texts."""
    suffix = content_suffix(file.source.path) if holds_rows(file.source) else ""
    return file.digest.hex(), suffix, file.source.weight


def _identity_in_stream(file: SourceFile) -> tuple[str, int, int, float, int]:
    """Name, size and time or commit of a file of a stream, whose content is not read."""
    name, mtime_ns = (file.hub, 0) if file.hub is not None else (Path(file.path).name, file.mtime_ns)
    return name, file.size_bytes, mtime_ns, file.weight, file.source


def _template(request: PrepareRequest, shape: DataFormat) -> ChatTemplate | None:
    """The chat template of rows that hold messages; None where there is none, or no use for it."""
    if SHAPES[shape].encoding is not Encoding.RENDERED:
        return None
    return load_chat_template(request.chat_template, None if request.tokenizer is None else Path(request.tokenizer))


class Built(NamedTuple):
    """Profile of the rows, and the result of the scan of every row."""

    profile: DataProfile
    scan: RowScan


def build(work: Work) -> Built:
    """Fills the folder of the work."""
    scan = scan_rows(work.request, work.sources)
    tokenizer = _tokenizer(work, scan)
    rows = write_rows(work, scan, tokenizer)
    _check_enough(work.request, rows)
    per_example = work.facts.rows_per_example
    has_entropy = len(rows.held_out) > 0 and per_example == 1
    lengths = rows.train[:, 1]
    cut = np.minimum(rows.documents, work.request.seq_len) if work.is_packed else lengths
    widths = lengths.reshape(-1, per_example).max(axis=1) if per_example > 1 else cut
    profile = DataProfile(
        source="prepared",
        format=work.shape,
        num_rows=len(rows.train) // per_example,
        num_tokens=int(lengths.sum()),
        num_targets=rows.num_targets,
        longest_row=int(lengths.max()),
        is_packed=work.is_packed,
        packing_efficiency=rows.packing_efficiency if work.is_packed else None,
        fingerprint=work.fingerprint,
        vocab_size=tokenizer.vocab_size if tokenizer else work.request.vocab_size,
        num_eval_rows=len(rows.held_out) // per_example,
        num_eval_tokens=int(rows.held_out[:, 1].sum()),
        num_eval_copies=0 if scan.copies is None or work.request.drop_copies else scan.copies.num_learned,
        eval_unigram_entropy_nats=unigram_entropy_nats(TokenRows.open(work.folder, "eval")) if has_entropy else None,
        lengths=length_histogram(lengths),
        num_documents=len(rows.documents) // per_example,
        mean_document_tokens=float(rows.documents.mean()),
        mean_cut_tokens=float(cut.mean()),
        documents=length_histogram(rows.documents),
        batch_widths=batch_widths(widths, seq_len=work.request.seq_len),
        skipped_rows=scan.bad_rows.num,
        cut_rows=rows.num_cut,
        dropped_tokens=rows.num_dropped_tokens,
        notes=tuple(_notes(work, scan, rows)),
    )
    return Built(profile, scan)


def _tokenizer(work: Work, scan: RowScan) -> TextTokenizer | None:
    """The tokenizer, with its files in the folder; None for data that came tokenised without one."""
    request, folder = work.request, work.folder / "tokenizer"
    template = _template(request, work.shape)
    if request.tokenizer is not None:
        tokenizer = load_tokenizer(Path(request.tokenizer))
        _check_vocabulary(tokenizer, request)
        copy_tokenizer(tokenizer, Path(request.tokenizer), folder)
    elif work.facts.encoding is Encoding.TOKENS:
        return None
    else:
        reserved = () if template is None else written_tokens(template)
        work.sources.report(f"making a tokenizer of {request.vocab_size} tokens")
        texts, size = _texts_to_train_on(work, scan), request.vocab_size - len(reserved)
        tokenizer = _interruptibly(lambda: train_tokenizer(texts, vocab_size=size))
        write_trained_tokenizer(tokenizer, folder)
    if template is not None:
        _apply_template(template, tokenizer, request, folder)
    return tokenizer


def _apply_template(template: ChatTemplate, tokenizer: TextTokenizer, request: PrepareRequest, folder: Path) -> None:
    """Adds the template's tokens to the tokenizer, and the template that the job names to its folder."""
    missing = missing_tokens(template, tokenizer)
    if missing:
        add_special_tokens(tokenizer, missing, folder)
        if tokenizer.vocab_size > request.vocab_size:
            raise InputError(
                f"data.chat_template: its tokens {', '.join(missing)} are new to the tokenizer, which then has "
                f"{tokenizer.vocab_size};\nthe model's vocabulary has room for {request.vocab_size}"
            )
    if request.chat_template is not None:
        write_chat_template(template, folder)


def _interruptibly(call: Callable[[], T]) -> T:
    """Runs seconds of native code in a thread, as Python handles no signal in the meantime."""
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        future = executor.submit(call)
        while not wait([future], timeout=0.1).done:  # a signal that comes just before a wait does not end it
            pass
        return future.result()
    finally:
        executor.shutdown(wait=False)


def _texts_to_train_on(work: Work, scan: RowScan) -> Iterator[str]:
    """Texts of the training side; of very much text a sample by content."""
    threshold = int(min(1.0, TOKENIZER_TRAINING_CHARS / scan.num_chars) * 2**64)
    for unit in units_of(work.sources, scan.split, "reading"):
        if not unit.is_held_out and content_hash(unit.content) < threshold:
            yield from texts_of(unit.content)


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


def _check_enough(request: PrepareRequest, rows: Rows) -> None:
    """InputError if a side that is needed has no row."""
    if not len(rows.train):
        raise InputError(
            f"data.train: {len(rows.documents)} documents give no row: one needs two tokens,\n"
            "and a weight below 1 selects that share of the rows; give more text, or a higher weight"
        )
    if not len(rows.held_out) and (request.eval_share is not None or request.eval_files):
        part = "its source" if request.eval_share is None else f"{request.eval_share:.3%} of the text"
        raise InputError(
            f"data.eval: {part} has no document of two tokens, so there is nothing to predict;\n"
            "hold out more (data.eval=10%), or give data.eval=none"
        )


def _notes(work: Work, scan: RowScan, rows: Rows) -> Iterator[str]:
    request = work.request
    if request.revisions:
        yield f"from the hub: {', '.join(request.revisions)}"
    if scan.bad_rows.num:
        yield f"{scan.bad_rows.num} bad rows were skipped: {scan.bad_rows}"
    yield from _notes_on_rows(scan)
    yield from _notes_on_copies(scan, is_dropped=request.drop_copies)
    if rows.num_cut:
        yield f"{rows.num_cut} documents were longer than {request.seq_len} tokens and lost their end"
    if scan.split.piece_chars:
        yield f"few documents: the held-out part is pieces of {scan.split.piece_chars} characters out of them"
    if scan.num_plain and _template(request, work.shape) is not None:
        columns = {name: request.fields.get(name, name) for name in ("prompt", "completion")}
        remedy = (
            "give them as messages, [{role: user, content: ...}]"
            if work.facts.rows_per_example > 1
            else f"data.fields={{instruction: {columns['prompt']}, output: {columns['completion']}}}"
        )
        yield (
            f"{scan.num_plain} prompts with their answers are plain text, to which the chat template is not applied; "
            f"for turns of a chat: {remedy}"
        )


def _notes_on_rows(scan: RowScan) -> Iterator[str]:
    """What of the rows is no part of what is learned from."""
    if scan.left_out:
        is_kto = any(mark.startswith(LABELS) for mark in scan.left_out)
        kto = "; KTO, which also learns from such answers, is not supported" if is_kto else ""
        yield f"rows that are not to be learned were left out: {_counted(scan.left_out)}{kto}"
    if scan.shortened:
        yield f"the chat template leaves these out of earlier answers, as at inference: {_counted(scan.shortened)}"
    if scan.unread:
        yield f"not read, as no part of the text: {_counted(scan.unread)}"


def _notes_on_copies(scan: RowScan, *, is_dropped: bool) -> Iterator[str]:
    """Held-out rows that are training rows as well."""
    copies = scan.copies
    if copies is None or not copies.num_learned:
        return
    if is_dropped:
        yield f"{copies.num_train:,} rows of data.train are also in data.eval and are not learned (data.drop_copies)"
    else:
        yield copies_note(copies.num_learned, of=copies.num_held_out)


def _counted(counts: Counter[str]) -> str:
    """The most frequent keys with their number of rows."""
    shown = [f"{key} ({count:,} row{'s' if count > 1 else ''})" for key, count in counts.most_common(NUM_KEYS_SHOWN)]
    more = f" and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
    return f"{', '.join(shown)}{more}"


def write_rows(work: Work, scan: RowScan, tokenizer: TextTokenizer | None) -> Rows:
    """Every example that can be used, as rows; InputError where too many turn out not to be."""
    dtype, num_rows = np.dtype("<u2" if work.request.vocab_size <= 2**16 else "<u4"), scan.num_rows
    with RowWriter(work.folder, dtype, _row_shape(work, tokenizer)) as writer:
        for unit, made in _rendered(work, scan, tokenizer):
            if isinstance(made, str):
                scan.bad_rows.add(BadRow(unit.where, made))
            elif isinstance(made, PreferenceIds):
                writer.add_pair(made.chosen, made.rejected, is_held_out=unit.is_held_out, weight=unit.weight)
            else:
                writer.add(
                    made.ids,
                    opens_document=unit.opens_document,
                    is_held_out=unit.is_held_out,
                    weight=unit.weight,
                    is_learned=made.is_learned,
                )
        scan.bad_rows.check(work.request, num_rows=num_rows)
        return writer.finish()


def _row_shape(work: Work, tokenizer: TextTokenizer | None) -> RowShape:
    """Text gets bos and eos; rows that came tokenised only the eos that packing needs between them.

    What was rendered has its own ends.
    """
    is_text = work.facts.encoding is Encoding.TEXT
    needs_eos = is_text or (work.facts.encoding is Encoding.TOKENS and work.is_packed)
    return RowShape(
        seq_len=work.request.seq_len,
        is_packed=work.is_packed,
        eos_id=tokenizer.eos_id if tokenizer and needs_eos else None,
        document_prefix=tokenizer.document_prefix if tokenizer and is_text else (),
        rows_per_example=work.facts.rows_per_example,
        pad_id=tokenizer.pad_id if tokenizer else 0,
    )


def _rendered(work: Work, scan: RowScan, tokenizer: TextTokenizer | None) -> Iterator[tuple[Unit, Rendered]]:
    """Every unit in order with its token ids, or the reason why it has none."""
    batches = _batches(units_of(work.sources, scan.split, "tokenising"))
    request = work.request
    if tokenizer is None or work.facts.encoding is Encoding.TOKENS:
        for batch in batches:
            yield from ((unit, unit.content) for unit in batch if isinstance(unit.content, TokenIds))
    elif work.facts.encoding is Encoding.TEXT:
        for batch in batches:
            encoded = tokenizer.encode([unit.content for unit in batch if isinstance(unit.content, str)])
            for unit, ids in zip(batch, encoded, strict=True):
                yield unit, _known(TokenIds(ids), tokenizer, request)
    else:
        settings = RenderSettings(str(work.folder / "tokenizer"), None, request.loss_on, request.seq_len)
        pairs = ((batch, [unit.content for unit in batch]) for batch in batches)
        for batch, results in rendered(pairs, settings, num_workers=worker_count(scan.num_documents)):
            scan.unread.update(results.unread.keys)
            scan.shortened.update(results.unread.shortened)
            for unit, result in zip(batch, results.examples, strict=True):
                yield unit, _known(result, tokenizer, request)


def _known(made: Rendered, tokenizer: TextTokenizer, request: PrepareRequest) -> Rendered:
    """The same; InputError for a token that the model has no embedding for."""
    sequences = () if isinstance(made, str) else made if isinstance(made, PreferenceIds) else (made,)
    highest = max((max(sequence.ids, default=0) for sequence in sequences), default=0)
    if highest >= request.vocab_size:
        raise InputError(
            f"model.tokenizer: the text holds {tokenizer.tokenizer.id_to_token(highest)!r}, id {highest}; "
            f"the model's vocabulary of {request.vocab_size} ends at {request.vocab_size - 1}"
        )
    return made


def _batches(stream: Iterable[Unit]) -> Iterator[list[Unit]]:
    batch: list[Unit] = []
    size = 0
    for unit in stream:
        batch.append(unit)
        size += size_of(unit.content)
        if size >= BATCH_CHARS or len(batch) >= BATCH_UNITS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _prepare_or_explain(request: PrepareRequest) -> DataProfile:
    """As `prepare`; an OSError becomes an EnvironmentFaultError."""
    try:
        return prepare(request, report_progress)
    except OSError as error:
        remedy = "free some space or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        place = error.filename or request.cache_root
        raise EnvironmentFaultError(f"{place}: {error.strerror}; {remedy}name another cache folder") from error


if __name__ == "__main__":
    try:
        run_request_and_exit(PrepareRequest, _prepare_or_explain)
    except SystemExit as ending:
        os._exit(int(ending.code or 0))  # a thread may still be in native code; nothing is left to clean up
