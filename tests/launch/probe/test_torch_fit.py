"""The check that torch can use the cards of a run: a fake torch and a fake nvidia-smi, the rest is real."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from captured_machine import Machine as LaidOut
from engine_plan_factory import engine_plan
from fake_torch import FakeTorch
from gpu_machines import CUDA_13, FIRST, GPU_MACHINES, H100, SECOND, Card, Machine, lay_out_gpus, machine_with
from warm_python import SWITCH

from shardwise.launch.engine.launcher import launch_environment
from shardwise.launch.probe.machine import read_hardware
from shardwise.launch.probe.torch_fit import check_torch, runs_on
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.packages import OLDEST_CAPABILITY, TORCH_VERSION, lacks_code

ROOT = Path(__file__).parents[3]
EXPANDABLE = "expandable_segments:True"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB."


class Place(NamedTuple):
    """A machine, its torch, and the environment that finds both."""

    machine: LaidOut
    torch: FakeTorch

    @property
    def environment(self) -> dict[str, str]:
        return {**self.machine.environment, "PYTHONPATH": str(self.torch.folder), SWITCH: "0"}  # it loads nothing large

    def hardware(self, *, gpus: tuple[int, ...] | None = None, **environment: str) -> Hardware:
        return read_hardware(root=self.machine.root, environment={**self.environment, **environment}, gpus=gpus)

    def check(self, *, gpus: tuple[int, ...] | None = None, **environment: str) -> Hardware:
        """What a run does before it plans."""
        return check_torch(self.hardware(gpus=gpus, **environment), {**self.environment, **environment})


@pytest.fixture
def place_of(tmp_path):
    def make(machine: Machine | str, problems: Mapping[str, str] = MappingProxyType({})) -> Place:
        torch = FakeTorch(tmp_path / "torch")
        torch.write(GPU_MACHINES[machine] if isinstance(machine, str) else machine, problems)
        return Place(lay_out_gpus(tmp_path, machine), torch)

    return make


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("two_different", {}),
        ("cuda_compat_h100", {}),  # forward compatibility: CUDA 13 on a driver of CUDA 12
        *(("rtx4090_and_old_card", {"CUDA_VISIBLE_DEVICES": each}) for each in ("0,1", "GPU-00000000")),
        ("rtx4090_and_old_card", {}),
    ],
)
def test_a_card_that_torch_uses_is_accepted_with_any_driver_and_an_old_second_one_is_not_tried(place_of, name, setting):
    place = place_of(name)
    assert place.check(**setting).can_expand_segments
    assert place.torch.runs() == [f"{FIRST} {EXPANDABLE}"]


@pytest.mark.parametrize(("gpus", "setting"), [((1,), None), (None, SECOND)])
def test_a_requested_old_card_is_refused_with_the_build_that_has_code_for_it(place_of, gpus, setting):
    place = place_of("rtx4090_and_old_card")
    with pytest.raises(EnvironmentFaultError, match=r"(?s)GTX 1050 Ti.* 6\.1.*sm_75.*CUDA 12.*cu126"):
        place.check(gpus=gpus, **({} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}))


@pytest.mark.parametrize(
    ("card", "changes", "problem", "facts"),
    [
        (H100, {"cuda": None}, None, ("H100", "580.105.08", "without CUDA", "install torch==2.13.0")),
        (H100, {"is_usable": False, "driver": "535.183.01"}, None, ("535.183.01", "580.65.06")),
        (H100, {"is_usable": False}, None, ("0 of 1", "CUDA_VISIBLE_DEVICES", "No CUDA GPUs")),
        (H100, {}, OUT_OF_MEMORY, ("GPU 0", "memory", "nvidia-smi")),
        (H100, {}, "CUDA error: uncorrectable ECC error", ("GPU 0", "ECC", "xid")),
        (replace(H100, capability=(13, 0)), {}, None, ("13.0", "sm_120", "newer torch")),
    ],
    ids=["CPU build", "old driver", "out of reach", "held by others", "failed", "newer than torch"],
)
def test_what_fails_is_explained_with_its_remedy(place_of, card: Card, changes, problem, facts):
    place = place_of(machine_with(card, **changes), {} if problem is None else {FIRST: problem})
    with pytest.raises(EnvironmentFaultError) as raised:
        place.check()
    assert [fact for fact in facts if fact not in str(raised.value)] == []
    assert len(str(raised.value).splitlines()) <= 3


def test_a_torch_that_does_not_load_is_named_with_its_error(place_of):
    place = place_of(machine_with(H100))
    (place.torch.folder / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    with pytest.raises(EnvironmentFaultError, match=r"libcudart\.so\.13"):
        place.check()


def ranks_allocator(hardware: Hardware, **inherited: str) -> str | None:
    plan = engine_plan(Sharding.NONE, kind=DeviceKind.CUDA, hardware=hardware)
    return launch_environment(inherited, plan, extensions_dir=Path("/operators"), cores=1).get("PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    ("name", "num_trials"), [("wsl_rtx3080", 1), ("vgpu", 2)], ids=["known beforehand", "found by a trial"]
)
def test_ranks_do_without_expandable_segments_where_the_driver_has_none(place_of, name, num_trials):
    place = place_of(name)
    hardware = place.check()
    assert not hardware.can_expand_segments and ranks_allocator(hardware) is None
    assert place.torch.runs() == [f"{FIRST} {EXPANDABLE}", f"{FIRST} "][2 - num_trials :]


def test_a_setting_of_the_user_s_is_tried_and_named_where_it_fails(place_of):
    place = place_of("vgpu")
    with pytest.raises(EnvironmentFaultError, match="unset PYTORCH_CUDA_ALLOC_CONF"):
        place.check(PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE)
    other = "max_split_size_mb:64"
    hardware = place.check(PYTORCH_ALLOC_CONF=other)
    assert place.torch.runs()[-1] == f"{FIRST} {other}"
    assert not hardware.can_expand_segments, "predictions know it"
    assert ranks_allocator(hardware, PYTORCH_ALLOC_CONF=other) == other


def test_the_locked_torch_has_code_for_the_architectures_that_its_wheel_names():
    captured_facts = (ROOT / "tests/captured/signatures" / f"torch-{TORCH_VERSION}-cuda.txt").read_text()
    architectures = re.search("^architectures: (.*)$", captured_facts, re.MULTILINE)[1].split()
    assert f"torch=={TORCH_VERSION}" in (ROOT / "requirements.lock").read_text().splitlines()
    assert runs_on(OLDEST_CAPABILITY, architectures) and tuple(architectures) == CUDA_13
    older = [(major, minor) for major in range(5, 8) for minor in range(10) if (major, minor) < OLDEST_CAPABILITY]
    assert not any(runs_on(capability, architectures) for capability in older)
    assert all(lacks_code(TORCH_VERSION, capability) for capability in older)
    for capability, name in (((8, 9), "sm_86"), ((12, 1), "compute_120"), ((9, 0), "sm_90a")):
        assert runs_on(capability, [name])
    assert not runs_on((8, 0), ["sm_86"]) and not runs_on((9, 0), ["gfx90a"])
