"""The documents say what the program does: every command, every strategy, and nothing that is not there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import build_parser
from trainer.planning.catalogue import ENGINE_CONFIGS
from trainer.spec.errors import ExitCode
from trainer.spec.strategy import Sharding

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
DOCUMENTS = [
    path
    for path in REPOSITORY.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts)
]


def commands() -> list[str]:
    (subparsers,) = (action for action in build_parser()._actions if action.dest == "command")
    return sorted(subparsers.choices or ())


@pytest.mark.parametrize("command", commands())
def test_every_command_is_in_the_readme(command):
    assert f"shardwise {command}" in README


@pytest.mark.parametrize("sharding", Sharding)
def test_every_sharding_is_in_the_table_of_strategies(sharding):
    assert f"`{sharding}`" in README


@pytest.mark.parametrize("config", ENGINE_CONFIGS.values())
def test_every_configuration_file_is_explained(config):
    folder, name = config.split("/")
    assert name in (REPOSITORY / folder / "README.md").read_text()


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_is_in_the_readme(code):
    assert re.search(rf"^\| {int(code)} \|", README, re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_the_options_of_every_command_are_frozen():
    """A change here is a change for users: it belongs in CHANGELOG.md."""
    (subparsers,) = (action for action in build_parser()._actions if action.dest == "command")
    found = {
        name: sorted(
            option for action in parser._actions for option in action.option_strings if option.startswith("--")
        )
        for name, parser in (subparsers.choices or {}).items()
    }
    assert found == {
        "init": ["--data", "--help", "--model", "--output"],
        "probe": ["--gpus", "--help", "--json", "--measure", "--output"],
        "plan": ["--gpus", "--hardware", "--help", "--html", "--json", "--largest-batch", "--largest-model",
                 "--longest-seq", "--nodes", "--partition", "--simulate", "--take", "--top", "--trial", "--vram"],
        "estimate": ["--help"],
        "train": ["--dry-run", "--gpus", "--head", "--help", "--here", "--json", "--node-rank", "--nodes", "--resume",
                  "--run-dir", "--take", "--trial", "--vram"],
        "report": ["--help", "--html", "--json"],
        "export": ["--format", "--help", "--json", "--merge", "--push"],
        "schema": ["--help"],
    }  # fmt: skip


def test_the_python_api_re_exports_and_loads_nothing_heavy():
    program = (
        "import sys, shardwise; assert set(shardwise.__all__) <= set(dir(shardwise)); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
