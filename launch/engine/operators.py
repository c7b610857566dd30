"""DeepSpeed's compiled operators: which a plan needs, where they are stored, and their build before the ranks start.

Without this, DeepSpeed compiles an operator at its first use: minutes of silence in every rank. Also, torch guards a
build with a file named `lock` that only the process which made it removes; after a kill it remains, and every later
process waits for it forever, without a message. Hence:

- Operators are built here, one at a time, with progress, into a separate folder for each combination of versions, CPU
  and environment. One builder at a time has an advisory lock on it.
- torch keeps its `lock` file open while it works. A `lock` that no process has open is reported and removed, also if
  everything is built, because it also remains after a kill of a rank that loads an operator.

Only `async_io` needs the CUDA toolkit, and only on a GPU: its builder runs nvcc for its version, adds the toolkit's
headers and links libcudart and libcuda (deepspeed 0.19.8, op_builder/async_io.py and `jit_load` in builder.py). The
toolkit is looked up as torch does. `cpu_adam` uses the builder of the CPU on every device
(accelerator/cuda_accelerator.py). A build at run time does not compare versions: `assert_no_cuda_mismatch` belongs to
builds ahead of time.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shardwise.launch.probe.installed import installed_ns
from shardwise.launch.probe.program import run_program
from shardwise.launch.rundir.lock import exclusive
from shardwise.launch.worker import python_environment, run
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value

CPU_ADAM, ASYNC_IO = "cpu_adam", "async_io"
PROGRESS_EVERY_S = 10.0
_LOCK_NAME = "lock"  # of torch.utils.cpp_extension, in the folder of each extension

Report = Callable[[str], None]
INSTALL_CUDA = (
    "install the CUDA toolkit (nvcc) of torch's CUDA version and set CUDA_HOME, or remove allow: [offload_nvme]"
)
_NVCC_TIMEOUT_S = 5.0
_USES_LIBAIO = "#include <libaio.h>\nint main() { return io_submit(nullptr, 0, nullptr); }\n"


class Toolkit(Value, frozen=True, kw_only=True):
    """A toolkit's folder and its version, or the reason why none compiles."""

    home: Path | None = None
    release: str | None = None  # `13.0`
    problem: str | None = None

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The libraries that DeepSpeed links on a GPU, with its search path."""
        return (f"-L{self.home}", f"-L{self.home}/lib64", "-lcuda", "-lcudart")


def needed_operators(candidate: Candidate) -> tuple[str, ...]:
    """Names of the operators that the ranks of a candidate load; empty for most."""
    names = []
    if candidate.strategy.optimizer.facts.updates_on_host:
        names.append(CPU_ADAM)
    if candidate.strategy.offload.uses_nvme:
        names.append(ASYNC_IO)
    return tuple(names)


def extensions_dir(
    cache_home: Path, versions: Mapping[str, str], cpu_flags: Sequence[str], *, environment: str | None = None
) -> Path:
    """The folder of the operators for these versions and this CPU, the value of $TORCH_EXTENSIONS_DIR.

    `versions` names torch (with its CUDA or cpu tag), deepspeed and python; operators are compiled for this CPU.
    `environment` is the location of the ranks' torch and the time of its installation: ninja compiles again, in the
    ranks, if torch's headers are elsewhere than at the last build, or newer.
    """
    python = ".".join(versions.get("python", "unknown").split(".")[:2])
    parts = [f"{name}-{versions.get(name, 'none')}" for name in ("torch", "deepspeed")]
    parts += [f"cuda-{versions['cuda']}"] if "cuda" in versions else []
    cpu, where = _digest(" ".join(sorted(cpu_flags))), _digest(environment or f"{sys.prefix} {installed_ns('torch')}")
    return cache_home / "operators" / "-".join([*parts, f"py{python}", f"cpu-{cpu}", f"env-{where}"])


def build_operators(
    names: Sequence[str],
    *,
    extensions_dir: Path,
    on_progress: Report,
    device_kind: DeviceKind = DeviceKind.CPU,
    python: str = sys.executable,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Builds the operators of `names` that are missing, for the device that DeepSpeed finds here.

    Raises EnvironmentFaultError with the package to install, or the log. Once `should_stop` is true it ends early, and
    an incomplete build does not count as built.
    """
    if not names:
        return
    try:
        extensions_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFaultError(f"{extensions_dir}: cannot be made: {error.strerror}") from error
    codec.refuse_foreign(extensions_dir, consequence="the ranks would run that code")

    def report_wait(owner: str) -> None:
        on_progress(f"waiting: {owner} is building DeepSpeed's operators in {extensions_dir}")

    with exclusive(extensions_dir / ".builder", on_wait=report_wait):
        remove_stale_locks(extensions_dir, on_progress=on_progress)
        missing = [name for name in names if not _built_file(extensions_dir, name).is_file()]
        if missing:
            check_toolchain(missing, device_kind=device_kind)
        for name in missing:
            if not _build(
                name,
                extensions_dir,
                python=python,
                on_progress=on_progress,
                should_stop=should_stop,
            ):
                return
            _built_file(extensions_dir, name).touch()


def build_needed(plan: Plan, *, cache_home: Path, on_progress: Report, should_stop: Callable[[], bool]) -> Path:
    """Builds the operators of the chosen candidate and returns their folder; raises as `build_operators`.

    Those of a fallback are built when the run reaches it, which most runs never do (`attempts`).
    """
    folder = extensions_dir(cache_home, plan.versions, plan.hardware.host.cpu_flags)
    build_operators(
        needed_operators(plan.chosen),
        extensions_dir=folder,
        on_progress=on_progress,
        device_kind=plan.device_kind,
        should_stop=should_stop,
    )
    return folder


def find_stale_locks(extensions_dir: Path) -> tuple[Path, ...]:
    """Locks of torch under `extensions_dir` that no process of this machine has open."""
    locks = tuple(sorted(extensions_dir.glob(f"*/{_LOCK_NAME}")))
    if not locks:
        return ()
    held = set(_open_files())
    return tuple(lock for lock in locks if str(lock.resolve()) not in held)


def remove_stale_locks(extensions_dir: Path, *, on_progress: Report) -> None:
    """Removes the locks of killed builds, and reports them."""
    for lock in find_stale_locks(extensions_dir):
        lock.unlink(missing_ok=True)
        on_progress(f"removed {lock}: a build of DeepSpeed's {lock.parent.name} was interrupted and left it behind")


def check_toolchain(names: Sequence[str], *, device_kind: DeviceKind = DeviceKind.CPU) -> None:
    """Raises EnvironmentFaultError, with the package to install, if an operator cannot be compiled here."""
    compiler = os.environ.get("CXX", "c++")
    what = f"DeepSpeed's {' and '.join(names)} must be compiled on this machine"
    if shutil.which(compiler) is None:
        raise EnvironmentFaultError(f"{what}, and there is no C++ compiler ({compiler})\n{_install('g++', 'gcc-c++')}")
    include = sysconfig.get_paths()["include"]
    if not _compiles(compiler, "#include <Python.h>\n", "-fsyntax-only", f"-I{include}"):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise EnvironmentFaultError(
            f"{what}, and Python's headers are missing ({include}/Python.h)\n"
            f"{_install(f'python{version}-dev', 'python3-devel')}"
        )
    if ASYNC_IO in names:
        _check_async_io(compiler, what, device_kind)


def _check_async_io(compiler: str, what: str, device_kind: DeviceKind) -> None:
    if not _compiles(compiler, _USES_LIBAIO, "-laio", "-o", os.devnull):
        raise EnvironmentFaultError(f"{what}, and libaio is missing\n{_install('libaio-dev', 'libaio-devel')}")
    if device_kind is DeviceKind.CPU:
        return
    toolkit = read_toolkit(os.environ)
    if toolkit.problem is not None:
        raise EnvironmentFaultError(f"{what}, and {toolkit.problem}\n{INSTALL_CUDA}")
    if not _compiles(compiler, "int main() {}\n", *toolkit.link_flags, "-o", os.devnull):
        raise EnvironmentFaultError(
            f"{what}, and libcudart or libcuda is not found in {toolkit.home}/lib64 or among the system's libraries\n"
            f"{INSTALL_CUDA}"
        )


def _install(debian: str, fedora: str) -> str:
    return f"install it: apt install {debian} (Debian, Ubuntu) or dnf install {fedora} (Fedora, RHEL)"


def _compiles(compiler: str, source: str, *flags: str) -> bool:
    argv = [compiler, "-x", "c++", "-", *flags]
    return subprocess.run(argv, input=source, text=True, capture_output=True, check=False).returncode == 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _built_file(extensions_dir: Path, name: str) -> Path:
    """Written after the operator was built and loaded; a library file alone may be incomplete."""
    return extensions_dir / f"{name}.built"


def _build(
    name: str,
    extensions_dir: Path,
    *,
    python: str,
    on_progress: Report,
    should_stop: Callable[[], bool],
) -> bool:
    """Compiles one operator and logs the seconds; false if it was stopped, EnvironmentFaultError if it failed."""
    on_progress(f"building DeepSpeed's {name}, once for this machine; it takes a minute or more")
    log, started = extensions_dir / f"{name}.log", time.monotonic()
    next_line = started + PROGRESS_EVERY_S

    def report_seconds() -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            on_progress(f"  {name}: {format_seconds(time.monotonic() - started)}")
            next_line += PROGRESS_EVERY_S

    with log.open("wb") as output:
        exit_code = run(
            "shardwise.trainer.runtime.run.operators",
            name,
            output=output,
            errors=output,
            environment=_environment(extensions_dir, python),
            should_stop=should_stop,
            on_poll=report_seconds,
            python=python,
        )
    if exit_code is None:
        return False
    if exit_code != 0:
        raise EnvironmentFaultError(
            f"DeepSpeed's {name} could not be built: {_last_error(log)}\n{_advice(log)}log: {log}"
        )
    on_progress(f"  {name}: built in {format_seconds(time.monotonic() - started)}")
    return True


def _environment(extensions_dir: Path, python: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # it is detected
    return python_environment(environment) | {
        "TORCH_EXTENSIONS_DIR": str(extensions_dir),
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # with ninja
    }


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b|Error\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def _advice(log: Path) -> str:
    """A line with the remedy, if the log shows the cause."""
    if "CUDA_HOME" in log.read_text(errors="replace"):
        return f"{INSTALL_CUDA}\n"
    return ""


def _open_files() -> Iterator[str]:
    """Paths that processes of this user have open."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            descriptors = list(folder.iterdir())
        except OSError:
            continue  # ended, or another user's
        for descriptor in descriptors:
            try:
                yield str(descriptor.readlink())
            except OSError:
                continue


def read_toolkit(environment: Mapping[str, str], root: Path = Path("/")) -> Toolkit:
    """The toolkit of CUDA_HOME or CUDA_PATH, of the nvcc on PATH, or /usr/local/cuda, in torch's order."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    on_path, usual = shutil.which("nvcc", path=environment.get("PATH")), root / "usr/local/cuda"
    if named:
        home = Path(named)
    elif on_path is not None:
        home = Path(on_path).parent.parent
    elif usual.exists():
        home = usual
    else:
        return Toolkit(problem="there is no nvcc")
    nvcc = home / "bin/nvcc"
    reply = run_program([str(nvcc), "--version"], environment=environment, timeout_s=_NVCC_TIMEOUT_S)
    release = re.search(r"release (\d+\.\d+)", reply.output)
    if release is not None:
        return Toolkit(home=home, release=release[1])
    return Toolkit(home=home, problem=reply.obstacle or f"{nvcc} does not report its version: {reply.last_line}")
