"""`doctor`: Python, its libraries, files that shadow them, and variables that break training.

A run sets OMP_NUM_THREADS, TORCH_EXTENSIONS_DIR and CUDA_VISIBLE_DEVICES for its ranks (`launch.engine.command`), so
these are reported only where they matter to other processes.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.launch.doctor.finding import Finding, Machine, fault, fine, warning
from shardwise.launch.doctor.system import obstacle_in
from shardwise.launch.probe.gpu_selection import name_gpus
from shardwise.launch.probe.gpus import read_gpus
from shardwise.launch.probe.installed import installed_version, needed_libraries, unfit_version
from shardwise.trainer import FOLDER
from shardwise.trainer.spec.packages import extra_line, pip_line

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
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked against its peers",
    "NCCL_P2P_DISABLE": "GPUs copy through host memory",
    "NCCL_SHM_DISABLE": "GPUs communicate through the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
}
_OF_SEVERAL_GPUS = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
_HARMLESS = {"", "0", "OFF", "INFO"}


def check_python(machine: Machine, version: tuple[int, ...] = sys.version_info[:2]) -> Iterator[Finding]:
    """The version that we and the libraries are made for."""
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
    """Files that are imported in place of ours or of a library."""
    listed = machine.environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = [Path(entry) for entry in listed if entry and Path(entry).resolve() != FOLDER.parent]
    found = [finding for path in paths for finding in _on_module_path(path)]
    working = machine.place.working
    if working.resolve() not in (FOLDER.parent, *(path.resolve() for path in paths)):
        found += [
            warning(
                f"{file} has the name of the module {_module(file)}; ranks do not import it, other programs started "
                "here do",
                f"rename it: {shlex.join(['mv', str(file), str(file.with_name('my_' + file.name))])}",
            )
            for file in shadowing(working)
        ]
    yield from found
    if not found:
        yield fine("no file here has the name of a module that is needed")


def _on_module_path(folder: Path) -> Iterator[Finding]:
    """A folder of PYTHONPATH comes before the environment; where packages were installed into it, that may be meant."""
    files = shadowing(folder)
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
            f"rename it, or take {folder} out of PYTHONPATH",
        )


def _module(file: Path) -> str:
    return file.stem if file.suffix == ".py" else file.name


def shadowing(folder: Path) -> list[Path]:
    """Modules and packages right in a folder that have the name of one that our processes import."""
    candidates = [path for name in _IMPORTED for path in (folder / f"{name}.py", folder / name)]
    return [path for path in candidates if path.is_file() or (path / "__init__.py").is_file()]


def check_variables(machine: Machine) -> Iterator[Finding]:
    """Variables of the environment that break training, or slow it down."""
    found = [*_hidden_gpus(machine), *_python_home(machine), *_library_path(machine), *_other_variables(machine)]
    yield from found
    if not found:
        yield fine("no variable is set that breaks training or slows it down")


def _hidden_gpus(machine: Machine) -> Iterator[Finding]:
    setting = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None or machine.hardware is None:
        return
    there = read_gpus(root=machine.place.root, environment=machine.environment, timeout_s=8.0).gpus
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
    """libcudart of another CUDA than torch's, which is then loaded first."""
    cuda = machine.torch.facts.cuda if machine.torch.facts else None
    if cuda is None:
        return
    for entry in filter(None, machine.environment.get("LD_LIBRARY_PATH", "").split(":")):
        versions = {found[1] for path in Path(entry).glob("libcudart.so.*") if (found := _CUDART.search(path.name))}
        others = sorted(version for version in versions if version.partition(".")[0] != cuda.partition(".")[0])
        if others and len(others) == len(versions):
            yield warning(
                f"LD_LIBRARY_PATH holds {entry}, which is of CUDA {others[-1]}; torch is built for CUDA {cuda} "
                "and brings its own",
                "unset LD_LIBRARY_PATH, or take this folder out of it",
            )


_CUDART = re.compile(r"libcudart\.so\.(\d+(?:\.\d+)*)")


def _other_variables(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    for name, effect in _SLOW_VARIABLES.items():
        value = environment.get(name, "")
        if value.upper() not in _HARMLESS and (machine.num_gpus > 1 or name not in _OF_SEVERAL_GPUS):
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
