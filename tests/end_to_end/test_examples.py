"""Every example plans on the hardware that its own header names, as a reader would type it."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from shardwise.launch.cli import main

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted(REPOSITORY.glob("examples/*.yaml"))
HERE = "2xCPU"  # for commands that plan for the machine they are typed on


class Command(NamedTuple):
    """A line `#   shardwise ...` of an example's header."""

    example: str
    words: tuple[str, ...]

    @property
    def hardware(self) -> str | None:
        return self.words[self.words.index("--hardware") + 1] if "--hardware" in self.words else None


def header_commands(example: Path) -> list[Command]:
    """The commands of the header; two spaces and more separate one from what is said of it."""
    lines = re.findall(r"^#   shardwise (.+)$", example.read_text(), re.MULTILINE)
    typed = [re.sub(r"^(plan|train) +", r"\1 ", line) for line in lines]
    return [Command(example.name, tuple(shlex.split(re.split(r" {2,}", line)[0]))) for line in typed]


COMMANDS = [command for example in EXAMPLES for command in header_commands(example)]
PLANS = [command for command in COMMANDS if command.words[0] == "plan"]


@pytest.mark.parametrize("command", PLANS, ids=lambda command: " ".join(command.words))
def test_an_example_plans_as_its_header_says(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SHARDWISE_CACHE", "SHARDWISE_SITE_CONFIG", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    words = command.words if command.hardware else (*command.words, "--hardware", HERE)
    assert main(words) == 0
    output, complaints = capsys.readouterr()
    assert complaints == ""
    assert re.search(r"\(\S+/\S+/\S+\)$", output, re.MULTILINE)
    if command.hardware:
        assert command.hardware.split("x")[-1] in output
    assert "not trained by this version" not in output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_header_of_an_example_says_how_to_plan_it(example: Path) -> None:
    mine = [command for command in PLANS if command.example == example.name]
    assert mine
    assert all(command.words[1] == f"examples/{example.name}" for command in mine)
    names_no_machine = example.name == "quickstart.yaml"
    assert all((command.hardware is None) is names_no_machine for command in mine)
