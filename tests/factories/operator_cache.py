"""DeepSpeed's operators for tests, in the folder that `shardwise train` uses, so that a machine builds each once."""

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from shardwise.launch.engine.operators import build_operators, extensions_dir
from shardwise.launch.job import cache_home
from shardwise.launch.plan.gather import recorded_versions
from shardwise.launch.probe.host import read_host
from shardwise.launch.terminal import Console


@cache
def lacks_libaio() -> bool:
    """True if the header that DeepSpeed's NVMe operator is compiled with is missing here."""
    compiler = [os.environ.get("CXX", "c++"), "-E", "-x", "c++", "-"]
    return subprocess.run(compiler, input=b"#include <libaio.h>\n", capture_output=True, check=False).returncode != 0


NO_LIBAIO = "libaio is missing: sudo apt install libaio-dev (Debian, Ubuntu), sudo dnf install libaio-devel (Fedora)"


BUILD_LIMIT_S = 1800.0  # two operators side by side on a busy machine of two cores have taken eight minutes


def folder_with_operators(*names: str) -> Path:
    """The value for $TORCH_EXTENSIONS_DIR; builds what is missing, which takes a minute or more the first time."""
    folder = extensions_dir(cache_home(), recorded_versions(), read_host().cpu_flags)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, left and BUILD_LIMIT_S)
    try:
        build_operators(names, extensions_dir=folder, on_progress=Console(sys.stderr).line)
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
    return folder


if __name__ == "__main__":  # before all tests run: the first one that needs an operator would wait for its compiler
    folder_with_operators("cpu_adam", *(() if lacks_libaio() else ("async_io",)))
