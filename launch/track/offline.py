"""The files of wandb in a run directory, and `shardwise status --sync`, which sends what was written offline.

    RUN/wandb.json                                the id of the wandb run, its URL, what has been sent
    RUN/wandb/offline-run-TIME-ID/run-ID.wandb    one for each supervisor that wrote offline
    RUN/wandb/run-TIME-ID/run-ID.wandb            the same, of a supervisor that was online

Every supervisor continues the wandb run with the same id. After a kill, the rows that reached the disk have to be
counted: `wandb sync` appends the rows of each folder and compares no steps (wandb 0.31: two folders with the same three
rows make six), and wandb has no reader of its own log. A `.wandb` file is a header of 7 bytes and a log of records in
the format of LevelDB: blocks of 32 KiB with pieces of records, each with checksum, length and kind (whole, first,
middle, last).
"""

import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from shardwise.launch.rundir.state import RunState
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import login_problem
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.value import Value

FILE_NAME = "wandb.json"
_SYNCED = ".wandb.synced"  # suffix of the file that `wandb sync` writes next to a log that it has sent
_HEADER = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_PIECE = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4


class WandbRun(Value, frozen=True, kw_only=True):
    """The wandb run of a run directory."""

    id: str
    project: str
    url: str | None = None  # None if it was never online
    sent_lines: int = 0  # of metrics.jsonl, that wandb's server has for certain
    synced: tuple[str, ...] = ()  # offline folders whose lines wandb's server has
    writing: str | None = None  # the folder that is being written, or was when its process was killed


def read_wandb_run(run_dir: Path) -> WandbRun | None:
    """The wandb run of a run directory; None if there is none, InputError if the file is damaged."""
    path = run_dir / FILE_NAME
    return codec.read(path, WandbRun) if path.is_file() else None


def write_wandb_run(run_dir: Path, run: WandbRun) -> None:
    """Writes wandb.json."""
    codec.write(run_dir / FILE_NAME, run)


def offline_folders(run_dir: Path) -> list[Path]:
    """The folders that were written offline, oldest first."""
    return sorted(path for path in run_dir.glob("wandb/offline-run-*") if path.is_dir())


def unsynced_folders(run_dir: Path) -> list[Path]:
    """The offline folders that have not been sent, oldest first."""
    try:
        run = read_wandb_run(run_dir)
    except InputError:
        run = None
    done = () if run is None else run.synced
    return [path for path in offline_folders(run_dir) if path.name not in done]


def offline_logs(run_dir: Path) -> list[Path]:
    """The logs in the offline folders."""
    return [path for folder in offline_folders(run_dir) for path in sorted(folder.glob("run-*.wandb"))]


def read_records(path: Path) -> Iterator[bytes]:
    """The serialized records of a log, up to the first piece that is damaged or incomplete."""
    content = codec.read_file(path)
    if content[: len(_HEADER)] != _HEADER:
        return
    place, record = _HEADER_BYTES, b""
    while place + _PIECE.size <= len(content):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _PIECE.size:
            place += left
            continue
        checksum, length, kind = _PIECE.unpack_from(content, place)
        piece = content[place + _PIECE.size : place + _PIECE.size + length]
        is_intact = len(piece) == length and checksum == zlib.crc32(piece, zlib.crc32(bytes([kind])))
        if not is_intact or not _WHOLE <= kind <= _LAST:
            return
        record = piece if kind in (_WHOLE, _FIRST) else record + piece
        if kind in (_WHOLE, _LAST):
            yield record
        place += _PIECE.size + length


def sync_runs(runs: Sequence[tuple[Path, RunState]], console: Console, environment: Mapping[str, str]) -> ExitCode:
    """Sends the offline folders of every run with `wandb sync`.

    EnvironmentFaultError if there is no login, or if a folder was not sent.
    """
    waiting = [(run_dir, folders) for run_dir, state in runs if (folders := _folders_to_send(run_dir, state, console))]
    if not waiting:
        console.line("wandb: nothing to send")
        return ExitCode.DONE
    problem = login_problem(environment)
    if problem is not None:
        raise EnvironmentFaultError(f"--sync: {problem}")
    failed = [run_dir for run_dir, folders in waiting if not _sync_run(run_dir, folders, console, environment)]
    if failed:
        raise EnvironmentFaultError(
            "--sync: not everything was sent, see the lines above; a folder that was sent is not sent again:\n"
            + "\n".join(f"  {run_dir}" for run_dir in failed)
        )
    return ExitCode.DONE


def _folders_to_send(run_dir: Path, state: RunState, console: Console) -> list[Path]:
    """The offline folders of a run that have not been sent, without one that may still be written."""
    run = read_wandb_run(run_dir)
    if run is None:
        return []
    waiting = [path for path in offline_folders(run_dir) if path.name not in run.synced and not _is_synced(path)]
    may_write = state in (RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN)
    if may_write and run.writing in [path.name for path in waiting]:
        console.line(f"{run_dir}: {run.writing} is still being written: sync again when the run has ended")
        waiting = [path for path in waiting if path.name != run.writing]
    return waiting


def _sync_run(run_dir: Path, folders: Sequence[Path], console: Console, environment: Mapping[str, str]) -> bool:
    """Sends the folders in one command, in order, and records what was sent: a second time doubles the rows."""
    run = read_wandb_run(run_dir)
    assert run is not None
    console.line(f"{run_dir}: sending {len(folders)} {'folder' if len(folders) == 1 else 'folders'} to wandb")
    subprocess.run(
        [sys.executable, "-P", "-m", "wandb", "sync", *(str(folder.absolute()) for folder in folders)],
        env={name: value for name, value in environment.items() if name != "WANDB_MODE"},  # which may be offline
        cwd=run_dir,  # wandb writes its log of this into ./wandb
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # without a terminal, wandb does not prompt
        check=False,
    )
    sent = tuple(folder.name for folder in folders if _is_synced(folder))
    write_wandb_run(run_dir, msgspec.structs.replace(run, synced=tuple(dict.fromkeys((*run.synced, *sent)))))
    return len(sent) == len(folders)


def _is_synced(folder: Path) -> bool:
    return any(folder.glob(f"*{_SYNCED}"))
