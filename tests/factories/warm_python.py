"""A Python for tests whose processes are forks of one that has imported torch and transformers already.

As `sys.executable` it serves the tests and all that the product starts; tests/warm/server.py lists what is different in
such a process. `WARM_PYTHON=0` and the mark `cold` bring real interpreters. On a machine with a GPU nothing is forked.
"""

import atexit
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SWITCH = "WARM_PYTHON"  # 0: real interpreters
_FOLDER = "WARM_PYTHON_FOLDER"  # of the suite that started this process
_LONGEST_TEMP_DIR = 70  # the path of a socket has at most 107 characters
_WARM = Path(__file__).parents[1] / "warm"
REAL_PYTHON = os.environ.get("REAL_PYTHON", sys.executable)


def start_warm_python() -> None:
    """Makes `sys.executable` a warm Python, from here on and in every process that is started from here."""
    if os.environ.get(SWITCH) == "0" or Path("/dev/nvidiactl").exists():
        return
    if _FOLDER not in os.environ:
        is_short = len(tempfile.gettempdir()) < _LONGEST_TEMP_DIR
        folder = Path(tempfile.mkdtemp(prefix="shardwise-warm-", dir=None if is_short else "/tmp"))
        _make_programs(folder)
        _start_server(folder)
        os.environ[_FOLDER] = str(folder)
        os.environ["REAL_PYTHON"] = REAL_PYTHON
    sys.executable = str(Path(os.environ[_FOLDER]) / "bin" / "python")


def _make_programs(folder: Path) -> None:
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    _write_program(python, REAL_PYTHON, "-I", "-S", _WARM / "stub.py", folder / "socket", REAL_PYTHON)
    for name in ("python3", f"python3.{sys.version_info.minor}"):
        (folder / "bin" / name).symlink_to(python)
    for program in Path(REAL_PYTHON).parent.iterdir():
        if program.name.startswith("python") or not program.is_file():
            continue
        with program.open("rb") as stream:
            is_python = b"python" in stream.readline() and program.suffix == ""
        if is_python and os.access(program, os.X_OK):
            _write_program(folder / "bin" / program.name, python, program)
        else:
            (folder / "bin" / program.name).symlink_to(program)


def _start_server(folder: Path) -> None:
    without = ("HF_", "PYTHONPATH", "COVERAGE_")
    retained = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    (folder / "home").mkdir()
    environment = {**retained, "OMP_NUM_THREADS": "1", "HOME": str(folder / "home"), "DS_ACCELERATOR": "cpu"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(256)
        words = [str(_WARM / "server.py"), str(folder), str(listener.fileno()), str(os.getpid())]
        argv, passed = [REAL_PYTHON, "-P", "-W", "ignore", *words], [listener.fileno()]
        server = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, cwd=folder, pass_fds=passed)
    atexit.register(_end_server, server, os.getpid())


def _end_server(server: subprocess.Popen[bytes], starter: int) -> None:
    if os.getpid() == starter:  # rather than a fork
        server.terminate()
        server.wait()


def _write_program(path: Path, *words: str | Path) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    path.chmod(0o755)
