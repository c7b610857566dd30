"""docs/slurm.md shows only what there is: commands, options, settings, reasons, and files that parse."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from shardwise.launch.job.layers import read_job_layers
from shardwise.launch.options import parse_command_line
from shardwise.launch.rundir.lock import CANCEL_FLAG
from shardwise.slurm.jobs import describe_reason
from shardwise.trainer.spec.job.fields import BY_PATH
from shardwise.trainer.spec.messages.submission import FILE_NAME, JOBS_FILE, SCRIPT_NAME

TEXT = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
_IN_BLOCK = re.compile(r"^ +(?:\w+=\S+ )*(?:exec )?(shardwise (?:.*\\\n)*.*)$", re.MULTILINE)
_IN_LINE = re.compile(r"`(?:[A-Z_]+=\S+ |watch -n 60 |srun [^`]*?)?(shardwise [^`]+)`")
_EXPLAINED = re.compile(r"(\S)   +\S.*$", re.MULTILINE)  # what stands beside a command, three blanks away


def commands() -> list[str]:
    """Every command that the page shows, with values in place of what a shell or a reader fills in."""
    joined = (_EXPLAINED.sub(r"\1", re.sub(r"\\\n *", " ", found)) for found in _IN_BLOCK.findall(TEXT))
    shown = [" ".join(found.split()) for found in (*joined, *_IN_LINE.findall(TEXT))]
    filled = (re.sub(r'"?\$run_dir(\S*?)"', r"run\1", line).replace("&", "") for line in shown)
    return sorted({re.sub(r'"?\$\w+"?', "1", line.replace("$resume", "--resume")) for line in filled})


def test_the_page_shows_the_commands_it_is_about():
    names = {line.split()[1] for line in commands()}
    assert {"plan", "fetch", "submit", "status", "logs", "cancel", "train", "probe"} <= names
    assert len(commands()) > 20


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line: str):
    words = shlex.split(line)[1:]
    filled = [{"JOB": "job.yaml", "JOBID": "4711", "PORT": "1"}.get(word, word) for word in words]
    if filled in (["cancel"], ["fetch"], ["submit"], ["train"], ["train", "--resume"]):
        filled.append("job.yaml")  # named in a sentence
    _, options = parse_command_line(filled)
    stray = [word for word in getattr(options, "overrides", []) if "=" not in word]
    assert not stray, f"{stray} of {line}"


def test_every_setting_is_one():
    named = set(re.findall(r"`((?:slurm|checkpoint|model|train)\.(?!sbatch)\w+)", TEXT))
    assert named and named <= BY_PATH.keys()


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[a-z-]+)", TEXT))))
def test_every_option_is_one_of_shardwise_or_of_sbatch(option: str):
    of_others = {"--mem-per-cpu", "--cpus-per-task", "--ntasks", "--user"}  # of sbatch, and of docker
    names = {"submit", "train", "fetch", "logs", "cancel"}
    helped = {name: _options_of(name) for name in names}
    assert option in of_others or any(option in options for options in helped.values())


def _options_of(command: str) -> set[str]:
    from shardwise.launch.options import build_parser

    (subparsers,) = (action for action in build_parser()._actions if action.dest == "command")
    parser = dict(subparsers.choices or {})[command]
    return {option for action in parser._actions for option in action.option_strings}


def test_every_reason_in_the_table_is_explained_by_status():
    table = TEXT.split("| reason |")[1].split("\n\n")[0]
    reasons = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert len(reasons) > 12
    assert [name for name in reasons if describe_reason(name) is None] == []


def test_every_file_on_the_page_parses():
    documents = [each for block in BLOCKS for each in yaml.safe_load_all(block)]
    assert [each.get("kind") for each in documents] == [None, "Service", "Job", None]


def test_the_personal_settings_are_settings(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(BLOCKS[0])
    (tmp_path / "job.yaml").write_text("model: {config: m, tokenizer: train}\ndata: {train: d}\n")
    read = read_job_layers(tmp_path / "job.yaml", (), config_home=tmp_path, site_config=None)
    assert read.job.slurm.partition == "gpu" and read.folders["scratch"] == "/local/me"


def test_the_page_names_the_files_of_a_run():
    for name in (SCRIPT_NAME, FILE_NAME, JOBS_FILE, CANCEL_FLAG, "slurm-JOBID.out"):
        assert f"`{name}`" in TEXT, name
