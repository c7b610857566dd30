"""`doctor`: Python and its libraries, environment variables, driver and torch, collectives, tools that build operators.

A run sets OMP_NUM_THREADS, TORCH_EXTENSIONS_DIR and CUDA_VISIBLE_DEVICES for its ranks (`launch.engine.launcher`), so
these are reported only if they matter to other processes. A process of its own decides whether torch can use a GPU, by
the check of every run (`launch.probe.torch_fit`). The compiler checks are those of `operators.check_toolchain` before a
build, and the CUDA toolkit is the one that DeepSpeed would find.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.doctor.finding import (
    SMI_TIMEOUT_S,
    Finding,
    Level,
    Machine,
    Place,
    explained,
    fault,
    fine,
    warning,
)  # fmt: skip
from shardwise.launch.doctor.system import obstacle_in
from shardwise.launch.engine.operators import (
    ASYNC_IO,
    CPU_ADAM,
    INSTALL_CUDA,
    check_toolchain,
    find_stale_locks,
    read_toolkit,
)
from shardwise.launch.probe.gpus import find_nvidia_smi, held_bytes, name_gpus, name_processes, read_gpus
from shardwise.launch.probe.installed import installed_version, needed_libraries, unfit_version
from shardwise.launch.probe.measure import measure_gather
from shardwise.launch.probe.program import run_program
from shardwise.launch.probe.torch_fit import BUILT_FOR_CUDA, find_fault
from shardwise.launch.worker import python_environment
from shardwise.trainer import FOLDER
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.packages import missing_packages
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.packages import extra_line, pip_line
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_bytes

OLDEST, NEWEST = (3, 11), (3, 13)
# Modules that our processes import by name; the last two lines are those of the standard library that users' files
# often share a name with.
_IMPORTED = (
    "shardwise", "torch", "accelerate", "transformers", "deepspeed", "peft", "tokenizers",
    "safetensors", "yaml", "msgspec", "numpy", "wandb", "ninja", "pyarrow", "jinja2", "huggingface_hub",
    "code", "copy", "inspect", "json", "logging", "profile", "queue", "random", "signal", "statistics", "test",
    "time", "token", "types", "typing",
)  # fmt: skip
_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked against its peers",
    "NCCL_P2P_DISABLE": "GPUs copy through host memory",
    "NCCL_SHM_DISABLE": "GPUs communicate through the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
}
_HARMLESS = {"", "0", "OFF", "INFO"}


def check_python(machine: Machine, version: tuple[int, ...] = sys.version_info[:2]) -> Iterator[Finding]:
    """The version is one that shardwise and its libraries support."""
    shown, python = ".".join(map(str, version)), machine.place.python
    if OLDEST <= version <= NEWEST:
        yield fine(f"Python {shown}, {python}")
        return
    yield fault(
        f"this is Python {shown} ({python}); shardwise runs on 3.11 to 3.13",
        "make an environment of its own: python3.12 -m venv .venv, or sh launch/bootstrap.sh install",
    )


def check_libraries(machine: Machine) -> Iterator[Finding]:
    """Every library that shardwise needs is installed, at a version that it accepts."""
    needed = needed_libraries("train")
    if not needed:
        yield warning(
            "shardwise itself is not installed in this environment",
            f"{pip_line('-e', '.', python=machine.place.python)} in its folder",
        )
        return
    missing = [name for name in needed if installed_version(name) is None]
    if missing:
        yield fault(f"not installed: {', '.join(missing)}", extra_line("train", python=machine.place.python))
    unfit = {name: found for name in needed if (found := unfit_version(name, user="shardwise"))}
    for name, found in unfit.items():
        yield fault(found.sentence, pip_line(f"{name}{found.required}", python=machine.place.python))
    if not missing and not unfit:
        yield fine(f"{len(needed)} libraries are installed, at versions that shardwise accepts")


def check_shadows(machine: Machine) -> Iterator[Finding]:
    """No file is imported in place of a module of shardwise or of a library."""
    listed = machine.environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = [Path(entry) for entry in listed if entry and Path(entry).resolve() != FOLDER.parent]
    found = [finding for path in paths for finding in _on_module_path(path)]
    working = machine.place.working
    if working.resolve() not in (FOLDER.parent, *(path.resolve() for path in paths)):
        found += [
            warning(
                f"{file} has the name of the module {_module(file)}; ranks do not import it, programs started here do",
                f"rename it: {shlex.join(['mv', str(file), str(file.with_name('my_' + file.name))])}",
            )
            for file in _shadowing(working)
        ]
    yield from found
    if not found:
        yield fine("no file has the name of a module that is needed")


def _on_module_path(folder: Path) -> Iterator[Finding]:
    """Files in a folder of PYTHONPATH, which precede the environment; a warning if packages were installed there."""
    files = _shadowing(folder)
    if files and any(folder.glob("*.dist-info")):
        modules = ", ".join(map(_module, files[:4]))
        yield warning(
            f"PYTHONPATH names {folder}: its {modules} come before those of this environment",
            "unset PYTHONPATH, or unload the environment module that set it (module purge)",
        )
        return
    for file in files:
        yield fault(
            f"{file} comes before the module {_module(file)}: PYTHONPATH names its folder",
            f"rename it, or remove {folder} from PYTHONPATH",
        )


def _module(file: Path) -> str:
    return file.stem if file.suffix == ".py" else file.name


def _shadowing(folder: Path) -> list[Path]:
    """Modules and packages in a folder with the name of one that processes of shardwise import."""
    candidates = [path for name in _IMPORTED for path in (folder / f"{name}.py", folder / name)]
    return [path for path in candidates if path.is_file() or (path / "__init__.py").is_file()]


def check_variables(machine: Machine) -> Iterator[Finding]:
    """No environment variable breaks training or slows it down."""
    found = [*_hidden_gpus(machine), *_python_home(machine), *_library_path(machine), *_other_variables(machine)]
    yield from found
    if not found:
        yield fine("no variable is set that breaks training or slows it down")


def _hidden_gpus(machine: Machine) -> Iterator[Finding]:
    setting = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None or machine.hardware is None:
        return
    there = read_gpus(root=machine.place.root, environment=machine.environment, timeout_s=SMI_TIMEOUT_S).gpus
    if there and not machine.has_gpus:
        yield warning(
            f"CUDA_VISIBLE_DEVICES={setting!r} hides {name_gpus([gpu.index for gpu in there])} ({there[0].name}): "
            "training runs on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )


def _python_home(machine: Machine) -> Iterator[Finding]:
    home = machine.environment.get("PYTHONHOME")
    if not home:
        return
    if Path(home, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "os.py").is_file():
        yield warning(f"PYTHONHOME={home}: every Python loads its standard library from there", "unset PYTHONHOME")
    else:
        yield fault(f"PYTHONHOME={home}: no Python of this version is there", "unset PYTHONHOME")


def _library_path(machine: Machine) -> Iterator[Finding]:
    """No libcudart of another CUDA than torch's is loaded first."""
    cuda = machine.torch.facts.cuda if machine.torch.facts else None
    if cuda is None:
        return
    for entry in filter(None, machine.environment.get("LD_LIBRARY_PATH", "").split(":")):
        names = (path.name for path in Path(entry).glob("libcudart.so.*"))
        versions = {found[1] for name in names if (found := re.search(r"libcudart\.so\.(\d+(?:\.\d+)*)", name))}
        others = sorted(version for version in versions if version.partition(".")[0] != cuda.partition(".")[0])
        if others and len(others) == len(versions):
            yield warning(
                f"LD_LIBRARY_PATH holds {entry}, which is of CUDA {others[-1]}; torch is built for CUDA {cuda} "
                "and brings its own",
                "unset LD_LIBRARY_PATH, or remove this folder from it",
            )


def _other_variables(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    for name, effect in _SLOW_VARIABLES.items():
        value = environment.get(name, "")
        if value.upper() not in _HARMLESS and (machine.num_gpus > 1 or not name.startswith("NCCL_")):
            yield warning(
                f"{name}={value}: {effect}, which is slow", f"unset {name}, unless a fault listed here requires it"
            )
    cores = machine.hardware.host.num_cores if machine.hardware is not None else None
    if environment.get("OMP_NUM_THREADS") == "1" and cores is not None and cores > 1:
        yield warning(
            f"OMP_NUM_THREADS=1: export, import and chat use one of {cores} cores (a run gives its ranks their share)",
            "unset OMP_NUM_THREADS",
        )
    extensions = environment.get("TORCH_EXTENSIONS_DIR")
    if extensions and (problem := obstacle_in(Path(extensions))) is not None:
        yield warning(
            f"TORCH_EXTENSIONS_DIR={extensions} cannot be written: {problem} (runs use a folder of their own)",
            "unset TORCH_EXTENSIONS_DIR",
        )
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name) and not Path(environment[name]).is_dir():
            yield warning(f"{name}={environment[name]}: no such folder", f"unset {name}")


IMPORT_TIMEOUT_S = 20.0
GATHER_TIMEOUT_S = 15.0
_SHOWS_MACHINE = "`shardwise probe` shows the machine as plans see it; --gpus chooses cards"
_SLOW_DISK = (
    "run it again, as the files are cached now; if it is slow each time, move the environment to a local disk "
    "(see `mounts`), or see `nvidia-smi` for a driver that hangs"
)
_HELD_SHARE = 0.05  # of a card; a desktop's own windows are below it
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


def check_driver(machine: Machine) -> Iterator[Finding]:
    """The cards of the machine, the notes of the driver, and the cards that are left out."""
    if machine.hardware is None:
        yield explained(Level.FAULT, machine.obstacle or "", otherwise="run `nvidia-smi` and repair the driver")
        return
    hardware = machine.hardware
    for note in hardware.notes:
        yield explained(Level.WARNING, note, otherwise=_SHOWS_MACHINE)
    for sentence in hardware.excluded:
        if not sentence.startswith("CUDA_VISIBLE_DEVICES"):  # `variables` reports that
            yield explained(Level.WARNING, f"left out: {sentence}", otherwise=_SHOWS_MACHINE)
    if not hardware.gpus:
        yield fine("no GPU: training runs on the CPU")
        return
    first = hardware.gpus[0]
    yield fine(f"{len(hardware.gpus)} x {first.name}, driver {first.driver or 'unknown'}")


def check_torch(machine: Machine) -> Iterator[Finding]:
    """torch loads, and can use the GPUs of the machine."""
    version = installed_version("torch")
    if version is None:
        return  # `check_libraries` reports it
    facts = machine.torch.facts
    if machine.torch.is_slow:
        yield warning(f"torch {version}: {machine.torch.problem}", _SLOW_DISK)
    elif machine.torch.problem is not None:
        yield fault(
            f"torch {version} cannot be loaded: {machine.torch.problem}",
            pip_line("--force-reinstall", "torch", python=machine.place.python),
        )
    elif machine.hardware is not None and (lines := find_fault(machine.hardware, machine.torch)):
        yield explained(Level.FAULT, "\n".join(lines), otherwise=BUILT_FOR_CUDA)
    elif machine.hardware is not None and machine.has_gpus and facts is None and version.endswith("+cpu"):
        name = machine.hardware.gpus[0].name
        yield fault(f"torch {version} was built without CUDA, and there is {name}", BUILT_FOR_CUDA)
    elif facts is None:
        yield fine(f"torch {version} is installed (not loaded)")
    elif not machine.has_gpus:
        yield fine(f"torch {facts.version} loads")
    else:
        program = find_nvidia_smi(machine.place.root, machine.environment)
        table = (
            run_program([program], environment=machine.environment, timeout_s=SMI_TIMEOUT_S).output if program else ""
        )
        newest = re.search(r"CUDA Version:\s*(\d+\.\d+)", table)
        more = f", driver for CUDA up to {newest[1]}" if newest else ""
        seen = f"{machine.num_gpus} GPU{'s' if machine.num_gpus > 1 else ''}"
        yield fine(f"torch {facts.version}, built for CUDA {facts.cuda}, computes on {seen}{more}")


def check_compiled(machine: Machine, *, timeout_s: float = IMPORT_TIMEOUT_S) -> Iterator[Finding]:
    """Libraries that were compiled against one torch load with the installed one."""
    for package, (module, arguments) in COMPILED.items():
        version = installed_version(package)
        if version is None or (package == "bitsandbytes" and not machine.has_gpus):  # not loaded on a CPU
            continue
        result = run_program(
            [machine.place.python, "-P", "-c", f"import {module}"],
            environment=python_environment(machine.place.environment),
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
        yield (fault if machine.has_gpus else warning)(
            f"{package} {version} does not load with torch {torch}: {result.obstacle or problem}",
            f"{pip_line(*arguments, python=machine.place.python)} (or uninstall {package})",
        )


def missing_for(plan: Plan) -> Iterator[Finding]:
    """Packages that are not installed and with which this plan is predicted faster, each with its gain."""
    for package in missing_packages(context_of(plan), plan.chosen):
        yield warning(package.sentence, package.fix)


def check_memory_held(machine: Machine) -> Iterator[Finding]:
    """Memory of the cards that other processes use."""
    if machine.hardware is None or not machine.has_gpus:
        return
    held = [gpu for gpu in machine.hardware.gpus if held_bytes(gpu) > _HELD_SHARE * gpu.memory_bytes]
    for gpu in held:
        pids = " ".join(str(process.pid) for process in gpu.processes)
        end = f"end them (kill {pids})" if pids else "see `nvidia-smi`, on the host where this is a container"
        yield warning(
            f"GPU {gpu.index} ({gpu.name}): {format_bytes(held_bytes(gpu))} of {format_bytes(gpu.memory_bytes)} are "
            f"used by {name_processes(gpu.processes)}",
            f"{end}, or name other cards with --gpus",
        )
    if not held:
        free = min(gpu.free_bytes or gpu.memory_bytes for gpu in machine.hardware.gpus)
        yield fine(f"no other process uses memory of the cards: {format_bytes(free)} free on each")


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


def check_compiler(_machine: Machine) -> Iterator[Finding]:
    """A C++ compiler and Python's headers."""
    try:
        check_toolchain((CPU_ADAM,))
    except EnvironmentFaultError as error:
        yield explained(Level.WARNING, str(error), otherwise="install a C++ compiler")
        return
    yield fine("the C++ compiler finds Python's headers")


def check_libaio(machine: Machine) -> Iterator[Finding]:
    """The library that NVMe offload is compiled with; checked only if there is a compiler."""
    if any(finding.level is Level.WARNING for finding in check_compiler(machine)):
        return
    try:
        check_toolchain((CPU_ADAM, ASYNC_IO))
    except EnvironmentFaultError as error:
        yield explained(Level.WARNING, f"{error}; offload_nvme needs it", otherwise="install libaio-dev")
        return
    yield fine("libaio is installed, for offload to NVMe")


def check_ninja(machine: Machine) -> Iterator[Finding]:
    """The program that runs the compiler."""
    own = Path(machine.place.python).parent / "ninja"
    found = str(own) if own.is_file() else shutil.which("ninja", path=machine.environment.get("PATH"))
    if found is None:
        yield warning(
            "ninja is neither in Python's folder nor on PATH: no operator can be built",
            pip_line("ninja", python=machine.place.python),
        )
    else:
        yield fine(f"ninja: {found}")


def check_toolkit(machine: Machine) -> Iterator[Finding]:
    """The CUDA toolkit, on a machine with GPUs; only offload to NVMe is compiled with it."""
    facts = machine.torch.facts
    if not machine.has_gpus or facts is None or facts.cuda is None:
        return
    found = read_toolkit(machine.environment, machine.place.root)
    if found.release is None:
        yield warning(
            f"{found.problem}: offload to NVMe cannot be built (everything else needs no CUDA toolkit)", INSTALL_CUDA
        )
    elif found.release.partition(".")[0] != facts.cuda.partition(".")[0]:
        yield warning(
            f"{found.home} is of CUDA {found.release}, torch is built for CUDA {facts.cuda}: "
            "offload to NVMe would be linked with another libcudart than torch's",
            INSTALL_CUDA,
        )
    else:
        yield fine(f"{found.home} is of CUDA {found.release}, for offload to NVMe")


def check_build_locks(machine: Machine) -> Iterator[Finding]:
    """Locks of builds that were killed: the next build would wait for them forever."""
    folders = list(_extension_folders(machine.place))
    stale = [lock for folder in folders for lock in find_stale_locks(folder)]
    for lock in stale:
        yield warning(
            f"{lock} was left by a killed build; another program that uses {lock.parent.name} waits for it forever "
            "(shardwise removes its own)",
            f"rm {shlex.quote(str(lock))}",
        )
    if folders and not stale:
        yield fine("no build of an operator left a lock behind")


def _extension_folders(place: Place) -> Iterator[Path]:
    """Folders of shardwise's operators, and those of torch outside of runs: TORCH_EXTENSIONS_DIR or ~/.cache."""
    yield from (path for path in sorted(place.cache.glob("operators/*")) if path.is_dir())
    named = place.environment.get("TORCH_EXTENSIONS_DIR")
    base = place.environment.get("XDG_CACHE_HOME") or str(Path(place.environment.get("HOME", "/"), ".cache"))
    others = [Path(named)] if named else Path(base, "torch_extensions").glob("*")
    yield from (path for path in others if path.is_dir())
