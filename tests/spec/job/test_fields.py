"""The JSON Schema for editors: it accepts what the reader accepts, and refuses what no reader should.

The validator below knows exactly the keywords the schema uses and refuses any other, so that a new keyword is noticed.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from job_reference import DOCUMENT, MARK, job_reference, write_job_reference

from shardwise.launch.job.yaml_text import read_yaml_file
from shardwise.trainer.spec.job.fields import BY_PATH, SECTIONS, job_json_schema, job_tree
from shardwise.trainer.spec.job.reading import read_job

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
ANNOTATIONS = {"$schema", "title", "description", "default"}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Draft 2020-12, as far as the schema of the job file goes."""
    return all(_keeps(keyword, rule, value, schema) for keyword, rule in schema.items() if keyword not in ANNOTATIONS)


def _keeps(keyword: str, rule: Any, value: Any, schema: dict[str, Any]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match keyword:
        case "type":
            return any(_is_type(value, name) for name in ([rule] if isinstance(rule, str) else rule))
        case "enum":
            return any(value == member and type(value) is type(member) for member in rule)
        case "const":
            return value == rule and type(value) is type(rule)
        case "anyOf":
            return any(is_valid(value, option) for option in rule)
        case "pattern":
            return not isinstance(value, str) or re.search(rule, value) is not None
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
        case "minItems":
            return not isinstance(value, list) or len(value) >= rule
        case "items":
            return not isinstance(value, list) or all(is_valid(entry, rule) for entry in value)
        case "minimum":
            return not is_number or value >= rule
        case "exclusiveMinimum":
            return not is_number or value > rule
        case "maximum":
            return not is_number or value <= rule
        case "exclusiveMaximum":
            return not is_number or value < rule
        case "required":
            return not isinstance(value, dict) or set(rule) <= set(value)
        case "properties":
            return not isinstance(value, dict) or all(
                is_valid(inner, rule[name]) for name, inner in value.items() if name in rule
            )
        case "additionalProperties":
            assert rule is False
            return not isinstance(value, dict) or set(value) <= set(schema["properties"])
    raise AssertionError(f"unknown keyword {keyword}")


def _is_type(value: Any, name: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "number":
        return is_number
    if name == "integer":
        return is_number and float(value).is_integer()
    return isinstance(value, TYPES[name])


SCHEMA = job_json_schema()


def at(path: str, value: Any) -> dict[str, Any]:
    nested = value
    for name in reversed(path.split(".")):
        nested = {name: nested}
    assert isinstance(nested, dict)
    return nested


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_job_is_valid(path):
    assert is_valid(read_yaml_file(path), SCHEMA)


@pytest.mark.parametrize(
    "settings",
    [
        {"log": {"wandb": False}},
        {"limits": {"vram": "8GiB", "hours": "90 min"}},
        {"train": {"lr": "1e-4", "seq_len": "4k", "tokens_per_step": 4000, "warmup": "100 steps"}},
        {"train": {"lr": 0.001, "warmup": 10, "epochs": 0.5, "lora": {"targets": ["q_proj"]}}},
        {"checkpoint": {"every": "20 min", "async": "auto", "best": None}},
        {"pin": {"sharding": None, "micro_batch": 4, "compile": True}},
        {"allow": ["fp8", "compile"]},
        {"slurm": {"time": "24:00:00", "modules": ["a", "b"]}},
        {"pin": None},
        {"data": {"train": [{"source": "o/n", "split": "dev"}], "eval": {"source": "o/n", "subset": "en"}}},
    ],
    ids=str,
)
def test_what_the_reader_takes_the_schema_takes(settings):
    tree = {"model": {"name": "a/b"}, "data": {"train": [{"source": "x", "weight": 2}]}, **settings}
    job = read_job(tree, origin="job.yaml")
    assert is_valid(tree, SCHEMA)
    assert is_valid(job_tree(job), SCHEMA)


@pytest.mark.parametrize(
    "settings",
    [
        {"modle": {}},
        {"pin": {"sharding": "zero4"}},
        {"train": {"seq_len": 7}},
        {"train": {"lr": 0}},
        {"train": {"lora": {"dropout": 1}}},
        {"train": {"warmup": "10 min"}},
        {"eval": {"every": "20 min"}},
        {"data": {"train": []}},
        {"data": {"train": [{"weight": 1}]}},
        {"data": {"train": "x", "eval": {"split": "dev"}}},
        {"data": {"fields": {"promt": "q"}}},
        {"slurm": {"time": 86400}},
        {"train": 5},
    ],
    ids=str,
)
def test_what_the_reader_refuses_the_schema_refuses(settings):
    assert not is_valid(settings, SCHEMA)


@pytest.mark.parametrize("path", BY_PATH)
def test_every_setting_is_described_and_takes_no_nonsense(path):
    schema: Any = SCHEMA
    for name in path.split("."):
        schema = schema["properties"][name]
    assert schema["description"].endswith(".")
    assert not is_valid(at(path, {"nonsense": {}}), SCHEMA)
    assert "default" not in schema or is_valid(schema["default"], schema)


def test_the_schema_says_which_draft_it_is_and_closes_every_section():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for section in SECTIONS:
        schema: Any = SCHEMA
        for name in filter(None, section.split(".")):
            schema = schema["properties"][name]
        assert schema["additionalProperties"] is False


def test_the_document_is_the_rendered_reference():
    """Write it anew with tests/factories/job_reference.py."""
    above, mark, below = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert above
    assert mark + below == job_reference()


def test_writing_anew_keeps_what_stands_above_the_mark(tmp_path):
    copy = tmp_path / "job-file.md"
    copy.write_text(f"# Ours\n\n{MARK}\n\nold tables\n")
    write_job_reference(copy)
    assert copy.read_text() == "# Ours\n\n" + job_reference()


def test_the_names_of_presets_in_the_document_are_those_in_the_package():
    from shardwise.launch.inputs.model_files import preset_names

    document = (DOCUMENT.parent / "architectures.md").read_text(encoding="utf-8")
    section = document.partition("Each row's name is a preset:")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`([a-z0-9.-]+)`", section)) == sorted(preset_names())
