"""Building DeepSpeed's operators: which, where, once, and never behind a dead process's lock."""

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_plan_factory import engine_plan
from hanging_programs import pids_in, wait_until_gone
from operator_cache import folder_with_operators

from shardwise.launch.engine.launcher import launch_environment
from shardwise.launch.engine.operators import (
    build_needed,
    build_operators,
    check_toolchain,
    extensions_dir,
    find_stale_locks,
    needed_operators,
)
from shardwise.trainer.planning.tables.catalogue import LAYOUTS
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind

VERSIONS = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "python": "3.11.2"}

# Stands in for the interpreter that builds: it records what it was asked for, and takes as long as it is told.
BUILDER = """#!{python}
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
with (folder / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\\n")
{then}
"""


@pytest.fixture(autouse=True)
def compiler_that_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own compiler and headers are not what these tests are about."""
    monkeypatch.setenv("CXX", "true")


def fake_python(tmp_path: Path, then: str = "") -> str:
    path = tmp_path / "python"
    path.write_text(BUILDER.format(python=sys.executable, then=then))
    path.chmod(0o755)
    return str(path)


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def build(*names: str, folder: Path, python: str, **settings: Any) -> None:
    """Builds these operators into the folder; what it reports is not shown unless a test takes it."""
    build_operators(names, extensions_dir=folder, python=python, **{"on_progress": lambda _: None, **settings})


@pytest.mark.parametrize("row", [each for each in LAYOUTS if each[0].facts.base_configs])
def test_only_offload_through_deepspeed_needs_operators(row: tuple[Sharding, Offload]):
    sharding, offload = row
    is_on_host = sharding.uses_deepspeed and offload is not Offload.NONE
    is_on_nvme = is_on_host and offload in (Offload.NVME_OPTIMIZER, Offload.NVME_ALL)
    expected = ("cpu_adam",) * is_on_host + ("async_io",) * is_on_nvme
    assert needed_operators(engine_plan(sharding, offload, num_ranks=2).chosen) == expected


def test_what_a_fallback_needs_is_not_built_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A card that holds the model never comes to it, and its machine may have no compiler."""
    monkeypatch.setenv("CXX", "no-such-c++")
    fallback = engine_plan(Sharding.ZERO3, Offload.OPTIMIZER, num_ranks=2).chosen
    plan = msgspec.structs.replace(engine_plan(Sharding.ZERO3, num_ranks=2), fallbacks=(fallback,))
    build_needed(plan, cache_home=tmp_path, on_progress=pytest.fail, should_stop=lambda: False)
    on_fallback = msgspec.structs.replace(plan, candidates=(fallback,))
    with pytest.raises(EnvironmentFaultError, match=r"cpu_adam(.|\n)*g\+\+"):
        build_needed(on_fallback, cache_home=tmp_path, on_progress=lambda _: None, should_stop=lambda: False)


def test_operators_of_another_combination_are_kept_elsewhere():
    home, changes = Path("/cache"), {"torch": "2.13.0+cu130", "deepspeed": "0.20.0", "python": "3.12.1", "cuda": "13.0"}
    folders = {extensions_dir(home, VERSIONS | {name: version}, ("avx2",)) for name, version in changes.items()}
    folders.add(extensions_dir(home, VERSIONS, ("avx2",)))
    folders.add(extensions_dir(home, VERSIONS, ("avx2", "avx512f")))
    folders.add(extensions_dir(home, VERSIONS, ("avx2",), environment="/home/user/another/.venv 1"))
    assert len(folders) == len(changes) + 3 and {folder.parent for folder in folders} == {home / "operators"}


def test_each_operator_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwise.launch.engine.operators.PROGRESS_EVERY_S", 0.0)
    folder, lines = tmp_path / "cache", list[str]()
    for _ in range(2):
        build("cpu_adam", "fused_adam", folder=folder, on_progress=lines.append, python=fake_python(tmp_path))
    module = "-m shardwise.trainer.runtime.run.operators"
    assert asked(folder) == [f"{module} cpu_adam", f"{module} fused_adam"]
    assert sum("built in" in line for line in lines) == 2
    assert any(re.match(r"  cpu_adam: \d", line) for line in lines), "the seconds, while it is built"


def test_a_failed_build_shows_its_error_and_its_log_and_is_tried_again(tmp_path: Path):
    error = "print('x.cpp:3: error: no member named y'); print('ninja stopped'); sys.exit(1)"
    failing = fake_python(tmp_path, then=error)
    with pytest.raises(EnvironmentFaultError, match=r"no member named y\nlog: .*cpu_adam\.log"):
        build("cpu_adam", folder=tmp_path, python=failing)
    build("cpu_adam", folder=tmp_path, python=fake_python(tmp_path))
    assert len(asked(tmp_path)) == 2


@pytest.mark.cold
def test_a_stopped_build_ends_with_its_compilers_and_counts_for_nothing(tmp_path: Path):
    spawn = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'])\n"
        "(folder / 'compiler').write_text(str(p.pid)); p.wait()"
    )
    compiler, python = tmp_path / "compiler", fake_python(tmp_path, then=spawn)
    build("cpu_adam", folder=tmp_path, python=python, should_stop=lambda: bool(pids_in(compiler)))
    wait_until_gone(*pids_in(compiler))
    build("cpu_adam", folder=tmp_path, python=fake_python(tmp_path))
    assert len(asked(tmp_path)) == 2


def test_two_builders_take_turns_and_the_second_finds_the_work_done(tmp_path: Path):
    python = fake_python(tmp_path, then="while not (folder / 'go').exists(): time.sleep(0.01)")
    lines: list[str] = []
    first = threading.Thread(target=build, args=("cpu_adam",), kwargs={"folder": tmp_path, "python": python})
    first.start()
    while not asked(tmp_path):
        time.sleep(0.01)

    def note(line: str) -> None:
        lines.append(line)
        (tmp_path / "go").touch()

    build("cpu_adam", folder=tmp_path, on_progress=note, python=python)
    first.join()
    assert len(lines) == 1 and f"process {os.getpid()}" in lines[0] and str(tmp_path) in lines[0]
    assert len(asked(tmp_path)) == 1


def test_the_lock_of_a_killed_build_is_stale_and_that_of_a_living_one_is_not(tmp_path: Path):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    with lock.open("w") as stream:
        holder = subprocess.Popen(["sleep", "600"], stdin=stream)  # has the file open, as torch's FileBaton does
    assert find_stale_locks(tmp_path) == ()
    holder.kill()
    holder.wait()
    assert find_stale_locks(tmp_path) == (lock,)


def shell_program(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("refused", "names", "package"),
    [
        ("Python.h", ("cpu_adam",), r"python3\.\d+-dev"),
        ("libaio.h", ("cpu_adam", "async_io"), "libaio-dev"),
        ("libaio.h", ("cpu_adam",), None),  # only async_io uses it
    ],
)
def test_missing_headers_are_named_with_what_to_install(tmp_path: Path, monkeypatch, refused, names, package):
    monkeypatch.setenv("CXX", shell_program(tmp_path / "c++", f"! grep -q {refused}"))
    refuses = pytest.raises(EnvironmentFaultError, match=f"apt install {package}") if package else nullcontext()
    with refuses:
        check_toolchain(names)


NVCC = "echo 'Cuda compilation tools, release 13.0, V13.0.48'"


@pytest.mark.parametrize(
    ("nvcc", "compiler", "fact"),
    [(None, "true", "nvcc"), ("exit 1", "true", "nvcc"), (NVCC, '! echo "$*" | grep -q cudart', "libcudart")],
)
def test_on_a_gpu_async_io_is_linked_with_the_toolkit(tmp_path: Path, monkeypatch, nvcc, compiler, fact):
    """Without it DeepSpeed fails in the build, after the data was prepared; offload to host RAM needs none."""
    if nvcc is not None:
        shell_program(tmp_path / "cuda" / "bin" / "nvcc", nvcc)
    monkeypatch.setenv("CXX", shell_program(tmp_path / "c++", compiler))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    check_toolchain(("cpu_adam",), device_kind=DeviceKind.CUDA)
    check_toolchain(("cpu_adam", "async_io"))
    with pytest.raises(EnvironmentFaultError, match=rf"async_io.*{fact}(.|\n)*CUDA_HOME"):
        check_toolchain(("cpu_adam", "async_io"), device_kind=DeviceKind.CUDA)


TOOLKIT_BUILDERS = """
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
builder_of = CUDA_Accelerator().get_op_builder
print(*(name for name in ("CPUAdamBuilder", "AsyncIOBuilder") if issubclass(builder_of(name), CUDAOpBuilder)))
"""


def test_on_a_gpu_deepspeed_compiles_async_io_alone_with_the_toolkit():
    """The premise of `read_toolkit`, read from the DeepSpeed that is installed."""
    done = subprocess.run([sys.executable, "-c", TOOLKIT_BUILDERS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "AsyncIOBuilder"


ADAM_STEP = """
import torch
from shardwise.trainer.runtime.run.operators import use_built_operators
use_built_operators()  # as a rank does
from deepspeed.ops.adam import DeepSpeedCPUAdam
weights = [torch.nn.Parameter(torch.linspace(-1, 1, 1001)) for _ in range(2)]
ours = DeepSpeedCPUAdam([weights[0]], lr=0.1, weight_decay=0.1, adamw_mode=True)
reference = torch.optim.AdamW([weights[1]], lr=0.1, weight_decay=0.1)
for _ in range(3):
    for weight, optimizer in zip(weights, (ours, reference)):
        weight.grad = weight.detach() ** 2
        optimizer.step()
print(f"{(weights[0] - weights[1]).abs().max().item():.1e}")
"""


def test_a_rank_loads_what_was_built_without_compiling_and_it_computes_adamw(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX")
    folder = folder_with_operators("cpu_adam")
    library = folder / "cpu_adam" / "cpu_adam.so"
    built_at = library.stat().st_mtime_ns
    plan = engine_plan(Sharding.ZERO2, Offload.OPTIMIZER)
    rank = launch_environment({"PATH": "/usr/bin:/bin"}, plan, extensions_dir=folder, cores=1)
    done = subprocess.run([sys.executable, "-c", ADAM_STEP], env=rank, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # Rounding of three fp32 steps is 1.2e-6 here; Adam with L2 decay in place of AdamW would be 0.4 off.
    assert float(done.stdout.splitlines()[-1]) < 1e-5
    assert library.stat().st_mtime_ns == built_at
