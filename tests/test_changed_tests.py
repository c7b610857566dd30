"""The tests that a change can reach (`--changed`): on a small made-up project, and claims on this repository."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from changed_tests import ROOT, Change, Project, changed_files, cheapest, compared, select

BODY, MORE = Change.FUNCTIONS, Change.MORE
UNKNOWN = ".".join(("unknown", "bin"))  # a name that no file contains
FILES = {
    "docs/page.md": "", "examples/job.yaml": "", "docs/guide/first.md": "", "ds/a.json": "",
    "tests/factories/tool.py": "FOLDER = 'ds'\n",
    "launch/start.sh": "python tests/factories/tool.py",
    "launch/cli.py": "import importlib\nCOMMANDS = ['plan:run']\n",
    "launch/plan.py": "from shardwise.trainer import rules\nargv = ['-m', 'shardwise.trainer.rank']\n",
    "trainer/rules.py": "from shardwise.trainer.facts import FACTS\nfrom pathlib import Path\nfile = 'models.json'\n",
    "trainer/models.json": "{}",
    "trainer/facts.py": "FACTS = 1\n",
    "trainer/rank.py": "from shardwise.trainer import step\n",
    "trainer/step.py": "def step(): ...\n",
    "tests/conftest.py": "pytest_plugins = ['plugin']\n",
    "tests/factories/plugin.py": "FOLDER = 'docs'\n",
    "tests/factories/plans.py": "from shardwise.launch import plan\n",
    "tests/ranks/conftest.py": "import pathlib\nWORKER = pathlib.Path(__file__).parent / 'worker.py'\n",
    "tests/ranks/worker.py": "from shardwise.trainer import step\n",
    "tests/ranks/test_ranks.py": "",
    "tests/test_rules.py": "'''See docs/page.md.'''\nfrom shardwise.trainer.rules import file\n",
    "tests/test_plans.py": "def test_it():\n    import plans\n",
    "tests/test_command.py": "argv = ['-m', 'shardwise.launch.cli', 'plan']\n",
    "tests/test_tool.py": "import plugin\nscript = Path(__file__).parents[1] / 'launch' / 'start.sh'\n",
    "tests/test_page.py": "text = Path(__file__).parents[1] / 'docs' / 'page.md'\n",
    "tests/test_guide.py": "GUIDE, PAGE = Path(__file__).parents[1] / 'docs' / 'guide', 'page.md'\nglob('ds/*.json')\n",
    "tests/journeys/test_story.py": "import pytest\nat = 'examples/*.yaml'\n@pytest.mark.documents\ndef test(): ...\n",
    "tests/test_words.py": "import subprocess\nsubprocess.run(['git', 'ls-files', 'launch', 'trainer', 'docs'])\n",
}  # fmt: skip
TABLE = {
    "tests": [name for name in FILES if "/test_" in name],
    "trainer/rules.py": ["tests/test_rules.py", "tests/test_command.py"],
    "launch/plan.py": ["tests/test_plans.py", "tests/test_command.py"],
    "trainer/step.py": ["tests/ranks/test_ranks.py"],
}


def write_project(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(write_project(tmp_path_factory.mktemp("project")))


def git(root: Path, *words: str) -> None:
    who = {f"GIT_{role}_{fact}": "a@b" for role in ("AUTHOR", "COMMITTER") for fact in ("NAME", "EMAIL")}
    subprocess.run(["git", *words], cwd=root, env={**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}, check=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "x")


def chosen(project: Project, path: str, change: Change = BODY, table: dict[str, list[str]] = TABLE) -> set[str]:
    files, _ = select(project, table, {path: change})
    return {name.removeprefix("tests/").removeprefix("test_").removesuffix(".py") for name in files}


@pytest.mark.parametrize(("path", "expected"), [
    ("trainer/rules.py", "rules command words"), ("launch/plan.py", "plans command words"),
    ("trainer/step.py", "ranks/test_ranks words"), ("trainer/models.json", "rules command words"),
    ("tests/factories/plans.py", "plans"), ("tests/factories/tool.py", "tool"), ("docs/page.md", "page words"),
    ("tests/ranks/worker.py", "ranks/test_ranks"), ("ds/a.json", "guide"),
    ("docs/guide/first.md", "guide words journeys/test_story"),
])  # fmt: skip
def test_a_change_runs_what_imports_or_names_it(project: Project, path: str, expected: str) -> None:
    assert chosen(project, path) == set(expected.split())


@pytest.mark.parametrize("path", ["pyproject.toml", "tests/conftest.py", "tests/factories/plugin.py", UNKNOWN])
def test_what_every_test_has_and_what_nothing_names_runs_everything(project: Project, path: str) -> None:
    files, line = select(project, TABLE, {"trainer/rules.py": BODY, path: MORE})
    assert files == project.tests and path in line


def test_comments_run_what_reads_them_and_constants_the_cheapest_test_of_each_user_too(project: Project) -> None:
    table = {**TABLE, "trainer/facts.py": ["tests/test_guide.py"]}
    assert chosen(project, "trainer/facts.py", Change.TEXT, table) == {"words"}
    assert chosen(project, "trainer/facts.py", BODY, table) == {"guide", "words"}
    assert chosen(project, "trainer/facts.py", MORE, table) == {"guide", "words", "rules"}


def test_a_module_that_the_table_lacks_counts_as_a_part_of_its_users(project: Project) -> None:
    assert chosen(project, "trainer/facts.py") == {"rules", "command", "words"}
    assert chosen(project, "trainer/rank.py") == {"plans", "command", "words"}, "a program, which its name starts"


def test_a_test_that_was_not_measured_runs_for_all_that_it_can_start(project: Project) -> None:
    table = {name: files for name, files in TABLE.items() if name != "trainer/rules.py"}
    table["tests"] = [name for name in TABLE["tests"] if name != "tests/test_command.py"]
    assert "command" in chosen(project, "trainer/facts.py", BODY, table)


def test_a_dear_test_that_reads_whole_folders_runs_only_for_new_files(tmp_path: Path) -> None:
    root = write_project(tmp_path)
    (root / "tests" / "durations.json").write_text(json.dumps({"tests/test_words.py": {"test_a": 60.0}}))
    slow = Project(root)
    assert "words" not in chosen(slow, "trainer/rules.py", MORE)
    assert "words" in chosen(slow, "trainer/rules.py", Change.EXISTENCE)


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("Text", "Other", Change.TEXT), ("return A", "return A  # text", Change.TEXT), ("return A", "return 2", BODY),
    ("def f", "def g(): ...\ndef f", BODY), ("A = 1", "A = 2", MORE), ("A = 1", "A = 1\nclass B:\n    c = 1\n", MORE),
])  # fmt: skip
def test_the_kind_of_a_change_is_read_from_both_versions(old: str, new: str, expected: Change) -> None:
    text = '"""Text."""\nA = 1\ndef f():\n    """Text."""\n    return A\n'
    assert compared(text, text.replace(old, new)) == expected


def test_on_the_main_branch_the_last_commit_counts_unless_something_is_uncommitted(tmp_path: Path) -> None:
    root = write_project(tmp_path)
    (root / "trainer" / "facts.py").write_text("FACTS = 2\n")
    (root / "trainer" / "models.json").unlink()
    commit(root)
    assert changed_files(root)[1] == {"trainer/facts.py": MORE, "trainer/models.json": Change.EXISTENCE}
    (root / "trainer" / "step.py").write_text("def step(): return 1\n")
    assert changed_files(root)[1] == {"trainer/step.py": BODY}
    (root / "new.txt").write_text("")
    assert changed_files(root)[1] == {"trainer/step.py": BODY, "new.txt": Change.EXISTENCE}


def test_on_a_branch_everything_since_the_main_branch_counts(tmp_path: Path) -> None:
    root = write_project(tmp_path)
    git(root, "checkout", "-q", "-b", "topic")
    for number in (2, 3):
        (root / "trainer" / "facts.py").write_text(f"FACTS = {number}\n")
        (root / f"{number}.txt").write_text("")
        commit(root)
    assert set(changed_files(root)[1]) == {"trainer/facts.py", "2.txt", "3.txt"}
    assert set(changed_files(root, "HEAD~1")[1]) == {"trainer/facts.py", "3.txt"}
    with pytest.raises(pytest.UsageError, match="absent"):
        changed_files(root, "absent")


def test_pytest_collects_the_chosen_files_alone_on_its_workers_too(tmp_path: Path) -> None:
    root = write_project(tmp_path)
    for name in ("changed_tests.py", "durations.py"):
        shutil.copy(ROOT / "tests" / "factories" / name, root / "tests" / "factories")
    (root / "tests" / "conftest.py").write_text("pytest_plugins = ['changed_tests']\n")
    (root / "tests" / "reach.json").write_text(json.dumps(TABLE))
    commit(root)
    argv = [sys.executable, "-m", "pytest", "-n1", "-opythonpath=tests/factories", "-mnot documents", "--changed"]
    for name, told in (("tests/test_page.py", "1 of 9 test files"), ("examples/job.yaml", "2 of 9 test files")):
        (root / name).write_text("def test_it(): ...\n")
        run = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
        assert run.returncode == 0 and told in run.stdout and f"{told[0]} passed" in run.stdout, run.stdout


def test_every_line_is_executed_by_the_cheapest_tests_that_can() -> None:
    lines = {"dear": {1, 2, 3}, "one": {1}, "two": {2, 1}, "far": {3}}
    assert cheapest(lines, {"dear": 9.0, "one": 1.0, "two": 1.0, "far": 20.0}) == ["two", "dear"]
    assert cheapest(lines, {"dear": 9.0, "one": 1.0, "two": 1.0, "far": 20.0}, ["far"]) == ["two", "far"]


@pytest.fixture(scope="module")
def here() -> Project:
    return Project(ROOT)


def test_of_this_repository_a_change_runs_what_is_near_to_it(here: Project) -> None:
    measured = {"tests": sorted(here.tests)}
    doctor, _ = select(here, measured, {"launch/doctor/command.py": BODY})
    assert "tests/launch/doctor/test_doctor_command.py" in doctor
    assert not any(name.startswith("tests/runtime/") for name in doctor)
    for path in ("launch/commands/train.py", "launch/options.py", "README.md", "docs/guide/one-card.md"):
        shown, _ = select(here, measured, {path: BODY})
        assert "tests/test_docs.py" in shown and any(name.startswith("tests/journeys/") for name in shown)
    for path in ("pyproject.toml", UNKNOWN, "tests/warm/server.py", "tests/factories/warm_python.py"):
        assert select(here, measured, {path: MORE})[0] == here.tests


def test_of_this_repository_programs_are_found_by_their_names(here: Project) -> None:
    """Tables of commands, `-m` in a module, workers of ranks, and what `import shardwise` gives."""
    assert "launch/options.py" in here.users["launch/commands/train.py"]
    assert "launch/engine/launcher.py" in here.users["trainer/__main__.py"]
    assert any("distributed" in each for each in here.readers("tests/distributed/engine_worker.py", exact=True))
    assert "tests/end_to_end/test_api.py" in here.users["launch/api.py"]
