"""Damage to one file of a run directory, and what every command then makes of it.

The commands run in this process, as the `shardwise` command runs them; an alarm ends one that hangs.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from shardwise.launch import cli

HANG_S = 300  # for a command that takes a second where no other work keeps the cores busy
OUTSIDE = "outside"
EXIT_CODES = (0, 2, 3, 4)  # of a command that read a damaged file; 1 would be an internal error


def in_place(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: _replace(path, change(path.read_bytes()))


def _replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _flip(content: bytes) -> bytes:
    changed = bytearray(content or b"\0")
    changed[len(changed) // 2] ^= 64
    return bytes(changed)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _link_out(path: Path) -> None:
    """The same content, behind a link that leads out of the run directory."""
    run_dir = next(parent for parent in path.parents if (parent / "attempts").is_dir())
    target = run_dir.parent / OUTSIDE
    path.rename(target)
    path.symlink_to(target)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(),
    "empty": in_place(lambda _: b""),
    "first half": in_place(lambda content: content[: len(content) // 2]),
    "last byte missing": in_place(lambda content: content[:-1]),
    "a flipped bit": in_place(_flip),
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


@dataclass(slots=True)
class Counts:
    """The outcome of every command after damage of one kind."""

    tried: int = 0
    survived: int = 0
    lost: int = 0  # checkpoints that were whole before
    hung: int = 0
    tracebacks: int = 0
    notes: list[str] = field(default_factory=list)

    def row(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("tried", "survived", "lost", "hung", "tracebacks")}


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
    """Every file that a command may read, relative to the run directory."""
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
    template: Path, work: Path, file: str, kind: str, commands: tuple[tuple[str, ...], ...], counts: Counts
) -> None:
    """Damages a copy of the run directory and runs each command on it; `{run}` and `{out}` in a word are paths."""
    run_dir = work / template.name
    for command in commands:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, run_dir)
        DAMAGE[kind](run_dir / file)
        whole, outside = _checkpoints(run_dir), _content(work / OUTSIDE)
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
        elif _content(work / OUTSIDE) != outside:
            counts.lost += 1
            counts.notes.append(f"{what}: what the link leads to was changed")
        elif any(_checkpoints(run_dir).get(name) != content for name, content in whole.items()):
            counts.lost += 1
            counts.notes.append(f"{what}: a checkpoint was changed")
        else:
            counts.survived += 1


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _checkpoints(run_dir: Path) -> dict[str, str]:
    """The hash of every plain file of a checkpoint, but for what is larger than any was."""
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(run_dir)): sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.stat().st_size < 2**20
    }
