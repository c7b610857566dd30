"""From what can be used of the sources to rows on disk: tokenised in order, checked, cut or packed by the writer."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.runtime.data.chat.render_workers import RenderSettings, rendered, worker_count
from trainer.runtime.data.chat.rendering import PreferenceIds, Rendered
from trainer.runtime.data.held_out import Unit
from trainer.runtime.data.row_writer import Rows, RowShape, RowWriter
from trainer.runtime.data.sources.census import Census, Sources, units_of
from trainer.runtime.data.sources.examples import TokenIds, size_of
from trainer.runtime.data.sources.source_streams import BadRow
from trainer.runtime.data.tokenizer import TextTokenizer
from trainer.spec.data.request import PrepareRequest
from trainer.spec.errors import InputError
from trainer.spec.job.sections import DataFormat

BATCH_CHARS = 2**20
BATCH_UNITS = 1024


class Work(NamedTuple):
    """One preparation: what is asked, of what, and the folder that it fills."""

    request: PrepareRequest
    sources: Sources
    fingerprint: str
    folder: Path

    @property
    def is_packed(self) -> bool:
        return is_packed(self.request, self.shape)

    @property
    def shape(self) -> DataFormat:
        """What the rows are."""
        return self.sources.reading.format


def is_packed(request: PrepareRequest, shape: DataFormat) -> bool:
    """Packed unless the job says otherwise; rows that came tokenised stay the rows they are, and pairs are two."""
    return shape not in (DataFormat.TOKENS, DataFormat.PREFERENCE) if request.packing is None else request.packing


def write_rows(work: Work, census: Census, tokenizer: TextTokenizer | None) -> Rows:
    """Every example that can be used, as rows; InputError where too many turn out not to be."""
    dtype, num_rows = np.dtype("<u2" if work.request.vocab_size <= 2**16 else "<u4"), census.num_rows
    with RowWriter(work.folder, dtype, _row_shape(work, tokenizer)) as writer:
        for unit, made in _rendered(work, census, tokenizer):
            if isinstance(made, str):
                census.bad_rows.add(BadRow(unit.where, made))
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
        census.bad_rows.check(work.request, num_rows=num_rows)
        return writer.finish()


def _row_shape(work: Work, tokenizer: TextTokenizer | None) -> RowShape:
    """Text gets bos and eos; rows that came tokenised only the eos that packing needs between them.

    What was rendered has its own ends.
    """
    is_text = work.shape is DataFormat.TEXT
    needs_eos = is_text or (work.shape is DataFormat.TOKENS and work.is_packed)
    return RowShape(
        seq_len=work.request.seq_len,
        is_packed=work.is_packed,
        eos_id=tokenizer.eos_id if tokenizer and needs_eos else None,
        document_prefix=tokenizer.document_prefix if tokenizer and is_text else (),
        rows_per_example=2 if work.shape is DataFormat.PREFERENCE else 1,
        pad_id=tokenizer.pad_id if tokenizer else 0,
    )


def _rendered(work: Work, census: Census, tokenizer: TextTokenizer | None) -> Iterator[tuple[Unit, Rendered]]:
    """Every unit in order with its token ids, or with the reason why it has none."""
    batches = _batches(units_of(work.sources, census.split, "tokenising"))
    request = work.request
    if tokenizer is None or work.shape is DataFormat.TOKENS:
        for batch in batches:
            yield from ((unit, unit.content) for unit in batch if isinstance(unit.content, TokenIds))
    elif work.shape is DataFormat.TEXT:
        for batch in batches:
            encoded = tokenizer.encode([unit.content for unit in batch if isinstance(unit.content, str)])
            for unit, ids in zip(batch, encoded, strict=True):
                yield unit, _known(TokenIds(ids), tokenizer, request)
    else:
        settings = RenderSettings(str(work.folder / "tokenizer"), None, request.loss_on, request.seq_len)
        pairs = ((batch, [unit.content for unit in batch]) for batch in batches)
        for batch, answers in rendered(pairs, settings, num_workers=worker_count(census.num_documents)):
            for unit, answer in zip(batch, answers, strict=True):
                yield unit, _known(answer, tokenizer, request)


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
