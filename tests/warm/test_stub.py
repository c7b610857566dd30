"""A program that is ended before the warm process has answered for it."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "stub.py"


@pytest.mark.parametrize("answer", ["cold", "pid"])
def test_a_signal_before_the_answer_is_not_lost(tmp_path, answer):
    """It ends the program in a new interpreter, and reaches one in a fork."""
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, subprocess.Popen(["sleep", "60"]) as fork:
        listener.bind(str(place))
        listener.listen()
        program = ["-c", "import time; time.sleep(60)"]
        with subprocess.Popen([sys.executable, "-I", "-S", STUB, place, sys.executable, *program]) as started:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1)  # its signal handlers are set before it asks
                started.send_signal(signal.SIGTERM)
                connection.sendall(f"{answer} {fork.pid}\n".encode())
                ended = started if answer == "cold" else fork
                try:
                    assert ended.wait(30) == -signal.SIGTERM
                finally:
                    started.kill()
                    fork.kill()
