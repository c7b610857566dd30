"""The table of settings, derived from the annotated fields of `trainer.spec.job.sections`, and its two forms.

`job_tree` writes a job in the spelling of the file, and `job_json_schema` describes a job file for editors that
complete and check YAML (draft 2020-12). The schema covers one setting at a time; settings that exclude each other are
in `trainer.spec.job.reading`.
"""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, get_args

from msgspec import Struct

from shardwise.trainer.spec.job.kinds import Kind, Setting, kind_of_type, or_none
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.value import Value


class Field(Struct, frozen=True):
    """One setting; `path` is its name everywhere: YAML, `key=value`, messages, docs."""

    path: str
    kind: Kind
    description: str
    attributes: tuple[str, ...]  # fields of the section's value that it fills; the kind reads a tuple if several


def _members(section: str, value: type[Value]) -> Iterator[Field | tuple[str, type[Value]]]:
    """Sections and settings of a value, depth first, in the order of its fields."""
    yield section, value
    prefix = f"{section}." if section else ""
    for name, annotation in value.__annotations__.items():
        for setting in getattr(annotation, "__metadata__", ()):
            yield Field(
                path=prefix + (setting.name or name),
                kind=_kind(annotation.__origin__, setting),
                description=setting.description,
                attributes=(name, *setting.further_fields),
            )
        if isinstance(annotation, type) and issubclass(annotation, Value):
            yield from _members(prefix + name, annotation)


def _kind(of_type: object, setting: Setting) -> Kind:
    if not isinstance(of_type, UnionType):
        return setting.kind or kind_of_type(of_type)
    kind = setting.kind or kind_of_type(get_args(of_type)[0])
    return kind if setting.further_fields else or_none(kind, spelling=setting.none)


_MEMBERS = tuple(_members("", Job))
FIELDS: tuple[Field, ...] = tuple(entry for entry in _MEMBERS if isinstance(entry, Field))
BY_PATH: Mapping[str, Field] = {entry.path: entry for entry in FIELDS}
SECTIONS: Mapping[str, type[Value]] = dict(entry for entry in _MEMBERS if not isinstance(entry, Field))
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("model.name", "model.config"),
    ("train.epochs", "train.steps", "train.tokens"),
)


def children(section: str) -> tuple[str, ...]:
    """Paths of the settings and sections directly in a section, in the order of its fields."""
    prefix = f"{section}." if section else ""
    inside = (entry.path[len(prefix) :] for entry in FIELDS if entry.path.startswith(prefix))
    return tuple(dict.fromkeys(prefix + path.partition(".")[0] for path in inside))


def job_tree(job: Job) -> dict[str, Any]:
    """The job in the job file's own spelling, every setting; `read_job` gives the same job again."""
    tree: dict[str, Any] = {}
    for entry in FIELDS:
        *outer, name = entry.path.split(".")
        values: Any = job
        for part in outer:
            values = getattr(values, part)
        several = tuple(getattr(values, attribute) for attribute in entry.attributes)
        value = several[0] if len(several) == 1 else several
        written = entry.kind.write(value)
        if written is None and any(entry.path in group for group in EXCLUSIVE):
            continue
        section = tree
        for part in outer:
            section = section.setdefault(part, {})
        section[name] = written
    return tree


def job_json_schema() -> dict[str, Any]:
    """A schema that every legal job file satisfies."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shardwise job",
        **_section_schema("", job_tree(Job())),
    }


def section_description(section: str) -> str:
    """First sentence of the value's docstring; what follows a semicolon there is about the value in Python."""
    first = (SECTIONS[section].__doc__ or "").partition("\n")[0]
    return first.partition(";")[0].rstrip(".") + "."


def _section_schema(path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": ["object", "null"] if path else "object",
        "description": section_description(path),
        "properties": {inner.rpartition(".")[2]: _property(inner, defaults) for inner in children(path)},
        "additionalProperties": False,
    }


def _property(path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    if path in SECTIONS:
        return _section_schema(path, defaults[name])
    entry = BY_PATH[path]
    default = {"default": defaults[name]} if defaults.get(name) not in (None, []) else {}
    return {**entry.kind.schema, "description": entry.description, **default}
