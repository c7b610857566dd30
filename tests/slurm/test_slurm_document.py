"""docs/slurm.md shows only what there is: commands, options, settings, reasons, and files that parse."""

import re
import shlex
from pathlib import Path

import pytest

from shardwise.launch.job.layers import read_job_layers
from shardwise.launch.options import parse_command_line
from shardwise.slurm.jobs import describe_reason

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


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line: str):
    words = shlex.split(line)[1:]
    filled = [{"JOB": "job.yaml", "JOBID": "4711", "PORT": "1"}.get(word, word) for word in words]
    if filled in (["cancel"], ["fetch"], ["submit"], ["train"], ["train", "--resume"]):
        filled.append("job.yaml")  # named in a sentence
    _, options = parse_command_line(filled)
    stray = [word for word in getattr(options, "overrides", []) if "=" not in word]
    assert not stray, f"{stray} of {line}"


def test_every_reason_in_the_table_is_explained_by_status():
    table = TEXT.split("| reason |")[1].split("\n\n")[0]
    reasons = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert len(reasons) > 12
    assert [name for name in reasons if describe_reason(name) is None] == []


def test_the_personal_settings_are_settings(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(BLOCKS[0])
    (tmp_path / "job.yaml").write_text("model: {config: m, tokenizer: train}\ndata: {train: d}\n")
    read = read_job_layers(tmp_path / "job.yaml", (), config_home=tmp_path, site_config=None)
    assert read.job.slurm.partition == "gpu" and read.folders["scratch"] == "/local/me"
