"""Compiled operators: those of DeepSpeed, built before a run and loaded as they are; and the C compiler for Triton.

    python -m shardwise.trainer.runtime.run.operators cpu_adam async_io

compiles DeepSpeed's operators into $TORCH_EXTENSIONS_DIR, in a process of its own (`launch.engine.operators` starts
it). DeepSpeed compiles an operator when it is first used: for minutes, in every rank at once, and without a message.
Each time it runs a compiler's driver to check that the operator is up to date, under a lock that a killed rank does not
release (W56). So a rank loads the operators that were built and marked in that folder, which belongs to these versions
and this machine alone. DeepSpeed itself finds the device that the operators are for, unless $DS_ACCELERATOR names one.

DeepSpeedCPUAdam calls py-cpuinfo three times for the same machine. Each time py-cpuinfo starts processes that measure
the clock for over a second (W53).

In a process's first launch Triton compiles its binding to the driver, with $CC, gcc or clang and against Python.h
(triton 3.7.1, runtime/build.py and backends/nvidia/driver.py). Images with CUDA's runtime alone have neither. Where the
job pins Liger's kernels, whatever fails is an error; where the planner chose them, `KernelFallback` runs plain torch.
"""

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.trainer.spec.errors import EnvironmentFaultError

PROCESSORS = Path("/proc/cpuinfo")


def read_processor_from_proc() -> None:
    """From here on, py-cpuinfo reads /proc/cpuinfo in this process if possible, else measures once."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(_with_fallback(cpuinfo.get_cpu_info))


def read_processor(text: str, machine: str) -> dict[str, Any] | None:
    """Processor facts that DeepSpeed 0.19.8 reads, by py-cpuinfo's names; None if the text lacks one.

    Only x86-64 writes its vendor and its flags under these names.
    """
    if machine != "x86_64":
        return None
    first = dict(line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in first.items()}
    if not facts.get("vendor_id") or not facts.get("flags"):
        return None
    return {"arch": "X86_64", "vendor_id_raw": facts["vendor_id"], "flags": sorted(facts["flags"].split())}


def _with_fallback(query_machine: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def get_cpu_info() -> dict[str, Any]:
        try:
            facts = read_processor(PROCESSORS.read_text(), platform.machine())
        except OSError:
            facts = None
        return query_machine() if facts is None else facts

    return get_cpu_info


FOLDER_VARIABLE = "TORCH_EXTENSIONS_DIR"


def use_built_operators() -> None:
    """From here on, operators that are marked as built are imported; others are DeepSpeed's to build."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    build = OpBuilder.jit_load
    if hasattr(build, "imports_built"):
        return

    def jit_load(self: Any, verbose: bool = True) -> ModuleType:  # noqa: ANN401, FBT001, FBT002  # DeepSpeed's own signature
        library = built_library(self.name)
        module: ModuleType = build(self, verbose) if library is None else _imported(self.name, library)
        OpBuilder._loaded_ops[self.name] = module
        return module

    jit_load.imports_built = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    OpBuilder.jit_load = jit_load


def built_library(name: str) -> Path | None:
    """The library of an operator that was built and loaded once; None where there is none in this environment."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not marker(Path(folder), name).is_file():
        return None
    library = Path(folder, name, f"{name}.so")
    return library if library.is_file() else None


def marker(folder: Path, name: str) -> Path:
    """Written after an operator was built and loaded; a library alone may be half of one."""
    return folder / f"{name}.built"


def mark_loaded(folder: Path) -> None:
    """Marks every operator that this process has built and loaded, also those that another needed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    for name in OpBuilder._loaded_ops:
        if Path(folder, name, f"{name}.so").is_file():
            marker(folder, name).touch()


def omit_debug_symbols() -> None:
    """Compiles without `-g`, which is faster by two fifths."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    keep = OpBuilder.strip_empty_entries
    OpBuilder.strip_empty_entries = lambda self, args: [each for each in keep(self, args) if each != "-g"]


_MIN_JOINED = 4  # sources of one folder; each reads torch's headers again, for 20 s


def joined_sources(sources: Sequence[str], package: Path, folder: Path) -> list[str]:
    """Sources of a package, where those of one of its folders are one that includes them all.

    What it includes are copies below `folder`, in which a header counts once: DeepSpeed's have no guards.
    """
    places = Counter(Path(source).parent for source in sources if source.endswith(".cpp"))
    joined = {place for place, number in places.items() if number >= _MIN_JOINED}
    if joined:
        top = Path(os.path.commonpath(sources))
        shutil.copytree(package / top, folder / top)
        for header in (folder / top).rglob("*.h"):
            header.write_bytes(b"#pragma once\n" + header.read_bytes())
    texts: dict[Path, list[str]] = {place: [] for place in joined}
    for source in sources:
        texts.get(Path(source).parent, []).append(f'#include "{Path(source).name}"\n')
    for place, lines in texts.items():
        (folder / place / "joined.cpp").write_text("".join(lines))
    others = [source for source in sources if Path(source).parent not in joined]
    return [*others, *(str(folder / place / "joined.cpp") for place in texts)]


def _load(builder: Any) -> None:  # noqa: ANN401  # DeepSpeed's
    """Builds and loads an operator from joined sources, or from the sources as they are where that fails."""
    separate = builder.sources
    with tempfile.TemporaryDirectory(prefix=f"{builder.name}-") as folder:
        builder.sources = lambda: joined_sources(separate(), Path(builder.deepspeed_src_path("")), Path(folder))
        try:
            builder.load(verbose=True)
        except (RuntimeError, OSError, ValueError) as error:  # of the compiler, of the copies, of other folders
            sys.stdout.write(f"{error}\n")
            builder.sources = separate
            builder.load(verbose=True)


def _imported(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None, library
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_triton_compiler(setting: str) -> None:
    """EnvironmentFaultError that names the setting if Triton's binding to the driver cannot be compiled."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if compiler is None or shutil.which(compiler) is None:
        missing, debian, fedora = f"there is no C compiler ({compiler or 'gcc'})", "gcc", "gcc"
    elif not _finds_python(compiler):
        missing, debian, fedora = "Python's headers are missing (Python.h)", f"python{version}-dev", "python3-devel"
    else:
        return
    raise EnvironmentFaultError(
        f"{setting}: Triton compiles its binding to the driver here, and {missing}\n"
        f"remove {setting}, or apt install {debian} (Debian, Ubuntu) or dnf install {fedora} (Fedora, RHEL)"
    )


class KernelFallback:
    """Runs Liger's kernels until one fails to compile, and plain torch from then on; errors are raised if pinned.

    EnvironmentFaultError that names the setting if it is pinned and no kernel can be compiled here.
    """

    def __init__(self, setting: str, *, is_pinned: bool) -> None:
        self.problem: str | None = None  # why plain torch runs
        self._is_pinned = is_pinned
        try:
            check_triton_compiler(setting)
        except EnvironmentFaultError as error:
            if is_pinned:
                raise
            self.problem = str(error).splitlines()[0]

    def run(self, kernel: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:  # noqa: ANN401  # of any kernel
        """The result of the kernel, or of plain torch from the same inputs if it fails to compile."""
        if self.problem is None:
            try:
                return kernel(*inputs)
            except _triton_errors() as error:
                if self._is_pinned:
                    raise
                self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return plain(*inputs)


def _triton_errors() -> tuple[type[Exception], ...]:
    from triton.errors import TritonError

    return (TritonError, subprocess.CalledProcessError)


def _finds_python(compiler: str) -> bool:
    argv = [compiler, "-x", "c", "-", "-fsyntax-only", f"-I{sysconfig.get_paths()['include']}"]
    done = subprocess.run(argv, input="#include <Python.h>\n", text=True, capture_output=True, check=False)
    return done.returncode == 0


# Our name: the builder that DeepSpeed's accelerator makes by its class name.
BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "fused_adam": "FusedAdamBuilder",
    "shm_comm": "ShareMemCommBuilder",
}


def build(name: str) -> None:
    """Compiles one operator, or finds it compiled; RuntimeError where it cannot be."""
    from deepspeed.accelerator import get_accelerator

    read_processor_from_proc()
    omit_debug_symbols()
    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if builder is None:
        raise RuntimeError(f"DeepSpeed has no {name} for {get_accelerator().device_name()}")
    _load(builder)
    mark_loaded(Path(os.environ[FOLDER_VARIABLE]))


def main(names: Sequence[str]) -> int:
    """Builds `names` one after the other; 2 for a name that is none."""
    unknown = [name for name in names if name not in BUILDERS]
    if unknown or not names:
        sys.stderr.write(f"no such operator: {' '.join(unknown)}; there are {' '.join(BUILDERS)}\n")
        return 2
    for name in names:
        build(name)
        sys.stdout.write(f"{name}: ready\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # with the compilers that it has started
    sys.exit(main(sys.argv[1:]))
