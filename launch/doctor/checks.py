"""The checks of `doctor` on one machine: driver, torch, collectives, packages, compiler, disks, Slurm.

Each returns findings on the probed hardware. Limits, variables and slow disks are not among them: `probe` shows the
machine, and `train` refuses with a remedy what it cannot use. A process of its own decides whether torch can use a GPU,
by the check of every run (`launch.probe.torch_fit`); it has a time limit, because a GPU in a bad state can block
forever. The compiler is checked as before a build (`operators.check_toolchain`).
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.doctor.finding import Finding, Level, explained, fault, fine, warning
from shardwise.launch.engine.operators import CPU_ADAM, check_toolchain
from shardwise.launch.probe.disks import read_room
from shardwise.launch.probe.gpus import find_nvidia_smi
from shardwise.launch.probe.installed import installed_version, needed_libraries, unfit_version
from shardwise.launch.probe.machine import read_hardware
from shardwise.launch.probe.measure import measure_gather
from shardwise.launch.probe.program import run_program
from shardwise.launch.probe.torch_fit import BUILT_FOR_CUDA, TorchResult, find_fault, run_torch_check
from shardwise.launch.worker import python_environment
from shardwise.slurm.jobs import is_login_node
from shardwise.slurm.queries import run_slurm
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.packages import missing_packages
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.network import loopback_problem
from shardwise.trainer.spec.packages import extra_line, pip_line
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import GIB, MIB, format_bytes
from shardwise.trainer.spec.value import Value

TORCH_TIMEOUT_S = 20.0
SMI_TIMEOUT_S = 8.0
IMPORT_TIMEOUT_S = 20.0
GATHER_TIMEOUT_S = 15.0
LOOPBACK_TIMEOUT_S = 4.0
SLURM_TIMEOUT_S = 6.0
SMALL_SHM_BYTES = 256 * MIB  # Docker gives 64 MiB
LEAST_ROOM_BYTES, LITTLE_ROOM_BYTES = 500 * MIB, 10 * GIB
SHM = "/dev/shm"  # noqa: S108  # its size is read, nothing is written
OUTPUT, CACHE, HUB_CACHE = "the output", "the cache", "the hub's cache"
_NAMED_BY = {
    OUTPUT: "output or --run-dir",
    CACHE: "SHARDWISE_CACHE, or folders: {cache: /a/folder} in config.yaml",
    HUB_CACHE: "HF_HOME, or folders: {huggingface: /a/folder} in config.yaml",
}
_SHOWS_MACHINE = (
    "`shardwise probe` shows the machine as plans see it; --gpus and CUDA_VISIBLE_DEVICES choose among its cards"
)
_SLOW_DISK = (
    "run it again, as the files are cached now; if it is slow each time, move the environment to a local disk, or see "
    "`nvidia-smi` for a driver that hangs"
)
_ANEW = ("--no-cache-dir", "--force-reinstall", "--no-deps")
# Compiled against one torch: what its package is called, what is imported, what pip is given to build it anew.
COMPILED = {
    "flash-attn": ("flash_attn", ("--no-build-isolation", *_ANEW, "flash-attn")),
    "transformer-engine": (
        "transformer_engine.pytorch",
        ("--no-build-isolation", *_ANEW, "transformer-engine", "transformer-engine-torch"),
    ),
    "bitsandbytes": ("bitsandbytes", (*_ANEW, "bitsandbytes")),
}


class Machine(Value, frozen=True, kw_only=True):
    """The probed hardware, the check of its torch, and the folders that runs write to, by purpose."""

    hardware: Hardware | None  # None: the driver of a GPU fails
    obstacle: str = ""  # the sentence and the remedy of that failure
    torch: TorchResult = TorchResult()
    environment: dict[str, str]
    folders: dict[str, Path]
    root: Path = Path("/")  # a test lays out a machine of its own below it
    python: str = sys.executable

    @property
    def num_gpus(self) -> int:
        return len(self.hardware.gpus) if self.hardware is not None else 0


def read_machine(
    environment: Mapping[str, str],
    folders: Mapping[str, Path],
    *,
    loads_torch: bool,
    root: Path = Path("/"),
    python: str = sys.executable,
    timeout_s: float = TORCH_TIMEOUT_S,
) -> Machine:
    """Probes the hardware and, on request, runs the check of torch, which also caches its files."""
    hardware, obstacle, torch = None, "", TorchResult()
    try:
        hardware = read_hardware(root=root, environment=environment, smi_timeout_s=SMI_TIMEOUT_S)
    except EnvironmentFaultError as error:
        obstacle = str(error)
    if loads_torch:
        torch = run_torch_check(hardware, environment, python=python, timeout_s=timeout_s)
    return Machine(
        hardware=hardware, obstacle=obstacle, torch=torch, environment=dict(environment), folders=dict(folders),
        root=root, python=python,
    )  # fmt: skip


def check_driver(machine: Machine) -> Iterator[Finding]:
    """The cards of the machine, the notes of the driver, and the cards that are left out."""
    hardware = machine.hardware
    if hardware is None:
        yield explained(Level.FAULT, machine.obstacle, otherwise="run `nvidia-smi` and repair the driver")
        return
    for sentence in (*hardware.notes, *(f"left out: {each}" for each in hardware.excluded)):
        yield explained(Level.WARNING, sentence, otherwise=_SHOWS_MACHINE)
    if not hardware.gpus:
        yield fine("no GPU: training runs on the CPU")
        return
    first = hardware.gpus[0]
    yield fine(f"{len(hardware.gpus)} x {first.name}, driver {first.driver or 'unknown'}")


def check_torch(machine: Machine) -> Iterator[Finding]:
    """torch loads, and can use the GPUs of the machine."""
    version, facts, hardware = installed_version("torch"), machine.torch.facts, machine.hardware
    if version is None:
        return  # `check_libraries` reports it
    if machine.torch.is_slow:
        yield warning(f"torch {version}: {machine.torch.problem}", _SLOW_DISK)
    elif machine.torch.problem is not None:
        yield fault(
            f"torch {version} cannot be loaded: {machine.torch.problem}",
            pip_line("--force-reinstall", "torch", python=machine.python),
        )
    elif hardware is not None and (lines := find_fault(hardware, machine.torch)):
        yield explained(Level.FAULT, "\n".join(lines), otherwise=BUILT_FOR_CUDA)
    elif hardware is not None and hardware.gpus and facts is None and version.endswith("+cpu"):
        yield fault(f"torch {version} was built without CUDA, and there is {hardware.gpus[0].name}", BUILT_FOR_CUDA)
    elif facts is None:
        yield fine(f"torch {version} is installed (not loaded)")
    elif not machine.num_gpus:
        yield fine(f"torch {facts.version} loads")
    else:
        seen = f"{machine.num_gpus} GPU{'s' if machine.num_gpus > 1 else ''}"
        newest = newest_cuda(machine)
        more = f", driver for CUDA up to {newest}" if newest else ""
        yield fine(f"torch {facts.version}, built for CUDA {facts.cuda}, computes on {seen}{more}")


def newest_cuda(machine: Machine) -> str | None:
    """The newest CUDA that the driver supports, as nvidia-smi prints it."""
    program = find_nvidia_smi(machine.root, machine.environment)
    if program is None:
        return None
    table = run_program([program], environment=machine.environment, timeout_s=SMI_TIMEOUT_S).output
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", table)
    return found and found[1]


def check_compiled(machine: Machine, *, timeout_s: float = IMPORT_TIMEOUT_S) -> Iterator[Finding]:
    """Libraries that were compiled against one torch load with the installed one."""
    for package, (module, arguments) in COMPILED.items():
        version = installed_version(package)
        if version is None or (package == "bitsandbytes" and not machine.num_gpus):  # not loaded on a CPU
            continue
        result = run_program(
            [machine.python, "-P", "-c", f"import {module}"],
            environment=python_environment(machine.environment),
            timeout_s=timeout_s,
        )
        if result.exit_code == 0:
            yield fine(f"{package} {version} loads")
            continue
        if result.exit_code is None and result.obstacle is None:
            yield warning(f"{package} {version} did not load within {timeout_s:g} s", _SLOW_DISK)
            continue
        is_killed = result.exit_code is not None and result.exit_code < 0
        problem = f"loading it ends the process (signal {-(result.exit_code or 0)})" if is_killed else result.last_line
        torch = machine.torch.facts.version if machine.torch.facts else installed_version("torch")
        # Plans use an installed library where there is a GPU; if it does not load, the ranks fail.
        yield (fault if machine.num_gpus else warning)(
            f"{package} {version} does not load with torch {torch}: {result.obstacle or problem}",
            f"{pip_line(*arguments, python=machine.python)} (or uninstall {package})",
        )


def missing_for(plan: Plan) -> Iterator[Finding]:
    """Packages that are not installed and with which this plan is predicted faster, each with its gain."""
    for package in missing_packages(context_of(plan), plan.chosen):
        yield warning(package.sentence, package.fix)


def check_collective(machine: Machine, *, timeout_s: float = GATHER_TIMEOUT_S) -> Iterator[Finding]:
    """Devices reach each other: an all-gather over the GPUs, or over two processes if there are fewer."""
    if machine.hardware is None or machine.torch.facts is None or find_fault(machine.hardware, machine.torch):
        return  # another check reports it
    hardware = machine.hardware
    if len(hardware.gpus) < 2 or any(gpu.is_mig_on for gpu in hardware.gpus):
        hardware = replace(hardware, gpus=(), links=(), num_cpu_devices=2)
    what = f"over {len(hardware.gpus)} GPUs (NCCL)" if hardware.gpus else "over two processes (gloo)"
    found = measure_gather(hardware, timeout_s=timeout_s)
    if found.rates.all_gather_bytes_per_s is None:
        more = "NCCL_DEBUG=INFO shows more" if hardware.gpus else "GLOO_SOCKET_IFNAME=lo selects the loopback"
        yield (warning if found.is_unfinished else fault)(
            found.notes[0], f"look at what `hostname` resolves to, at *_SOCKET_IFNAME and at firewalls; {more}"
        )
    elif found.rates.gathers_only_without_peers and machine.environment.get("NCCL_P2P_DISABLE") != "1":
        yield fault(found.notes[0], "export NCCL_P2P_DISABLE=1, or switch the IOMMU (ACS) between the cards off")
    else:
        yield fine(f"an all-gather {what} ends in time, with the right values")


def check_loopback(_machine: Machine) -> Iterator[Finding]:
    """The loopback connects: ranks of one machine meet there."""
    problem = loopback_problem(limit_s=LOOPBACK_TIMEOUT_S)
    if problem is None:
        yield fine("the loopback connects processes of this machine")
    else:
        yield fault(f"{problem.problem} ({problem.place}): ranks of one machine meet there", problem.remedy)


def check_libraries(machine: Machine) -> Iterator[Finding]:
    """Every library that shardwise needs is installed, at a version that it accepts."""
    needed = needed_libraries("train")
    if not needed:
        yield warning(
            "shardwise itself is not installed in this environment",
            f"{pip_line('-e', '.', python=machine.python)} in its folder",
        )
        return
    missing = [name for name in needed if installed_version(name) is None]
    if missing:
        yield fault(f"not installed: {', '.join(missing)}", extra_line("train", python=machine.python))
    unfit = {name: found for name in needed if (found := unfit_version(name, user="shardwise"))}
    for name, found in unfit.items():
        yield fault(found.sentence, pip_line(f"{name}{found.required}", python=machine.python))
    if not missing and not unfit:
        yield fine(f"{len(needed)} libraries are installed, at versions that shardwise accepts")


def check_compiler(_machine: Machine) -> Iterator[Finding]:
    """A C++ compiler and Python's headers, with which DeepSpeed's operators are built."""
    try:
        check_toolchain((CPU_ADAM,))
    except EnvironmentFaultError as error:
        yield explained(Level.WARNING, str(error), otherwise="install a C++ compiler")
        return
    yield fine("the C++ compiler finds Python's headers")


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Shared memory exists and is large enough for NCCL."""
    if machine.hardware is None:
        return
    shm_bytes = machine.hardware.host.shm_bytes
    if shm_bytes is None:
        yield fault(f"{SHM} is not there", f"sudo mount -t tmpfs tmpfs {SHM}")
    elif shm_bytes < SMALL_SHM_BYTES:
        yield (fault if machine.num_gpus > 1 else warning)(
            f"{SHM} has {format_bytes(shm_bytes)}; NCCL shares memory there",
            f"docker run --shm-size=16g (or --ipc=host); elsewhere: sudo mount -o remount,size=50% {SHM}",
        )
    else:
        yield fine(f"{SHM} has {format_bytes(shm_bytes)}")


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Each folder can be written and has room, quotas counted."""
    for what, folder in machine.folders.items():
        problem = obstacle_in(folder)
        if problem is not None:
            yield fault(
                f"{what} cannot be written: {problem}",
                f"name another folder with {_NAMED_BY[what]}, or: sudo chown $USER {shlex.quote(str(folder))}",
            )
            continue
        room = read_room(folder, machine.environment, root=machine.root)
        stated = f"{folder}: {format_bytes(room.free_bytes)} {room.bytes_limit}"
        remedy = f"make room (shardwise cache, hf cache prune), or name another folder with {_NAMED_BY[what]}"
        if room.free_bytes < LEAST_ROOM_BYTES:
            yield fault(f"{stated}; {what} needs more than that", remedy)
        elif room.free_bytes < LITTLE_ROOM_BYTES:
            yield warning(f"{stated}; a model of a billion parameters writes checkpoints of 12 GB", remedy)
        else:
            yield fine(stated)


def obstacle_in(folder: Path) -> str | None:
    """The reason why a folder, which need not exist yet, cannot be written; None if it can."""
    for path in (folder.absolute(), *folder.absolute().parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
        if path.exists():
            break
    if not path.is_dir():
        return f"{path} is a file"
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".shardwise-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def check_slurm(machine: Machine, *, timeout_s: float = SLURM_TIMEOUT_S) -> Iterator[Finding]:
    """Slurm's controller responds to this user; no finding on a machine without Slurm."""
    if machine.hardware is None or machine.hardware.host.slurm is None:
        return
    is_needed = is_login_node(machine.hardware)
    try:
        pinged = run_slurm(("scontrol", "ping"), environment=machine.environment, timeout_s=timeout_s)
    except EnvironmentFaultError as error:
        yield explained(
            Level.FAULT if is_needed else Level.WARNING,
            str(error),
            otherwise="contact the administrators of the cluster; sudo systemctl status slurmctld, on its machine",
        )
        return
    where = "this is a login node: shardwise submit" if is_needed else "Slurm is available"
    yield fine(f"{where}; {' '.join(pinged.split())[:120]}")
