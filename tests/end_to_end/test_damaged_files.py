"""Every kind of damage to every file of a run directory: commands end in order, and no whole checkpoint is lost.

Another user of the machine changes nothing in a run either.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from damage_factory import DAMAGE, Counts, add_older_checkpoint, damage_and_try, files_of, run_command
from outcome_file import FAULTS
from workplace_factory import Workplace

CAPTURED = Path(__file__).parents[1] / "captured" / "run_of_0_7"
READING = (
    ("status", "{run}"),
    ("status", "{run}", "--json"),
    ("report", "{run}"),
    ("report", "{run}", "--html", "{out}"),
    ("watch", "{run}", "--once"),
    ("logs", "{run}"),
)
RESUMING = (("train", "job.yaml", "--resume", "--run-dir", "{run}", "--dry-run"),)
EXPORTING = (("export", "{run}", "{out}", "--no-check"),)


@pytest.fixture
def template(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped at step 28 of 40, with checkpoints of steps 20 and 28."""
    for name in ("job.yaml", "config.json", "text.txt"):
        shutil.copy(CAPTURED / name, workplace.folder / name)
    run_dir = workplace.folder / "template" / "old-20261125-062908"
    shutil.copytree(CAPTURED / "run", run_dir)
    add_older_checkpoint(run_dir, newest=28, step=20)
    monkeypatch.chdir(workplace.folder)
    for name, value in workplace.environment.items():
        monkeypatch.setenv(name, value)
    return run_dir


def check(sums: dict[str, Counts], record_property: pytest.FixtureRequest) -> None:
    record_property(FAULTS, {f"damage to a file: {kind}": counts.row() for kind, counts in sums.items()})  # type: ignore[operator]
    failures = [note for counts in sums.values() for note in counts.notes]
    assert not failures, "\n\n".join(failures)


def test_reading_commands_end_in_order_after_damage(template, tmp_path, record_property):
    """Sixty of the pairs of a file and a kind, each kind with other files."""
    sums = {kind: Counts() for kind in DAMAGE}
    chance = random.Random(3)
    for kind, counts in sums.items():
        for file in chance.sample(files_of(template), 4):
            command = chance.choice(READING)
            damage_and_try(template, tmp_path / "damaged", file, kind, (command,), counts)
    check(sums, record_property)


@pytest.mark.long
@pytest.mark.kills
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_command_ends_in_order_after_damage_to_any_file(kind, template, tmp_path, record_property):
    counts = Counts()
    for file in files_of(template):
        commands = (*READING, *RESUMING, *(EXPORTING if file.endswith(("plan.json", "MANIFEST.json", "rs")) else ()))
        damage_and_try(template, tmp_path / "damaged", file, kind, commands, counts)
    check({kind: counts}, record_property)


def _same_size_and_time(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes().swapcase())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """A change that puts something else in place of a file."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


# What happens to the data between an interruption and the resume, and a word of the refusal.
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "other content of the same size and time": (_same_size_and_time, "another dataset"),
    "missing": (Path.unlink, "data.train"),
    "a line more": (lambda path: path.write_bytes(path.read_bytes() + b"one line more\n"), "another dataset"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "another dataset"),
    "empty": (lambda path: os.truncate(path, 0), "data.train"),
    "a folder": (_replaced(Path.mkdir), "data.train"),
    "a link to itself": (_replaced(lambda path: path.symlink_to(path.name)), "data.train"),
    "a pipe": (_replaced(os.mkfifo), "data.train"),
}


@pytest.mark.parametrize(
    "change",
    [
        name if place < 2 else pytest.param(name, marks=[pytest.mark.long, pytest.mark.kills])
        for place, name in enumerate(CHANGES)
    ],
)
def test_data_that_changed_before_a_resume_is_refused_and_accepted_again_once_restored(
    change: str, template: Path, record_property: pytest.FixtureRequest
) -> None:
    text = template.parents[1] / "text.txt"
    command = ("train", "job.yaml", "--resume", "--run-dir", str(template), "--dry-run")
    assert run_command(*command)[0] == 0
    original = shutil.copy2(text, text.with_name("original"))
    damage, fact = CHANGES[change]
    damage(text)
    code, output = run_command(*command)
    is_refused = code == 2 and fact in output and "internal error" not in output
    record_property(FAULTS, {"data changed before a resume": {"tried": 1, "survived": int(is_refused)}})  # type: ignore[operator]
    assert is_refused, output
    shutil.rmtree(text) if text.is_dir() else text.unlink(missing_ok=True)
    shutil.copy2(original, text)
    assert run_command(*command)[0] == 0


STRANGER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
OF_A_STRANGER = (*READING, *RESUMING, ("train", "job.yaml", "--resume", "--run-dir", "{run}"), ("cancel", "{run}"),
                 ("export", "{run}", "{run}/out", "--no-check"))  # fmt: skip


def python_of_anyone(environment: dict[str, str]) -> str:
    """An interpreter that another user may start; of this version, or packages in C would not load."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can start programs of another user, with setpriv")
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        argv = [*STRANGER, python, "-c", "import shardwise.launch.cli"]
        if subprocess.run(argv, env=environment, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("no Python of this version is open to other users")


@pytest.mark.long
@pytest.mark.kills
def test_another_user_reads_a_run_and_changes_nothing(template, workplace, record_property):
    """Each command ends by itself, with a line where it would have to write."""
    home = workplace.folder / "stranger"
    home.mkdir()
    os.chown(home, 65534, 65534)
    for folder in (workplace.folder, *workplace.folder.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    paths = os.pathsep.join(path for path in (str(Path(__file__).parents[2]), *sys.path) if path)
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    python = python_of_anyone(environment)
    before = {path: path.read_bytes() for path in template.rglob("*") if path.is_file()}
    counts = Counts()
    for words in OF_A_STRANGER:
        argv = [word.format(run=template, out=home / "page.html") for word in words]
        done = subprocess.run(
            [*STRANGER, python, "-P", "-m", "shardwise.launch.cli", *argv], cwd=workplace.folder, env=environment,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        is_unchanged = {path: path.read_bytes() for path in template.rglob("*") if path.is_file()} == before
        is_in_order = done.returncode in (0, 2, 4) and "Traceback" not in done.stderr
        counts.tried, counts.survived = counts.tried + 1, counts.survived + (is_unchanged and is_in_order)
        if not (is_unchanged and is_in_order):
            counts.notes.append(f"{argv}: {done.returncode}, unchanged: {is_unchanged}\n{done.stdout}{done.stderr}")
    counts.lost = counts.tried - counts.survived
    record_property(FAULTS, {"another user's commands on a run": counts.row()})
    assert not counts.notes, "\n\n".join(counts.notes)
