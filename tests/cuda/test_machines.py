"""Machines that people have, from `make train` in a fresh checkout: each trains, or ends with one remedy that works."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_stand_in import Machine, machine_environment, needs_no_cuda
from gpu_machines import GPU_MACHINES, H100, lay_out_gpus
from workplace_factory import make_workplace

from shardwise.launch.probe.machine import read_hardware
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report
from shardwise.trainer.spec.strategy import Precision

pytestmark = needs_no_cuda
NO_COMPILER = {"CXX": "no-such-c++", "CC": "no-such-cc"}
CODE_FOR_V100 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")  # of builds for CUDA 12.6

# A checkout before its first `make train`: launch/bootstrap.sh runs for real, with a pip that only records.
# What pip would install is there already: the environment that the script makes runs the tests' own Python. The
# records show what came before the download.
LINKED = (
    "shardwise", "launch", "slurm", "trainer", "ds_configs", "fsdp_configs", "examples",
    "requirements.lock", "pyproject.toml",
)  # fmt: skip
REPOSITORY = Path(__file__).parents[2]

# The Python that the script finds, and the one of the environment that it makes.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && ln "$0" "$3/bin/python" ;;
    "-m pip") shift 2; exec sh {pip} "$@" ;;
    "-m compileall") ;;
    *) exec {python} "$@" ;;
esac
"""
# As pip finds it: a version of PyTorch's index has the build in its name, and goes before the one of PyPI.
PIP = """echo "$*" >> {asked}
case "${{PIP_EXTRA_INDEX_URL:-}}" in */cu126) build=+cu126 ;; *) build= ;; esac
case "$*" in
    *--report*) echo '{{"install": [{{"metadata": {{"name": "torch", "version": "2.13.0'"$build"'"}}}}]}}' ;;
    *"-e ."*) printf '#!/bin/sh\\nexec "%s" -P -m shardwise.launch.cli "$@"\\n' "$PWD/.venv/bin/python" \\
                  > .venv/bin/shardwise
              chmod +x .venv/bin/shardwise ;;
esac
"""


def make_checkout(folder: Path) -> Path:
    """A folder with what git brings and nothing installed, and in it the Python that the script is to take."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)
    pip, python, asked = tools / "pip.sh", tools / "python", tools / "asked"
    pip.write_text(PIP.format(asked=shlex.quote(str(asked))))
    python.write_text(PYTHON.format(pip=shlex.quote(str(pip)), python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    return folder


class Made(NamedTuple):
    checkout: Path
    code: int
    told: str

    @property
    def has_downloaded(self) -> bool:
        return "-r requirements.lock" in (self.checkout / "tools" / "asked").read_text()

    def read(self, name: str) -> Path:
        (run_dir,) = (self.checkout / "runs").iterdir()
        return run_dir / name

    @property
    def plan(self) -> Plan:
        assert self.code == ExitCode.DONE, self.told
        return codec.read(self.read("plan.json"), Plan)


Train = Callable[..., Made]


@pytest.fixture(scope="module")
def make_train(tmp_path_factory) -> Train:
    """`make train` on a machine, with a job that is small; the data are prepared once for all of them."""
    place = make_workplace(tmp_path_factory.mktemp("machines") / "home")
    settings = (
        f"model.config={place.folder / 'model'}", f"data.train={place.folder / 'text'}", "data.eval=20%",
        "train.seq_len=32", "train.tokens_per_step=128", "train.steps=2", "checkpoint.every=2 steps",
    )  # fmt: skip

    def run(machine: Machine, folder: Path, *words: str, **environment: str) -> Made:
        checkout = make_checkout(folder / "checkout")
        there = machine_environment(machine, folder) | {"SHARDWISE_PYTHON": str(checkout / "tools" / "python")}
        there["PATH"] = f"{folder}:{there['PATH']}"  # what a test puts there is found first
        words = (*words, "--run-dir", f"{checkout}/runs/dry") if "--dry-run" in words else words
        answer = subprocess.run(
            ["/bin/sh", "launch/bootstrap.sh", "train", *settings, *words],
            cwd=checkout, env={**os.environ, **place.environment, **there, **environment}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        return Made(checkout, answer.returncode, answer.stdout + answer.stderr)

    return run


def and_at_length(first: str, *others: str) -> list[object]:
    return [first, *(pytest.param(name, marks=[pytest.mark.long, pytest.mark.products]) for name in others)]


@pytest.mark.parametrize("name", and_at_length("t4", "rtx4090_and_old_card", "laptop_4060", "wsl_rtx3080"))
def test_it_trains_from_make_train_to_the_report(make_train: Train, tmp_path: Path, name: str):
    """None of them has a compiler, Python's headers or a CUDA toolkit."""
    environment = NO_COMPILER
    if name == "t4":
        environment = {"CXX": str(tmp_path / "c++")}
        (tmp_path / "c++").write_text("#!/bin/sh\n! grep -q Python.h\n")
        (tmp_path / "c++").chmod(0o755)
    made = make_train(GPU_MACHINES[name], tmp_path, **environment)
    plan = made.plan
    report = codec.read(made.read("report.json"), Report)
    assert (report.ending, report.step) == (Ending.FINISHED, 2), made.told
    assert made.has_downloaded
    assert plan.device_kind is DeviceKind.CUDA and len(plan.hardware.gpus) == 1
    assert plan.hardware.gpus[0].name == GPU_MACHINES[name].cards[0].name
    assert (plan.chosen.strategy.precision is Precision.FP16_MIXED) is (name == "t4"), "an old chip"
    given = json.loads(made.read("attempts/1/environment.json").read_text())
    assert ("expandable_segments" in json.dumps(given)) is (name != "wsl_rtx3080")
    assert ("GTX 1050 Ti" in made.told) is (name == "rtx4090_and_old_card")


@pytest.mark.parametrize("name", and_at_length("two_different", "rtx5090", "cuda_compat_h100", "vgpu"))
def test_it_is_taken_for_what_it_is(make_train: Train, tmp_path: Path, name: str):
    machine = GPU_MACHINES[name]
    plan = make_train(machine, tmp_path, "--dry-run").plan
    assert [gpu.name for gpu in plan.hardware.gpus] == [machine.cards[0].name]
    assert plan.hardware.can_expand_segments is machine.has_expandable_segments
    assert (plan.hardware.excluded != ()) is (name == "two_different")


def test_a_slice_of_a_card_is_planned_with_its_own_memory(make_train: Train, tmp_path: Path):
    card = replace(H100, mig="Enabled", mig_profiles=(("1g.10gb", 9984),))
    plan = make_train(replace(GPU_MACHINES["cuda_compat_h100"], cards=(card,)), tmp_path, "--dry-run").plan
    (gpu,) = plan.hardware.gpus
    assert gpu.is_mig_on and gpu.memory_bytes == 9984 * 2**20


def test_a_card_without_code_is_told_before_the_download_and_the_remedy_works(make_train: Train, tmp_path: Path):
    machine = GPU_MACHINES["v100"]
    made = make_train(machine, tmp_path / "before", "--dry-run")
    assert made.code == ExitCode.ENVIRONMENT and not made.has_downloaded
    assert "7.0" in made.told and "CUDA 12" in made.told
    (index,) = re.findall(r"export PIP_EXTRA_INDEX_URL=(\S+)", made.told)
    with_code = replace(machine, cuda="12.6", architectures=CODE_FOR_V100)
    again = make_train(with_code, tmp_path / "after", "--dry-run", PIP_EXTRA_INDEX_URL=index)
    assert again.plan.hardware.gpus[0].name == machine.cards[0].name and again.has_downloaded


def test_a_driver_that_is_too_old_is_named_with_the_one_that_does(make_train: Train, tmp_path: Path):
    made = make_train(GPU_MACHINES["old_driver"], tmp_path, "--dry-run")
    assert made.code == ExitCode.ENVIRONMENT
    assert "535.183.01" in made.told and "580.65.06" in made.told


def test_without_nvcc_offload_to_nvme_ends_before_it_starts(make_train: Train, tmp_path: Path):
    """Everything else trains, as above."""
    nvme = ("allow=[offload_nvme,offload_cpu]", "pin.sharding=zero3", "pin.offload=nvme_all",
            f"limits.nvme.path={tmp_path / 'disk'}")  # fmt: skip
    (tmp_path / "nvcc").symlink_to("/bin/false")  # whatever else this machine has
    made = make_train(GPU_MACHINES["t4"], tmp_path, *nvme, CXX="true")
    assert made.code == ExitCode.ENVIRONMENT, made.told
    assert "async_io" in made.told and "nvcc" in made.told
    assert not made.read("metrics.jsonl").exists()


def test_a_gpu_of_amd_is_named_and_training_runs_on_the_cpu(tmp_path: Path):
    laid_out = lay_out_gpus(tmp_path, "amd")
    hardware = read_hardware(root=laid_out.root, environment=laid_out.environment)
    assert hardware.device_kind is DeviceKind.CPU
    assert any("AMD" in note and "not supported" in note for note in hardware.notes)
