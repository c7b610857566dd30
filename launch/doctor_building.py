"""`doctor`: whether DeepSpeed's operators, which offload needs, would build: compiler, headers, ninja, CUDA toolkit.

What is asked of the compiler is what `operators.check_toolchain` asks before a build. The rule for the toolkit is
DeepSpeed's own (`assert_no_cuda_mismatch` in deepspeed/ops/op_builder/builder.py): torch's version, or another minor
one of CUDA 11 and 12.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.doctor_finding import Finding, Level, explained, fine, warning
from launch.doctor_machine import Machine, Place
from launch.doctor_process import ask
from launch.operators import ASYNC_IO, CPU_ADAM, check_toolchain, find_stale_locks
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.value import Value

NVCC_TIMEOUT_S = 5.0
_MAJORS_OF_ANY_MINOR = (11, 12)


class Toolkit(Value, frozen=True, kw_only=True):
    """The CUDA toolkit that torch's extensions would be compiled with."""

    nvcc: str | None
    release: str | None = None  # `13.0`
    problem: str | None = None


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
            f"{machine.place.python} -m pip install ninja",
        )
    else:
        yield fine(f"ninja: {found}")


def check_toolkit(machine: Machine) -> Iterator[Finding]:
    """The CUDA toolkit, on a machine with GPUs."""
    facts = machine.torch.facts
    if not machine.has_gpus or facts is None or facts.cuda is None:
        return
    skips = machine.environment.get("DS_SKIP_CUDA_CHECK") == "1"
    yield from judge_toolkit(read_toolkit(machine.place), cuda=facts.cuda, skips_check=skips)


def judge_toolkit(found: Toolkit, *, cuda: str, skips_check: bool = False) -> Iterator[Finding]:
    wanted = ".".join(cuda.split(".")[:2])
    install = f"install the CUDA {wanted} toolkit (developer.nvidia.com/cuda-toolkit-archive) and set CUDA_HOME"
    if found.nvcc is None:
        yield warning("there is no nvcc: DeepSpeed's operators, which offload needs, cannot be built", install)
    elif found.release is None:
        yield warning(f"{found.nvcc} does not say its version: {found.problem}", install)
    elif not _fit(found.release, wanted) and not skips_check:
        yield warning(
            f"{found.nvcc} is of CUDA {found.release}, torch is built for CUDA {cuda}: DeepSpeed refuses to build its "
            "operators, which offload needs",
            install,
        )
    else:
        yield fine(f"{found.nvcc} is of CUDA {found.release}, as torch needs it")


def _fit(release: str, wanted: str) -> bool:
    major = int(wanted.partition(".")[0])
    return release == wanted or (major in _MAJORS_OF_ANY_MINOR and release.partition(".")[0] == str(major))


def read_toolkit(place: Place) -> Toolkit:
    """The nvcc that torch would take: of CUDA_HOME or CUDA_PATH, of PATH, of /usr/local/cuda, in this order."""
    named = place.environment.get("CUDA_HOME") or place.environment.get("CUDA_PATH")
    usual = place.root / "usr/local/cuda/bin/nvcc"
    if named:
        nvcc = str(Path(named) / "bin/nvcc") if (Path(named) / "bin/nvcc").is_file() else None
    else:
        nvcc = shutil.which("nvcc", path=place.environment.get("PATH")) or (str(usual) if usual.is_file() else None)
    if nvcc is None:
        return Toolkit(nvcc=None)
    answer = ask([nvcc, "--version"], environment=place.environment, timeout_s=NVCC_TIMEOUT_S)
    release = re.search(r"release (\d+\.\d+)", answer.output)
    return Toolkit(nvcc=nvcc, release=release[1] if release else None, problem=answer.obstacle or answer.last_words)


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
