"""What NVML reports of cards without a row reaches the plan; one that reports little is no failure."""

import sys
from types import ModuleType
from typing import Any

import pytest
from captured_machine import Machine

from launch.probe.gpus import read_gpus
from launch.probe.machine import describe_hardware
from trainer.planning.device import device_of
from trainer.spec.hardware import Hardware, Host

UUID = "GPU-5f0c1a2b-3d4e-4f50-8a61-7b8c9d0e1f20"
LINE = f"0, {UUID}, 00000000:01:00.0, NVIDIA GeForce RTX 6070, 16303, 500, 15600, 12.0, 610.10, Default, [N/A], [N/A], 250.00, 5, 16, 16"  # noqa: E501  # as the program prints it
REPORTED = {"NumGpuCores": 7168, "MaxClockInfo": {1: 3200, 2: 16000}, "MemoryBusWidth": 192}


class NvmlError(Exception):
    """As the binding's."""


def fake_nvml(reported: dict[str, Any], *, starts: bool = True) -> ModuleType:
    """The binding of a machine with one card; what is not in `reported` its driver does not know."""
    nvml: Any = ModuleType("pynvml")

    def answer(name: str) -> Any:
        def asked(handle: bytes, *more: int) -> int:
            if handle != UUID.encode() or name not in reported:
                raise NvmlError
            return reported[name][more[0]] if more else reported[name]

        return asked

    def init() -> None:
        if not starts:
            raise NvmlError

    nvml.NVMLError, nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM = NvmlError, 1, 2
    nvml.nvmlInit, nvml.nvmlShutdown, nvml.nvmlDeviceGetHandleByUUID = init, lambda: None, lambda uuid: uuid
    for name in ("NumGpuCores", "MaxClockInfo", "MemoryBusWidth"):
        setattr(nvml, f"nvmlDeviceGet{name}", answer(name))
    return nvml


def probed(folder: Any, line: str = LINE) -> Hardware:
    machine = Machine(folder)
    machine.install_nvidia_smi(f'case "$*" in --query-gpu=*) echo "{line}" ;; esac\n')
    findings = read_gpus(root=machine.root, environment=machine.environment)
    host = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
    return Hardware(gpus=findings.gpus, host=host)


def test_a_card_without_a_row_is_rated_by_what_nvml_reports(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(REPORTED))
    hardware = probed(tmp_path)
    (gpu,) = hardware.gpus
    assert (gpu.num_cuda_cores, gpu.max_clock_mhz, gpu.memory_bus_bits, gpu.max_memory_clock_mhz) == (
        7168,
        3200,
        192,
        16000,
    )
    device = device_of(hardware)
    assert device.is_rated_by_driver and device.memory_bytes_per_s == 768 * 10**9
    assert "TFLOP/s" in describe_hardware(hardware)


@pytest.mark.parametrize(
    "nvml",
    [fake_nvml({}), fake_nvml({"NumGpuCores": 7168}), fake_nvml(REPORTED, starts=False), None],
    ids=["reports nothing", "an older driver", "no library", "no binding"],
)
def test_a_driver_that_reports_little_leaves_the_speed_unknown(tmp_path, monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    hardware = probed(tmp_path)
    assert hardware.gpus[0].max_clock_mhz is None
    assert not device_of(hardware).has_known_speed
    assert "not known" in describe_hardware(hardware)


def test_a_card_with_a_row_asks_nvml_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (gpu,) = probed(tmp_path, LINE.replace("RTX 6070", "RTX 5080")).gpus
    assert (gpu.spec_name, gpu.num_cuda_cores) == ("RTX-5080", None)
