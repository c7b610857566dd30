"""Building DeepSpeed's operators: which, where, once, and never behind a dead process's lock."""

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

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
HOME = Path("/home/ada/.cache/shardwise")

# Holds the lock file open as torch's FileBaton does, until it is killed.
HOLDER = (
    "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(600)"
)

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


@pytest.mark.parametrize("row", [each for each in LAYOUTS if each[0].facts.base_configs])
def test_only_offload_through_deepspeed_needs_operators(row: tuple[Sharding, Offload]):
    sharding, offload = row
    expected = {
        (True, Offload.OPTIMIZER): ("cpu_adam",),
        (True, Offload.OPTIMIZER_PARAMS): ("cpu_adam",),
        (True, Offload.NVME_OPTIMIZER): ("cpu_adam", "async_io"),
        (True, Offload.NVME_ALL): ("cpu_adam", "async_io"),
    }.get((sharding.uses_deepspeed, offload), ())
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
    changes: list[dict[str, str]] = [
        {}, {"torch": "2.13.0+cu130"}, {"deepspeed": "0.20.0"}, {"python": "3.12.1"}, {"cuda": "13.0"},
    ]  # fmt: skip
    folders = {extensions_dir(HOME, VERSIONS | change, ("avx2",)) for change in changes}
    folders.add(extensions_dir(HOME, VERSIONS, ("avx2", "avx512f")))
    folders.add(extensions_dir(HOME, VERSIONS, ("avx2",), environment="/home/user/another/.venv 1"))
    assert len(folders) == len(changes) + 2 and {folder.parent for folder in folders} == {HOME / "operators"}


def test_each_operator_is_built_once(tmp_path: Path):
    folder = tmp_path / "cache"
    lines: list[str] = []
    python = fake_python(tmp_path)
    for _ in range(2):
        build_operators(("cpu_adam", "fused_adam"), extensions_dir=folder, on_progress=lines.append, python=python)
    assert asked(folder) == [
        "-m shardwise.trainer.runtime.run.operators cpu_adam",
        "-m shardwise.trainer.runtime.run.operators fused_adam",
    ]
    assert sum("built in" in line for line in lines) == 2


def test_a_failed_build_shows_its_error_and_its_log_and_is_tried_again(tmp_path: Path):
    failing = fake_python(
        tmp_path, then="print('x.cpp:3: error: no member named y'); print('ninja stopped'); sys.exit(1)"
    )
    with pytest.raises(EnvironmentFaultError, match=r"no member named y\nlog: .*cpu_adam\.log"):
        build_operators(("cpu_adam",), extensions_dir=tmp_path, on_progress=lambda _: None, python=failing)
    build_operators(("cpu_adam",), extensions_dir=tmp_path, on_progress=lambda _: None, python=fake_python(tmp_path))
    assert len(asked(tmp_path)) == 2


@pytest.mark.cold
def test_a_stopped_build_ends_with_its_compilers_and_counts_for_nothing(tmp_path: Path):
    spawn = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'])\n"
        "(folder / 'compiler').write_text(str(p.pid)); p.wait()"
    )
    compiler = tmp_path / "compiler"

    build_operators(
        ("cpu_adam",), extensions_dir=tmp_path, on_progress=lambda _: None, python=fake_python(tmp_path, then=spawn),
        should_stop=lambda: bool(pids_in(compiler)),
    )  # fmt: skip
    wait_until_gone(*pids_in(compiler))
    build_operators(("cpu_adam",), extensions_dir=tmp_path, on_progress=lambda _: None, python=fake_python(tmp_path))
    assert len(asked(tmp_path)) == 2


def test_two_builders_take_turns_and_the_second_finds_the_work_done(tmp_path: Path):
    python = fake_python(tmp_path, then="while not (folder / 'go').exists(): time.sleep(0.01)")
    lines: list[str] = []
    first = threading.Thread(
        target=build_operators,
        args=(("cpu_adam",),),
        kwargs={"extensions_dir": tmp_path, "on_progress": lambda _: None, "python": python},
    )
    first.start()
    while not asked(tmp_path):
        time.sleep(0.01)

    def note(line: str) -> None:
        lines.append(line)
        (tmp_path / "go").touch()

    build_operators(("cpu_adam",), extensions_dir=tmp_path, on_progress=note, python=python)
    first.join()
    assert len(lines) == 1 and f"process {os.getpid()}" in lines[0] and str(tmp_path) in lines[0]
    assert len(asked(tmp_path)) == 1


@pytest.mark.cold
def test_the_lock_of_a_killed_build_is_stale_and_that_of_a_living_one_is_not(tmp_path: Path):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        assert find_stale_locks(tmp_path) == ()
        holder.kill()
        holder.wait()
    assert find_stale_locks(tmp_path) == (lock,)


@pytest.mark.parametrize(
    ("refused", "names", "package"),
    [
        ("Python.h", ("cpu_adam",), r"python3\.\d+-dev"),
        ("libaio.h", ("cpu_adam", "async_io"), "libaio-dev"),
        ("libaio.h", ("cpu_adam",), None),  # only async_io uses it
    ],
)
def test_missing_headers_are_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, names: tuple[str, ...], package: str | None
):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n! grep -q {refused}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    refuses = pytest.raises(EnvironmentFaultError, match=f"apt install {package}") if package else nullcontext()
    with refuses:
        check_toolchain(names)


def fake_toolkit(folder: Path, nvcc: str = "echo 'Cuda compilation tools, release 13.0, V13.0.48'") -> Path:
    program = folder / "cuda" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{nvcc}\n")
    program.chmod(0o755)
    return folder / "cuda"


@pytest.mark.parametrize(
    ("nvcc", "compiler", "fact"),
    [
        (None, "true", "nvcc"),
        ("exit 1", "true", "nvcc"),
        ("echo 'Cuda compilation tools, release 13.0, V13.0.48'", '! echo "$*" | grep -q cudart', "libcudart"),
    ],
    ids=["no toolkit", "nvcc fails", "no libraries"],
)
def test_on_a_gpu_async_io_is_linked_with_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: str | None, compiler: str, fact: str
):
    """Without it DeepSpeed fails in the build, after the data was prepared; offload to host RAM needs none."""
    program = tmp_path / "c++"
    program.write_text(f"#!/bin/sh\n{compiler}\n")
    program.chmod(0o755)
    home = tmp_path / "nowhere" if nvcc is None else fake_toolkit(tmp_path, nvcc)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("CUDA_HOME", str(home))
    check_toolchain(("cpu_adam",), device_kind=DeviceKind.CUDA)
    check_toolchain(("cpu_adam", "async_io"))
    with pytest.raises(EnvironmentFaultError, match=rf"async_io.*{fact}(.|\n)*CUDA_HOME"):
        check_toolchain(("cpu_adam", "async_io"), device_kind=DeviceKind.CUDA)


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
