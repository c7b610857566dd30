"""Settings that name rows: `data.train`, one source or several with weights, and `data.eval`."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from shardwise.trainer.spec.job.kinds import TEXT_SCHEMA, HintError, Kind, number, read_share, read_text, write_share
from shardwise.trainer.spec.value import Value

_SHAPE_OF_SOURCE = "{source: ..., weight: 1.0, subset: ..., split: ...}"
_SHAPE_OF_EVAL = "{source: ..., subset: ..., split: ...}"


class DataSource(Value, frozen=True, kw_only=True):
    """One source of rows and its sampling weight."""

    source: str  # a file, a folder, python-stdlib, or ORG/NAME[@REVISION] of the hub
    weight: float = 1.0
    subset: str | None = None  # of a data set that has several
    split: str | None = None  # None: train


class EvalSplit(NamedTuple):
    """The fields that `data.eval` fills; share and source are both None if evaluation is off."""

    share: float | None
    source: str | None
    subset: str | None = None
    split: str | None = None


def sources() -> Kind:
    """One source of rows, or a list of sources, each with an optional weight, subset and split."""
    weight = number(above=0)

    def read_one(entry: object, position: int) -> DataSource:
        if isinstance(entry, str):
            return DataSource(source=read_text(entry))
        if not _is_source(entry, {"source", "weight", "subset", "split"}):
            raise HintError(f"entry {position} is not {_SHAPE_OF_SOURCE}")
        try:
            return DataSource(
                source=read_text(entry["source"]),
                weight=weight.read(entry.get("weight", 1.0)),
                subset=_read_part(entry, "subset"),
                split=_read_part(entry, "split"),
            )
        except ValueError:
            raise HintError(
                f"entry {position} needs a source and {weight.expected} as its weight, and text as its subset and split"
            ) from None

    def read(value: object) -> tuple[DataSource, ...]:
        if not isinstance(value, list | tuple):
            value = [value] if isinstance(value, str) else []
        if not value:
            raise ValueError
        return tuple(read_one(entry, position) for position, entry in enumerate(value, start=1))

    weighted = _schema_of_source(weight=dict(weight.schema))
    return Kind(
        expected=f"a file, a folder, a hub id, or a list of {_SHAPE_OF_SOURCE}",
        read=read,
        write=_write_sources,
        schema={"anyOf": [TEXT_SCHEMA, {"type": "array", "minItems": 1, "items": {"anyOf": [TEXT_SCHEMA, weighted]}}]},
        is_text=True,
    )


def held_out_rows() -> Kind:
    """A share of train, a source of its own, or none."""

    def read(value: object) -> EvalSplit:
        if value is False or value == "none":
            return EvalSplit(None, None)
        if isinstance(value, int | float) and 0 < value < 100:
            raise HintError(f'did you mean "{value:g}%"?' if value >= 1 else f'did you mean "{write_share(value)}"?')
        if isinstance(value, Mapping):
            return _read_eval_source(value)
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
        write=_write_eval,
        schema={"anyOf": [TEXT_SCHEMA, {"const": False}, _schema_of_source()]},
        is_text=True,
    )


def _read_eval_source(entry: Mapping[str, object]) -> EvalSplit:
    if not _is_source(entry, {"source", "subset", "split"}):
        raise HintError(f"it is not {_SHAPE_OF_EVAL}")
    return EvalSplit(None, read_text(entry["source"]), _read_part(entry, "subset"), _read_part(entry, "split"))


def _is_source(entry: object, names: set[str]) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(entry, Mapping) and "source" in entry and set(entry) <= names


def _read_part(entry: Mapping[str, object], name: str) -> str | None:
    part = entry.get(name)
    return None if part is None else read_text(part)


def _schema_of_source(**more: object) -> dict[str, object]:
    part = {"anyOf": [{"type": "null"}, TEXT_SCHEMA]}
    return {
        "type": "object",
        "properties": {"source": TEXT_SCHEMA, **more, "subset": part, "split": part},
        "required": ["source"],
        "additionalProperties": False,
    }


def _write_sources(value: tuple[DataSource, ...]) -> object:
    if len(value) == 1 and value[0] == DataSource(source=value[0].source):
        return value[0].source
    return [
        {"source": entry.source, "weight": entry.weight, **_write_parts(entry.subset, entry.split)} for entry in value
    ]


def _write_eval(fields: tuple[Any, ...]) -> object:
    value = EvalSplit(*fields)
    if value.share is not None:
        return write_share(value.share)
    if value.source is None:
        return "none"
    parts = _write_parts(value.subset, value.split)
    return {"source": value.source, **parts} if parts else value.source


def _write_parts(subset: str | None, split: str | None) -> dict[str, str]:
    return {name: part for name, part in (("subset", subset), ("split", split)) if part is not None}
