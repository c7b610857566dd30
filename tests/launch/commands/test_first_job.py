"""`shardwise init` writes a job that reads, whatever the model and the data are called."""

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.launch.commands.housekeeping import job_template
from shardwise.launch.inputs.model_files import preset_names, read_preset
from shardwise.launch.job.yaml_text import read_yaml
from shardwise.launch.options import COMMANDS
from shardwise.trainer.spec.job.reading import read_job
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.model.readers import read_model_shape


def read(text: str) -> Job:
    tree = read_yaml(text, origin="job.yaml")
    assert isinstance(tree, dict)
    return read_job(tree, origin="job.yaml")


@settings(deadline=None)  # a busy machine is no fault
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda text: text.strip()))
def test_any_text_is_quoted_so_that_it_reads_back(data):
    assert read(job_template(model="org/model", data=data)).data.train[0].source == data


@pytest.mark.parametrize("preset", preset_names())
def test_a_template_of_a_preset_is_a_job_within_its_positions(preset):
    job = read(job_template(model=preset, data="text"))
    assert job.train.seq_len <= read_model_shape(read_preset(preset)).max_positions
    has_no_weights = preset == "tiny-llama"
    assert (job.model.config, job.model.name) == ((preset, None) if has_no_weights else (None, preset))
    assert job.model.tokenizer == ("train" if has_no_weights else None)


def test_a_config_file_starts_from_scratch():
    job = read(job_template(model="shapes/mine.json", data="text"))
    assert (job.model.config, job.model.tokenizer, job.output) == ("shapes/mine.json", "train", "runs/mine")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_function_that_runs_it(name: str) -> None:
    module, _, function = COMMANDS[name].run.partition(":")
    assert callable(getattr(import_module(f"shardwise.launch.{module}"), function))
