"""`doctor`: whether DeepSpeed's operators, which offload needs, would build: compiler, headers, ninja, CUDA toolkit.

What is asked of the compiler is what `operators.check_toolchain` asks before a build, and the toolkit is the one that
it would find.
"""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, Level, explained, fine, warning
from launch.doctor.machine import Machine, Place
from launch.engine.operators import (
    ASYNC_IO,
    CPU_ADAM,
    INSTALL_CUDA,
    Toolkit,
    check_toolchain,
    find_stale_locks,
    read_toolkit,
)
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.pip_lines import pip_line


def check_compiler(_machine: Machine) -> Iterator[Finding]:
    """A C++ compiler and Python's headers."""
    try:
        check_toolchain((CPU_ADAM,))
    except EnvironmentFaultError as error:
        yield explained(Level.WARNING, str(error), otherwise="install a C++ compiler")
        return
    yield fine("the C++ compiler finds Python's headers")


def check_libaio(_machine: Machine) -> Iterator[Finding]:
    """What offload to NVMe is compiled with; said only where a compiler is there."""
    try:
        check_toolchain((CPU_ADAM,))
    except EnvironmentFaultError:
        return
    try:
        check_toolchain((CPU_ADAM, ASYNC_IO))
    except EnvironmentFaultError as error:
        yield explained(Level.WARNING, f"{error}; offload_nvme needs it", otherwise="install libaio-dev")
        return
    yield fine("libaio is here, for offload to NVMe")


def check_ninja(machine: Machine) -> Iterator[Finding]:
    """The program that runs the compiler."""
    beside = Path(machine.place.python).parent / "ninja"
    found = str(beside) if beside.is_file() else shutil.which("ninja", path=machine.environment.get("PATH"))
    if found is None:
        yield warning(
            "ninja is neither beside Python nor on PATH: no operator can be built",
            pip_line("ninja", python=machine.place.python),
        )
    else:
        yield fine(f"ninja: {found}")


def check_toolkit(machine: Machine) -> Iterator[Finding]:
    """The CUDA toolkit, on a machine with GPUs; only offload to NVMe is compiled with it."""
    facts = machine.torch.facts
    if machine.has_gpus and facts is not None and facts.cuda is not None:
        yield from judge_toolkit(read_toolkit(machine.environment, machine.place.root), cuda=facts.cuda)


def judge_toolkit(found: Toolkit, *, cuda: str) -> Iterator[Finding]:
    """Another major version's libcudart would be linked beside the one that torch brings."""
    if found.release is None:
        yield warning(
            f"{found.problem}: offload to NVMe cannot be built (everything else needs no CUDA toolkit)", INSTALL_CUDA
        )
    elif found.release.partition(".")[0] != cuda.partition(".")[0]:
        yield warning(
            f"{found.home} is of CUDA {found.release}, torch is built for CUDA {cuda}: "
            "offload to NVMe would be built for another libcudart",
            INSTALL_CUDA,
        )
    else:
        yield fine(f"{found.home} is of CUDA {found.release}, for offload to NVMe")


def check_build_locks(machine: Machine) -> Iterator[Finding]:
    """Locks of builds that were killed: whoever comes next would wait for them for ever."""
    folders = list(_extension_folders(machine.place))
    stale = [lock for folder in folders for lock in find_stale_locks(folder)]
    for lock in stale:
        yield warning(
            f"{lock} was left by a build that was killed; another program that uses {lock.parent.name} waits for it "
            "for ever (shardwise removes its own)",
            f"rm {shlex.quote(str(lock))}",
        )
    if folders and not stale:
        yield fine("no build of an operator left a lock behind")


def _extension_folders(place: Place) -> Iterator[Path]:
    """Ours, and those that torch uses outside of runs: $TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions."""
    yield from (path for path in sorted(place.cache.glob("operators/*")) if path.is_dir())
    named = place.environment.get("TORCH_EXTENSIONS_DIR")
    base = place.environment.get("XDG_CACHE_HOME") or str(Path(place.environment.get("HOME", "/"), ".cache"))
    others = [Path(named)] if named else Path(base, "torch_extensions").glob("*")
    yield from (path for path in others if path.is_dir())
