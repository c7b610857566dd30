"""The JSON Schema for editors: it accepts what the reader accepts, and refuses what no reader should."""

import re
from pathlib import Path
from typing import Any

import pytest
from job_reference import DOCUMENT, MARK, job_reference
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from shardwise.launch.job.yaml_text import read_yaml_file
from shardwise.trainer.spec.job.fields import BY_PATH, SECTIONS, job_json_schema, job_tree
from shardwise.trainer.spec.job.reading import read_job

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
SCHEMA = job_json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_is_one_of_its_draft_and_closes_every_section():
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for section in SECTIONS:
        assert schema_of(section)["additionalProperties"] is False


def schema_of(path: str) -> Any:
    """The schema of a setting or a section."""
    schema: Any = SCHEMA
    for name in filter(None, path.split(".")):
        schema = schema["properties"][name]
    return schema


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_job_is_valid(path):
    VALIDATOR.validate(read_yaml_file(path))


@pytest.mark.parametrize(
    "settings",
    [
        {"log": {"wandb": False}}, {"limits": {"vram": "8GiB", "hours": "90 min"}},
        {"train": {"lr": "1e-4", "seq_len": "4k", "tokens_per_step": 4000, "warmup": "100 steps"}},
        {"train": {"lr": 0.001, "warmup": 10, "epochs": 0.5, "lora": {"targets": ["q_proj"]}}},
        {"checkpoint": {"every": "20 min", "async": "auto", "best": None}},
        {"pin": {"sharding": None, "micro_batch": 4, "compile": True}}, {"allow": ["fp8", "compile"]},
        {"slurm": {"time": "24:00:00", "modules": ["a", "b"]}}, {"pin": None},
        {"data": {"train": [{"source": "o/n", "split": "dev"}], "eval": {"source": "o/n", "subset": "en"}}},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_reader_takes_the_schema_takes(settings):
    tree = {"model": {"name": "a/b"}, "data": {"train": [{"source": "x", "weight": 2}]}, **settings}
    VALIDATOR.validate(tree)
    VALIDATOR.validate(job_tree(read_job(tree, origin="job.yaml")))


@pytest.mark.parametrize(
    "settings",
    [
        {"modle": {}}, {"pin": {"sharding": "zero4"}}, {"train": {"seq_len": 7}}, {"train": {"lr": 0}},
        {"train": {"lora": {"dropout": 1}}}, {"train": {"warmup": "10 min"}}, {"eval": {"every": "20 min"}},
        {"data": {"train": []}}, {"data": {"train": [{"weight": 1}]}},
        {"data": {"train": "x", "eval": {"split": "dev"}}}, {"data": {"fields": {"promt": "q"}}},
        {"slurm": {"time": 86400}}, {"train": 5},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_reader_refuses_the_schema_refuses(settings):
    assert not VALIDATOR.is_valid(settings)


@pytest.mark.parametrize("path", BY_PATH)
def test_every_setting_is_described_and_takes_no_nonsense(path):
    schema = schema_of(path)
    validator = Draft202012Validator(schema)
    assert schema["description"].endswith(".")
    assert not validator.is_valid({"nonsense": {}})
    assert "default" not in schema or validator.is_valid(schema["default"])


def test_the_document_is_the_rendered_reference():
    """Write it anew with tests/factories/job_reference.py."""
    above, mark, below = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert above
    assert mark + below == job_reference()


def test_the_names_of_presets_in_the_document_are_those_in_the_package():
    from shardwise.launch.inputs.model_files import preset_names

    document = (DOCUMENT.parent / "architectures.md").read_text(encoding="utf-8")
    section = document.partition("Each row's name is a preset:")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`([a-z0-9.-]+)`", section)) == sorted(preset_names())
