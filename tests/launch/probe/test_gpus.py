"""Running nvidia-smi: as few runs as needed, and an answer whatever the program does."""

import sys
from types import ModuleType
from typing import Any

import pytest
from captured_machine import Machine, lay_out
from hanging_programs import pids_in, under_a_limit, wait_until_gone

from shardwise.launch.probe.gpus import find_nvidia_smi, read_gpus
from shardwise.launch.probe.machine import describe_hardware
from shardwise.launch.probe.program import ask
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.spec.hardware import Hardware, Host
from shardwise.trainer.spec.units import KIB, MIB


def read(machine, **changes):
    return read_gpus(root=machine.root, environment=machine.environment, **changes)


def change_nvidia_smi(machine, old, new):
    """The stand-in answers one question otherwise."""
    program = machine.programs / "nvidia-smi"
    assert old in program.read_text()
    program.write_text(program.read_text().replace(old, new))


def test_a_machine_without_gpu_starts_no_program(tmp_path):
    machine = lay_out(tmp_path, "no_gpu_laptop")
    findings = read(machine)
    assert (findings.gpus, findings.notes, findings.failure) == ((), (), None)
    assert machine.smi_runs() == []


def test_a_card_whose_display_holds_memory_takes_one_more_run(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    (gpu,) = read(machine).gpus
    assert [(holder.name, holder.memory_bytes) for holder in gpu.holders] == [
        ("ollama", 318 * MIB),
        ("Xorg", 512 * MIB),
        ("gnome-shell", 187 * MIB),
        ("...rack-uuid=3190708988185955192", 296 * MIB),
    ]
    assert len(machine.smi_runs()) == 3


def test_several_idle_cards_are_asked_for_their_links_only(tmp_path):
    machine = lay_out(tmp_path, "nvlink_8x_h100")
    findings = read(machine)
    assert len(findings.gpus) == 8
    assert len(findings.links) == 28
    assert [gpu.numa_node for gpu in findings.gpus] == [0] * 4 + [1] * 4
    runs = machine.smi_runs()
    assert [run.split("=")[0] for run in runs] == [
        "--query-compute-apps",
        "--query-gpu",
        "nvlink -s",
        "topo -m",
        "topo -p2p r",
    ]


def test_the_kernel_knows_the_numa_node_of_a_single_card(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n")
    assert read(machine).gpus[0].numa_node == 1
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1\n")
    assert read(machine).gpus[0].numa_node is None


def test_mig_slices_are_devices_numbered_after_the_cards(tmp_path):
    machine = lay_out(tmp_path, "mig_a100")
    findings = read(machine)
    assert [(gpu.index, gpu.name, gpu.is_mig_on) for gpu in findings.gpus] == [
        (1, "NVIDIA A100-SXM4-40GB", False),
        (2, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", True),
        (3, "NVIDIA A100-SXM4-40GB MIG 2g.10gb", True),
        (4, "NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb", True),
    ]
    assert findings.excluded == ()


def test_mig_without_a_slice_is_named(tmp_path):
    machine = lay_out(tmp_path, "mig_a100")
    change_nvidia_smi(machine, "exec cat list.txt", "echo 'GPU 0: x (UUID: y)'; exit")
    findings = read(machine)
    assert [gpu.index for gpu in findings.gpus] == [1]
    assert "MIG" in findings.excluded[0]


def test_a_card_that_forbids_computing_is_named(tmp_path):
    findings = read(lay_out(tmp_path, "mixed_models"))
    assert [gpu.index for gpu in findings.gpus] == [0, 1, 2]
    (excluded,) = findings.excluded
    for fact in ("GPU 3 (NVIDIA RTX A4000)", "Prohibited", "`sudo nvidia-smi -c 0`"):
        assert fact in excluded


def test_a_card_that_shares_the_memory_of_the_host_has_that_memory(tmp_path):
    (gpu,) = read(lay_out(tmp_path, "unified_gb10")).gpus
    assert (gpu.memory_bytes, gpu.free_bytes) == (127600748 * KIB, 118566368 * KIB)


def test_a_card_whose_memory_is_not_known_is_named(tmp_path):
    machine = lay_out(tmp_path, "unified_gb10")
    change_nvidia_smi(machine, "exec cat query-gpu.csv", "sed s/GB10/H100/ query-gpu.csv; exit")
    findings = read(machine)
    assert findings.gpus == ()
    assert "GPU 0 (NVIDIA H100)" in findings.excluded[0] and "memory" in findings.excluded[0]


def test_a_narrow_slot_is_said(tmp_path):
    notes = read(lay_out(tmp_path, "pcie_2x_rtx3090")).notes
    assert any("GPU 1 (NVIDIA GeForce RTX 3090)" in note and "8 of its 16 PCIe lanes" in note for note in notes)


def test_fields_that_an_older_driver_does_not_know_read_as_unknown(tmp_path):
    machine = Machine(tmp_path)
    machine.install_nvidia_smi("""case "$1" in
*memory.reserved*) echo 'Field "memory.reserved" is not a valid field to query.'; exit 2 ;;
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
--query-gpu=*) echo "0, GPU-1, 0000:3B:00.0, Tesla T4, 15109, 15100, 460.106.00, Default, On, [N/A], 70, 3, 16, 16" ;;
esac
""")
    (gpu,) = read(machine).gpus
    assert (gpu.memory_bytes, gpu.free_bytes, gpu.driver) == (15109 * MIB, 15100 * MIB, "460.106.00")
    assert (gpu.usable_bytes, gpu.compute_capability) == (None, None)
    assert len(machine.smi_runs()) == 4


def test_a_field_unknown_for_ever_does_not_loop(tmp_path):
    machine = Machine(tmp_path)
    machine.install_nvidia_smi("echo 'Field \"index\" is not a valid field to query.'; exit 2\n")
    findings = read(machine)
    assert findings.failure is not None
    assert 'Field "index"' in findings.failure.sentence


def test_one_dead_card_among_good_ones_is_a_note(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    answer = 'cat query-gpu.csv; echo "Unable to determine the device handle"; exit 15'
    change_nvidia_smi(machine, "exec cat query-gpu.csv", answer)
    findings = read(machine)
    assert len(findings.gpus) == len(findings.notes) == 1
    assert "Unable to determine the device handle" in findings.notes[0]


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    machine, child = Machine(tmp_path), tmp_path / "child"
    machine.install_nvidia_smi(f"sleep 300 & echo $! >> {child}\nwait\n")
    findings, _ = under_a_limit(lambda limit_s: read(machine, timeout_s=limit_s), lambda _: bool(pids_in(child)))
    assert findings.failure is not None and "does not answer" in findings.failure.sentence
    for pid in pids_in(child):
        wait_until_gone(pid)


def test_a_further_run_that_hangs_is_a_note(tmp_path):
    machine = lay_out(tmp_path, "pcie_2x_rtx3090")
    change_nvidia_smi(machine, "exec cat topo.txt", "exec sleep 300")
    findings, limit_s = under_a_limit(lambda limit_s: read(machine, timeout_s=limit_s), lambda found: bool(found.gpus))
    assert (len(findings.gpus), findings.links) == (2, ())
    assert any("`nvidia-smi topo -m`" in note and f"{limit_s:g} s" in note for note in findings.notes)


@pytest.mark.parametrize("is_on_bus", [True, False])
def test_a_failure_says_whether_a_card_is_on_the_bus(tmp_path, is_on_bus):
    machine = Machine(tmp_path)
    machine.install_nvidia_smi(
        'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9\n'
    )
    if is_on_bus:
        machine.put_gpu_on_bus()
    findings = read(machine)
    assert findings.gpus == () and findings.failure is not None
    assert findings.is_gpu_on_bus is is_on_bus


def test_a_card_without_a_driver_is_noted_with_the_remedy(tmp_path):
    machine = Machine(tmp_path)
    machine.put_gpu_on_bus()
    machine.put_gpu_on_bus("0000:01:00.1", pci_class="0x040300")  # its sound
    (note,) = read(machine).notes
    assert "1 NVIDIA GPU " in note and "(0000:01:00.0)" in note and "driver" in note


def test_a_driver_without_its_tools_is_noted_with_another_remedy(tmp_path):
    machine = Machine(tmp_path)
    machine.put_gpu_on_bus(pci_class="0x030200")
    machine.put_gpu_on_bus("0000:02:00.0", pci_class="0x030200")
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06\n")
    (note,) = read(machine).notes
    assert "2 NVIDIA GPUs " in note and "(0000:01:00.0, 0000:02:00.0)" in note and "docker run --gpus all" in note


def test_a_card_of_another_maker_is_not_nvidias(tmp_path):
    machine = Machine(tmp_path)
    machine.write("sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n")
    machine.write("sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n")
    assert read(machine).notes == ()


def test_wsl_keeps_the_program_off_the_path(tmp_path):
    machine = Machine(tmp_path)
    assert find_nvidia_smi(machine.root, machine.environment) is None
    machine.write("usr/lib/wsl/lib/nvidia-smi", "#!/bin/sh\n")
    program = machine.root / "usr/lib/wsl/lib/nvidia-smi"
    program.chmod(0o755)
    assert find_nvidia_smi(machine.root, machine.environment) == str(program)


def test_output_that_is_no_utf8_is_read_all_the_same():
    answer = ask(["/bin/sh", "-c", r"printf '\377ok'"], environment={}, timeout_s=10)
    assert answer.output == "�ok"
    assert answer.exit_code == 0


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
