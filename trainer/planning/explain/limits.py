"""How far a machine goes, in words, and as a small JSON object."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from shardwise.trainer.planning.page.content import Bars, Section, Sentence, Table
from shardwise.trainer.planning.search.limits_search import Rung
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.units import format_bytes, format_count


class Question(StrEnum):
    """Questions about the limits of a machine."""

    LONGEST_SEQ = "longest_seq"
    LARGEST_BATCH = "largest_batch"
    LARGEST_MODEL = "largest_model"


_TITLES = {
    Question.LONGEST_SEQ: "the longest sequence that fits, at micro batch 1",
    Question.LARGEST_BATCH: "the largest micro batch that fits, at {seq_len:,} tokens a sequence",
    Question.LARGEST_MODEL: "the largest preset that fits, at {seq_len:,} tokens a sequence",
}
_HEADS = {
    Question.LONGEST_SEQ: "tokens",
    Question.LARGEST_BATCH: "sequences",
    Question.LARGEST_MODEL: "parameters",
}


def limits_section(
    question: Question, rungs: Sequence[Rung], *, machine: str, seq_len: int, shape: ModelShape
) -> Section:
    """The ladder of each method, from what costs nothing to what reaches farthest."""
    title = f"{_TITLES[question].format(seq_len=seq_len)}, on {machine}"
    if not rungs:
        return Section(title=title, blocks=(Sentence(text="nothing fits, by no method that may be taken"),))
    rows: list[tuple[str, ...]] = [
        ("method", _HEADS[question], "recompute", "memory", "tokens/s", "time a token", "strategy")
    ]
    rows += [_row(question, rung) for rung in rungs]
    bars = tuple(
        (f"{rung.method}, {rung.candidate.strategy.name}", float(rung.size), _size(question, rung)) for rung in rungs
    )
    notes = tuple(Sentence(text=text) for text in _notes(question, rungs, shape))
    table = Table(rows=tuple(rows), right=(1, 3, 4, 5), wide=6)
    return Section(title=title, blocks=(table, Bars(caption=_HEADS[question], rows=bars), *notes))


def limits_json(question: Question, rungs: Sequence[Rung], *, machine: str) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "question": str(question),
        "machine": machine,
        "answers": [
            {
                "method": str(rung.method),
                _KEYS[question]: rung.size,
                "preset": rung.name,
                "strategy": rung.candidate.strategy.name,
                "checkpointing": str(rung.candidate.checkpointing),
                "activation_offload": rung.candidate.activation_offload,
                "is_exact": rung.candidate.strategy.is_exact,
                "need_bytes": rung.candidate.memory.need_bytes,
                "tokens_per_s": rung.candidate.speed.tokens_per_s_per_gpu * rung.candidate.num_ranks,
                "slowdown": rung.slowdown,
            }
            for rung in rungs
        ],
    }


_KEYS = {
    Question.LONGEST_SEQ: "seq_len",
    Question.LARGEST_BATCH: "micro_batch",
    Question.LARGEST_MODEL: "num_parameters",
}


def _row(question: Question, rung: Rung) -> tuple[str, ...]:
    candidate = rung.candidate
    strategy = candidate.strategy.name + ("" if candidate.strategy.is_exact else " (changes the update)")
    retained = ", kept in host RAM" if candidate.activation_offload else ""
    return (
        str(rung.method),
        _size(question, rung),
        f"{candidate.checkpointing}{retained}",
        format_bytes(candidate.memory.need_bytes),
        f"{candidate.speed.tokens_per_s_per_gpu * candidate.num_ranks:,.0f}",
        "-" if question is Question.LARGEST_MODEL else f"{rung.slowdown:.2f}x",
        strategy,
    )


def _size(question: Question, rung: Rung) -> str:
    if question is Question.LARGEST_MODEL:
        return f"{rung.name}, {format_count(rung.size)}"
    return f"{rung.size:,}"


def _notes(question: Question, rungs: Sequence[Rung], shape: ModelShape) -> list[str]:
    if question is Question.LARGEST_MODEL:
        return []
    notes = []
    if question is Question.LONGEST_SEQ:
        notes.append("time a token is compared at the job's own sequence length; tokens/s is at the length shown")
        if shape.max_positions is not None and any(rung.size > shape.max_positions for rung in rungs):
            notes.append(
                f"the model has {shape.max_positions:,} positions: train.seq_len cannot be more, whatever fits"
            )
    largest = max(rung.candidate.num_ranks * rung.candidate.micro_batch * rung.candidate.seq_len for rung in rungs)
    notes.append(
        f"the largest answer puts {largest:,} tokens through the devices at once: train.tokens_per_step must be as many"
    )
    return notes
