"""Every kind of damage to every file of a run directory: commands end in order, and no whole checkpoint is lost.

Another user of the machine changes nothing in a run either. The commands run in this process; an alarm ends one that
hangs.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from kill_factory import Count, check
from outcome_file import FAULTS
from workplace_factory import Workplace

from shardwise.launch import cli

CAPTURED = Path(__file__).parents[1] / "captured" / "run_of_0_7"
READING = (
    ("status", "{run}"), ("status", "{run}", "--json"), ("report", "{run}"), ("report", "{run}", "--html", "{out}"),
    ("watch", "{run}", "--once"), ("logs", "{run}"),
)  # fmt: skip
RESUMING = (("train", "job.yaml", "--resume", "--run-dir", "{run}", "--dry-run"),)
EXPORTING = (("export", "{run}", "{out}", "--no-check"),)
HANG_S = 300  # for a command that takes a second where no other work keeps the cores busy
OUTSIDE = "outside"
EXIT_CODES = (0, 2, 3, 4)  # of a command that read a damaged file; 1 would be an internal error


def in_place(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([(content or b"\0")[middle] ^ 64]) + content[middle + 1 :]


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _link_out(path: Path) -> None:
    run_dir = next(parent for parent in path.parents if (parent / "attempts").is_dir())
    target = run_dir.parent / OUTSIDE
    path.rename(target)
    path.symlink_to(target)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": in_place(lambda _: b""),
    "first half": in_place(lambda content: content[: len(content) // 2]),
    "last byte missing": in_place(lambda content: content[:-1]),
    "a flipped bit": in_place(_flipped),
    "zeros": in_place(lambda content: bytes(len(content))),
    "random bytes": in_place(lambda content: random.Random(7).randbytes(len(content) + 1)),
    "twice": in_place(lambda content: content * 2),
    "another type": in_place(lambda _: b"[1, null]\n"),
    "deep JSON": in_place(lambda _: b'{"a":' * 100_000 + b"\n"),
    "terminal escapes": in_place(lambda content: content.replace(b'"', b'"\x1b]0;x\x07\xff', 40)),
    "a folder": _instead(lambda path: path.mkdir()),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a pipe": _instead(lambda path: os.mkfifo(path)),
    "a link out of the run": _link_out,
    "a sparse gigabyte": lambda path: os.truncate(path, 2**30),
}


class HangError(BaseException):
    """A command did not end; no handler of errors takes it for one."""


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError("".join(traceback.format_stack(frame)[-3:]))

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_command(*words: str) -> tuple[int, str]:
    """Exit code and output of a command; HangError if it does not end."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)
    with alarm(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(["--debug", *words])
    content: Any = out.buffer
    return code, content.getvalue().decode(errors="replace")


def files_of(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def add_older_checkpoint(run_dir: Path, *, newest: int, step: int) -> None:
    """A second one: the newest under another step, for a resume to fall back to."""
    root = run_dir / "checkpoints"
    copy = root / f"step-{step:08d}"
    shutil.copytree(root / f"step-{newest:08d}", copy)
    manifest = msgspec.json.decode((copy / "MANIFEST.json").read_bytes())
    manifest["facts"]["step"] = step
    (copy / "MANIFEST.json").write_bytes(msgspec.json.encode(manifest))


def damage_and_try(
    template: Path, work: Path, file: str, kind: str, commands: tuple[tuple[str, ...], ...], counts: Count
) -> None:
    """Damages a copy of the run directory and runs each command on it; `{run}` and `{out}` in a word are paths."""
    run_dir = work / template.name
    for command in commands:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, run_dir)
        DAMAGE[kind](run_dir / file)
        whole, outside = _checkpoints(run_dir), [path.read_bytes() for path in work.glob(OUTSIDE)]
        counts.tried += 1
        what = f"{kind}: {file}: {' '.join(command)}"
        try:
            code, output = run_command(*(word.format(run=run_dir, out=work / "out") for word in command))
        except HangError as error:
            counts.hung += 1
            counts.notes.append(f"{what} hangs:\n{error}")
            continue
        if code not in EXIT_CODES or "\x1b]" in output:
            counts.tracebacks += 1
            counts.notes.append(f"{what}: exit code {code}\n{output[-1500:]}")
        elif [path.read_bytes() for path in work.glob(OUTSIDE)] != outside:
            counts.lost += 1
            counts.notes.append(f"{what}: what the link leads to was changed")
        elif any(_checkpoints(run_dir).get(name) != content for name, content in whole.items()):
            counts.lost += 1
            counts.notes.append(f"{what}: a checkpoint was changed")
        else:
            counts.survived += 1


def _checkpoints(run_dir: Path) -> dict[str, str]:
    """The hash of every plain file of a checkpoint, but for what is larger than any was."""
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(run_dir)): sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.stat().st_size < 2**20
    }


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


def test_reading_commands_end_in_order_after_damage(template, tmp_path, record_property):
    """Sixty of the pairs of a file and a kind, each kind with other files."""
    sums = {kind: Count() for kind in DAMAGE}
    chance = random.Random(3)
    for kind, counts in sums.items():
        for file in chance.sample(files_of(template), 4):
            command = chance.choice(READING)
            damage_and_try(template, tmp_path / "damaged", file, kind, (command,), counts)
    check({f"damage to a file: {kind}": counts for kind, counts in sums.items()}, record_property)


@pytest.mark.long
@pytest.mark.data
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_command_ends_in_order_after_damage_to_any_file(kind, template, tmp_path, record_property):
    counts = Count()
    for file in files_of(template):
        commands = (*READING, *RESUMING, *(EXPORTING if file.endswith(("plan.json", "MANIFEST.json", "rs")) else ()))
        damage_and_try(template, tmp_path / "damaged", file, kind, commands, counts)
    check({f"damage to a file: {kind}": counts}, record_property)


def _same_size_and_time(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes().swapcase())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# What happens to the data between an interruption and the resume, and a word of the refusal.
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "other content of the same size and time": (_same_size_and_time, "another dataset"),
    "missing": (DAMAGE["missing"], "data.train"),
    "a line more": (lambda path: path.write_bytes(path.read_bytes() + b"one line more\n"), "another dataset"),
    "half": (DAMAGE["first half"], "another dataset"),
    **{kind: (DAMAGE[kind], "data.train") for kind in ("empty", "a folder", "a link to itself", "a pipe")},
}


@pytest.mark.parametrize(
    "change",
    [
        name if place < 2 else pytest.param(name, marks=[pytest.mark.long, pytest.mark.data])
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
@pytest.mark.data
def test_another_user_reads_a_run_and_changes_nothing(template, workplace, record_property):
    """Each command ends by itself, with a line where it would have to write."""
    home = workplace.folder / "stranger"
    home.mkdir()
    os.chown(home, 65534, 65534)
    for folder in (workplace.folder, *workplace.folder.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    installed = (path for path in sys.path if path.endswith("site-packages"))  # without the modules of other tests
    paths = os.pathsep.join((str(Path(__file__).parents[2]), *installed))
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    python = python_of_anyone(environment)
    before = {path: path.read_bytes() for path in template.rglob("*") if path.is_file()}
    count = Count()
    for words in OF_A_STRANGER:
        argv = [word.format(run=template, out=home / "page.html") for word in words]
        done = subprocess.run(
            [*STRANGER, python, "-P", "-m", "shardwise.launch.cli", *argv], cwd=workplace.folder, env=environment,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        is_unchanged = {path: path.read_bytes() for path in template.rglob("*") if path.is_file()} == before
        is_in_order = done.returncode in (0, 2, 4) and "Traceback" not in done.stderr
        is_survived = is_unchanged and is_in_order
        count.add(Count(1, int(is_survived), int(not is_survived)))
        if not is_survived:
            count.notes.append(f"{argv}: {done.returncode}, unchanged: {is_unchanged}\n{done.stdout}{done.stderr}")
    check({"another user's commands on a run": count}, record_property)
