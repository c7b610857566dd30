"""The job file as JSON Schema (draft 2020-12), for editors that complete and check YAML while one types.

It says of one setting at a time what `job_file` says; that two settings exclude each other only `job_file` knows.
"""

from typing import Any

from trainer.spec.job.fields import BY_PATH, SECTIONS, children, section_says
from trainer.spec.job.sections import Job
from trainer.spec.job.writing import job_tree


def job_json_schema() -> dict[str, Any]:
    """A schema that every legal job file satisfies."""
    defaults = job_tree(Job())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shardwise job",
        **_section("", defaults),
    }


def _section(path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    properties = {inner.rpartition(".")[2]: _property(inner, defaults) for inner in children(path)}
    return {
        "type": ["object", "null"] if path else "object",
        "description": section_says(path),
        "properties": properties,
        "additionalProperties": False,
    }


def _property(path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    if path in SECTIONS:
        return _section(path, defaults[name])
    entry = BY_PATH[path]
    default = {"default": defaults[name]} if defaults.get(name) not in (None, []) else {}
    return {**entry.kind.schema, "description": entry.says, **default}
