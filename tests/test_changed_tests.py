"""The tests that a change can reach (`--changed`): claims on this repository, and runs in a small one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from changed_tests import ROOT, Project, changed_files, select

UNKNOWN = ".".join(("unknown", "bin"))  # a name that no file contains
DOCUMENTS = "tests/test_docs.py tests/journeys/test_documents.py"
CHATS = "tests/runtime/data/test_chat_template.py"
FILES = {
    "docs/page.md": "",
    "examples/job.yaml": "",
    "trainer/facts.py": "FACTS = 1\n",
    "trainer/models.json": "{}",
    "trainer/step.py": "def step(): ...\n",
    "tests/conftest.py": "pytest_plugins = ['changed_tests']\n",
    "tests/test_page.py": "text = Path(__file__).parents[1] / 'docs' / 'page.md'\n",
    "tests/test_step.py": "from shardwise.trainer import step\n",
    "tests/journeys/test_story.py": "import pytest\nat = 'examples/*.yaml'\n@pytest.mark.documents\ndef test(): ...\n",
}


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


def write_project(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


def git(root: Path, *words: str) -> None:
    who = {f"GIT_{role}_{fact}": "a@b" for role in ("AUTHOR", "COMMITTER") for fact in ("NAME", "EMAIL")}
    subprocess.run(["git", *words], cwd=root, env={**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}, check=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "x")


def test_what_is_uncommitted_the_last_commit_or_the_whole_branch_counts(tmp_path: Path) -> None:
    root = write_project(tmp_path)
    (root / "trainer" / "facts.py").write_text("FACTS = 2\n")
    (root / "trainer" / "models.json").unlink()
    commit(root)
    of_commit = {"trainer/facts.py", "trainer/models.json"}
    assert changed_files(root)[1] == of_commit
    (root / "trainer" / "step.py").write_text("def step(): return 1\n")
    (root / "new.txt").write_text("")
    uncommitted = {"trainer/step.py", "new.txt"}
    assert changed_files(root)[1] == uncommitted
    git(root, "checkout", "-q", "-b", "topic")
    commit(root)
    (root / "later.txt").write_text("")
    commit(root)
    assert changed_files(root)[1] == {*uncommitted, "later.txt"}
    assert changed_files(root, "HEAD~1")[1] == {"later.txt"}
    with pytest.raises(pytest.UsageError, match="absent"):
        changed_files(root, "absent")


def test_pytest_collects_the_chosen_files_alone_on_its_workers_too(tmp_path: Path) -> None:
    root = write_project(tmp_path)
    (root / "tests" / "factories").mkdir()
    for name in ("changed_tests.py", "durations.py"):
        shutil.copy(ROOT / "tests" / "factories" / name, root / "tests" / "factories")
    (root / "tests" / "mutations").mkdir()
    (root / "tests" / "far").mkdir()
    (root / "tests" / "far" / "test_far.py").write_text("def test_it(): ...\ndef test_other(): ...\n")
    faults = '[[fault]]\nfile = "trainer/step.py"\ntests = ["tests/far/test_far.py::test_it"]\n'
    (root / "tests" / "mutations" / "faults.toml").write_text(faults)
    commit(root)
    argv = [sys.executable, "-m", "pytest", "-n1", "-opythonpath=tests/factories", "-mnot documents", "--changed"]
    for name, told in (("tests/test_page.py", "1 of 4 test files"), ("examples/job.yaml", "2 of 4 test files")):
        (root / name).write_text("def test_it(): ...\n")
        run = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
        assert run.returncode == 0 and told in run.stdout and f"{told[0]} passed" in run.stdout, run.stdout
    commit(root)
    (root / "trainer" / "step.py").write_text("def step(): return 1\n")
    (root / "my-model").mkdir()
    (root / "my-model" / "README.md").write_text("an export, which no test reads")
    run = subprocess.run([*argv, "-rA"], cwd=root, capture_output=True, text=True, check=False)
    assert "far/test_far.py::test_it" in run.stdout and "test_other" not in run.stdout, run.stdout
    assert "all 4 test files" not in run.stdout
