"""Starts the ranks of one process group: forks of a process that has imported the libraries once.

    rank_launch.py NUM_RANKS PROGRAM ARGUMENT ...

They have the environment that torchrun gives. The first that fails ends the others, and the exit code is 1.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from runpy import run_path

PR_SET_PDEATHSIG = 1


def main(num_ranks: int, program: str, arguments: list[str]) -> int:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
    import deepspeed  # noqa: F401  # Accelerate imports it in every rank (W8)
    import torch

    import shardwise.trainer.runtime.loop.course  # noqa: F401

    del os.environ["DS_ACCELERATOR"]
    # A fork makes torch's pool of threads anew at its first use, which two threads at once would not survive.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    running = {_fork(rank, num_ranks, port) for rank in range(num_ranks)}
    code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not code:
            code = 1
            for other in running:
                os.kill(other, signal.SIGKILL)
    return code


def _fork(rank: int, num_ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run_path(sys.argv[0], run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it is, it ends this rank
        traceback.print_exc()
    finally:
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
