"""Settings that name rows: `data.train`, one source or several with weights, and `data.eval`."""

from collections.abc import Mapping
from typing import NamedTuple

from trainer.spec.job import DataSource
from trainer.spec.job_kinds import HintError, Kind, read_text
from trainer.spec.job_quantities import number, read_share, write_share


class EvalSplit(NamedTuple):
    """What `data.eval` says; both are None where evaluation is off."""

    share: float | None
    source: str | None


def sources() -> Kind:
    """One source of rows, or a list of sources, each with an optional weight."""
    weight = number(above=0)

    def read_one(entry: object, position: int) -> DataSource:
        if isinstance(entry, str):
            return DataSource(source=read_text(entry))
        if not isinstance(entry, Mapping) or "source" not in entry or not set(entry) <= {"source", "weight"}:
            raise HintError(f"entry {position} is not {{source: ..., weight: 1.0}}")
        try:
            return DataSource(source=read_text(entry["source"]), weight=weight.read(entry.get("weight", 1.0)))
        except ValueError:
            raise HintError(f"entry {position} needs a source and {weight.expected} as its weight") from None

    def read(value: object) -> tuple[DataSource, ...]:
        if not isinstance(value, list | tuple):
            value = [value] if isinstance(value, str) else []
        if not value:
            raise ValueError
        return tuple(read_one(entry, position) for position, entry in enumerate(value, start=1))

    one = {"type": "string", "minLength": 1}
    weighted = {
        "type": "object",
        "properties": {"source": one, "weight": dict(weight.schema)},
        "required": ["source"],
        "additionalProperties": False,
    }
    return Kind(
        expected="a file, a folder, a hub id, or a list of {source: ..., weight: 1.0}",
        read=read,
        write=_write_sources,
        schema={"anyOf": [one, {"type": "array", "minItems": 1, "items": {"anyOf": [one, weighted]}}]},
        is_text=True,
    )


def eval_split() -> Kind:
    """A share of train, a source of its own, or none."""

    def read(value: object) -> EvalSplit:
        if value is False or value == "none":
            return EvalSplit(None, None)
        if isinstance(value, int | float) and 0 < value < 100:
            raise HintError(f'did you mean "{value:g}%"?' if value >= 1 else f'did you mean "{write_share(value)}"?')
        checked = read_text(value)
        if not checked.strip().endswith("%"):
            return EvalSplit(None, checked)
        split = EvalSplit(read_share(checked), None)
        if not 0 < (split.share or 0) < 1:
            raise HintError("a share lies between 0% and 100%; none turns evaluation off")
        return split

    return Kind(
        expected='a share of train such as "1%", a source of its own, or none',
        read=read,
        write=lambda value: (
            write_share(value.share) if value.share is not None else "none" if value.source is None else value.source
        ),
        schema={"anyOf": [{"type": "string", "minLength": 1}, {"const": False}]},
        is_text=True,
    )


def _write_sources(value: tuple[DataSource, ...]) -> object:
    if len(value) == 1 and value[0].weight == 1.0:
        return value[0].source
    return [{"source": entry.source, "weight": entry.weight} for entry in value]
