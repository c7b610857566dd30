"""The tests that a change can reach (`--changed`), by claims on this repository."""

import pytest
from changed_tests import ROOT, Project, select

UNKNOWN = ".".join(("unknown", "bin"))  # a name that no file contains
DOCUMENTS = "tests/test_docs.py tests/journeys/test_documents.py"
CHATS = "tests/runtime/data/test_chat_template.py"


@pytest.fixture(scope="module")
def here() -> Project:
    return Project(ROOT)


@pytest.mark.parametrize(
    ("path", "reached", "others"),
    [
        ("launch/doctor/command.py", "tests/launch/doctor/test_doctor_command.py", "tests/runtime/loop/"),
        ("launch/commands/train.py", DOCUMENTS, "tests/runtime/loop/"),
        ("README.md", DOCUMENTS, "tests/runtime/loop/"),
        ("docs/guide/one-card.md", DOCUMENTS, "tests/runtime/loop/"),
        ("ds_configs/zero2.json", "tests/test_config_files.py", "tests/planning/page/"),
        ("trainer/runtime/data/chat/templates/qwen.jinja", CHATS, "tests/runtime/loop/"),
        ("tests/factories/hub_server.py", "tests/launch/inputs/test_hub.py", "tests/runtime/loop/"),
        ("tests/distributed/engine_worker.py", "tests/distributed/test_engines.py", "tests/launch/doctor/"),
    ],
)
def test_a_change_runs_what_imports_or_names_it(here, path, reached, others):
    files, _ = select(here, [path])
    assert files >= set(reached.split())
    assert not any(name.startswith(others) for name in files)


@pytest.mark.parametrize(
    "path", ["pyproject.toml", "tests/conftest.py", "tests/warm/server.py", "tests/factories/warm_python.py", UNKNOWN]
)
def test_what_every_test_has_and_what_nothing_names_runs_everything(here: Project, path: str):
    files, line = select(here, ["tests/test_site.py", path])
    assert files == here.tests and path in line
