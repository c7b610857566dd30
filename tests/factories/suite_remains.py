"""Remains of a killed run of tests on this machine, and their removal; also the program of the keeper.

    python -I -S suite_remains.py SUITE    # waits until the run SUITE has ended, then removes what is left of it

Whatever a run of tests starts carries its name in the environment variable MARK. Of runs that have ended, and of no
other, removed are processes, clusters (a slot is in use while its lock is held), small disks and memory groups.
Only the standard library, and no program is started unless something is there to be removed.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import IO

MARK = "RUN_OF_TESTS"
NUM_SLOTS = 16
SEARCH_PATH_OF_ROOT = "/usr/sbin:/sbin"  # a user's PATH often lacks both
_NAMESPACES, _LINKS = Path("/run/netns"), Path("/sys/class/net")
_DISK = "tests-"
_GROUP = "shardwise-test-"
_GIVE_UP_S = 120.0
_POLL_S = 0.02


def suite_name(pid: int) -> str | None:
    """The name of the run of tests that is process `pid`; None if there is no such process or it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start_time = after_name[0], after_name[19]
    return None if state in "ZX" else f"{pid}.{start_time}"


def suites_of(pid: int) -> list[str]:
    prefix = f"{MARK}=".encode()
    return [word.removeprefix(prefix).decode() for word in _environment(pid) if word.startswith(prefix)]


def has_ended(suite: str) -> bool:
    return suite_name(int(suite.partition(".")[0])) != suite


def disk_source(suite: str) -> str:
    return f"{_DISK}{suite}"


def remove_remains() -> None:
    kill_all(lambda pid: any(map(has_ended, suites_of(pid))))
    if os.geteuid() != 0:  # the rest can only have been made by root
        return
    for slot in sorted(_slots_with_remains()):
        if lock := lock_slot(slot):
            with lock:
                remove_cluster(slot)
    for mount_point in _disks_of_ended_suites():
        subprocess.run(["umount", "--lazy", mount_point], check=False)
    for group in _groups_of_ended_suites():
        _wait_until(partial(_is_removed, group))


def cluster_folder(slot: int) -> Path:
    """Short, since the path of a socket holds 107 bytes."""
    return Path(f"/tmp/shardwise-slurm-{slot}")


def lock_slot(slot: int) -> IO[str] | None:
    """The lock of a slot, held until the stream is closed; None if another process holds it."""
    stream = Path(f"/run/shardwise-slurm-{slot}.lock").open("w")  # noqa: SIM115 - open as long as the lock is held
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def remove_cluster(slot: int) -> None:
    """Ends every process of the cluster, then removes its networks and its folder, as far as they are there."""
    namespaces, links = _names(_NAMESPACES, slot), _names(_LINKS, slot)
    config = f"SLURM_CONF={cluster_folder(slot)}/slurm.conf".encode()
    networks = {_identity(_NAMESPACES / name) for name in namespaces} - {None}
    kill_all(lambda pid: _network(pid) in networks or config in _environment(pid))
    lines = [*(f"link del {name}" for name in links), *(f"netns del {name}" for name in namespaces)]
    if lines:
        run_ip_lines(lines, check=False)  # the kernel may have removed a link together with its namespace
        _wait_until(lambda: not _names(_NAMESPACES, slot) and not _names(_LINKS, slot))
    shutil.rmtree(cluster_folder(slot), ignore_errors=True)


def run_ip_lines(lines: list[str], *, namespace: str | None = None, check: bool = True) -> None:
    """Runs commands of `ip`, one for each line, in one process; with `check=False` goes on after one that fails."""
    options = (["-n", namespace] if namespace else []) + ([] if check else ["-force"])
    argv, commands = ["ip", *options, "-batch", "-"], "\n".join(lines) + "\n"
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{SEARCH_PATH_OF_ROOT}"}
    answer = subprocess.run(argv, input=commands, env=environment, capture_output=True, text=True, check=False)
    assert not check or answer.returncode == 0, f"{lines}: {answer.stderr}"


def in_network(namespace: str) -> Callable[[int], bool]:
    """Whether a process is alive in a network namespace; one that is dead and not reaped has no network."""
    network = _identity(_NAMESPACES / namespace)
    return lambda pid: network is not None and _network(pid) == network


def pids_in(namespace: str) -> list[int]:
    return list(filter(in_network(namespace), _all_pids()))


def kill_all(is_meant: Callable[[int], bool]) -> None:
    def are_gone() -> bool:
        pids = [pid for pid in _all_pids() if pid != os.getpid() and is_meant(pid)]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGKILL)
        return not pids

    _wait_until(are_gone)


def _slots_with_remains() -> set[int]:
    entries = [*_entries(_NAMESPACES), *_entries(_LINKS), *_entries(Path("/tmp"))]
    found = (re.fullmatch(r"swt(\d+)-?[a-z]\w*|shardwise-slurm-(\d+)", name) for name in entries)
    return {int(match[1] or match[2]) for match in found if match}


def _names(folder: Path, slot: int) -> list[str]:
    return [name for name in _entries(folder) if re.fullmatch(rf"swt{slot}-?[a-z]\w*", name)]


def _disks_of_ended_suites() -> Iterator[str]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, mount_point, *_ = line.split()
        if source.startswith(_DISK) and has_ended(source.removeprefix(_DISK)):
            yield re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount_point)  # a space is written \040


def _groups_of_ended_suites() -> Iterator[Path]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    for own in (line.rpartition(":")[2].lstrip("/") for line in lines if ":memory:" in line):
        for group in Path("/sys/fs/cgroup/memory", own).glob(f"{_GROUP}*"):
            if suite_name(int(group.name.removeprefix(_GROUP))) is None:
                yield group


def _is_removed(group: Path) -> bool:
    """Removes a control group; the kernel refuses while a killed process is on its way out."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _all_pids() -> list[int]:
    return [int(name) for name in _entries(Path("/proc")) if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """As it was when the program was started; empty for a process that has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _network(pid: int) -> tuple[int, int] | None:
    return _identity(Path(f"/proc/{pid}/ns/net"))


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        return path.stat().st_dev, path.stat().st_ino
    return None


def _entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _wait_until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GIVE_UP_S
    while not claim() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def keep(suite: str) -> None:
    """Waits until the run of tests has closed its end of standard input and has ended; then removes what it left."""
    if os.fork():  # the keeper is nobody's child: whoever kills the tests and all their children does not kill it
        os._exit(0)
    sys.stdin.buffer.read()
    _wait_until(lambda: has_ended(suite))  # its files are closed before it has ended
    remove_remains()


if __name__ == "__main__":
    keep(sys.argv[1])
