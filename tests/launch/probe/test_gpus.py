"""Running nvidia-smi as rarely as needed, a result for each failure, and the cards to plan for."""

from typing import Any

import pytest
from captured_machine import Machine, lay_out
from hanging_programs import pids_in, under_a_limit, wait_until_gone

from shardwise.launch.probe.gpus import read_gpus, select_gpus, visible_gpus
from shardwise.launch.probe.machine import describe_hardware, read_hardware
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Gpu, GpuProcess, Hardware
from shardwise.trainer.spec.units import GIB, KIB, MIB


def read(machine, **changes):
    return read_gpus(root=machine.root, environment=machine.environment, **changes)


def change_nvidia_smi(machine, old, new):
    program = machine.programs / "nvidia-smi"
    assert old in program.read_text()
    program.write_text(program.read_text().replace(old, new))


def test_a_card_whose_display_uses_memory_needs_one_more_run(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n")
    (gpu,) = read(machine).gpus
    assert gpu.numa_node == 1
    used = {"ollama": 318, "Xorg": 512, "gnome-shell": 187, "...rack-uuid=3190708988185955192": 296}
    assert [(process.name, process.memory_bytes // MIB) for process in gpu.processes] == [*used.items()]
    assert len(machine.smi_runs()) == 3
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1\n")
    script = r'cat query-gpu.csv; printf "Unable to determine the device handle \\377\n"; exit 15'
    change_nvidia_smi(machine, "exec cat query-gpu.csv", script)
    findings = read(machine)
    assert findings.gpus[0].numa_node is None, "the kernel's -1 on a machine with one node"
    (note,) = findings.notes
    assert "Unable to determine the device handle" in note, "one dead card among good ones"


def test_mig_slices_are_devices_numbered_after_the_cards_also_of_several(tmp_path):
    machine = lay_out(tmp_path, "mig_a100")
    findings, card = read(machine), "NVIDIA A100-SXM4-40GB"
    slices = [f"{card} MIG {profile}" for profile in ("3g.20gb", "2g.10gb", "1c.2g.10gb")]
    assert [(gpu.index, gpu.name) for gpu in findings.gpus] == list(enumerate((card, *slices), 1))
    assert [gpu.is_mig_on for gpu in findings.gpus] == [False, True, True, True] and findings.excluded == ()
    _, first, second, instance = findings.gpus
    assert (first.spec_name, first.uuid) == ("A100-SXM4-40GB-MIG-3g.20gb", "MIG-0f7a2c9e-1b3d-5e84-a6c0-4d92e8f1b357")
    assert (first.memory_bytes, first.free_bytes) == (19968 * MIB, 19943 * MIB)
    assert (second.free_bytes, instance.spec_name) == ((9856 - 4211) * MIB, None), "of a compute instance: not known"
    change_nvidia_smi(machine, "exec cat list.txt", "echo 'GPU 0: x (UUID: y)'; exit")
    findings = read(machine)
    assert [gpu.index for gpu in findings.gpus] == [1] and "MIG" in findings.excluded[0], "no slice was made"
    machine = lay_out(tmp_path / "several", "mig_a100")
    change_nvidia_smi(machine, "exec cat query-gpu.csv", "sed s/Disabled/Enabled/ query-gpu.csv; exit")
    second = "cat list.txt; echo '  MIG 1g.5gb Device 0: (UUID: MIG-second)'; exit"
    change_nvidia_smi(machine, "exec cat list.txt", second)
    row = "|  1    7   0   0  |   25MiB / 4864MiB  | 14      0 |  1   0    0    0    0 |"
    change_nvidia_smi(machine, "exec cat table.txt", f"cat table.txt; echo '{row}'; exit")
    findings = read(machine)
    assert [gpu.index for gpu in findings.gpus] == [2, 3, 4, 5]
    assert [gpu.uuid == "MIG-second" for gpu in findings.gpus] == [False, False, False, True]


def test_a_card_that_shares_the_memory_of_the_host_has_that_memory(tmp_path):
    machine = lay_out(tmp_path, "unified_gb10")
    (gpu,) = read(machine).gpus
    assert (gpu.memory_bytes, gpu.free_bytes) == (127600748 * KIB, 118566368 * KIB)
    change_nvidia_smi(machine, "exec cat query-gpu.csv", "sed s/GB10/H100/ query-gpu.csv; exit")
    findings = read(machine)
    assert findings.gpus == () and "GPU 0 (NVIDIA H100)" in findings.excluded[0], "a card of its own memory, unknown"


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


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    machine, child = Machine(tmp_path), tmp_path / "child"
    machine.install_nvidia_smi(f"sleep 300 & echo $! >> {child}\nwait\n")
    findings, _ = under_a_limit(lambda limit_s: read(machine, timeout_s=limit_s), lambda _: bool(pids_in(child)))
    assert findings.failure is not None and "does not respond" in findings.failure.sentence
    for pid in pids_in(child):
        wait_until_gone(pid)


def test_a_further_run_that_hangs_is_a_note(tmp_path):
    machine = lay_out(tmp_path, "pcie_2x_rtx3090")
    change_nvidia_smi(machine, "exec cat topo.txt", "exec sleep 300")
    findings, limit_s = under_a_limit(lambda limit_s: read(machine, timeout_s=limit_s), lambda found: bool(found.gpus))
    assert (len(findings.gpus), findings.links) == (2, ())
    assert any("`nvidia-smi topo -m`" in note and f"{limit_s:g} s" in note for note in findings.notes)
    assert any(
        "GPU 1 (NVIDIA GeForce RTX 3090)" in note and "8 of its 16 PCIe lanes" in note for note in findings.notes
    )


def test_a_card_without_its_driver_or_the_drivers_tools_is_noted_with_the_remedy(tmp_path):
    machine = Machine(tmp_path)
    machine.put_gpu_on_bus()
    machine.put_gpu_on_bus("0000:01:00.1", pci_class="0x040300")  # its sound
    machine.put_gpu_on_bus("0000:00:02.0", vendor="0x8086")  # of another maker
    (note,) = read(machine).notes
    assert "1 NVIDIA GPU " in note and "(0000:01:00.0)" in note and "driver" in note
    machine.put_gpu_on_bus("0000:02:00.0", pci_class="0x030200")
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06\n")
    (note,) = read(machine).notes
    assert "2 NVIDIA GPUs " in note and "(0000:01:00.0, 0000:02:00.0)" in note and "docker run --gpus all" in note


UUID = "GPU-5f0c1a2b-3d4e-4f50-8a61-7b8c9d0e1f20"
LINE = f"0, {UUID}, 00000000:01:00.0, NVIDIA GeForce RTX 6070, 16303, 500, 15600, 12.0, 610.10, Default, [N/A], [N/A], 250.00, 5, 16, 16"  # noqa: E501  # as the program prints it


def probed(folder: Any, line: str = LINE) -> Hardware:
    machine = Machine(folder)
    machine.install_nvidia_smi(f'case "$*" in --query-gpu=*) echo "{line}" ;; esac\n')
    return read_hardware(root=machine.root, environment=machine.environment)


def test_the_speed_of_a_card_without_a_row_is_not_known(tmp_path):
    hardware = probed(tmp_path)
    assert (hardware.gpus[0].spec_name, device_of(hardware).has_known_speed) == (None, False)
    assert hardware.host.is_desktop, "by its name"
    assert "not known" in describe_hardware(hardware)
    (gpu,) = probed(tmp_path / "known", LINE.replace("RTX 6070", "RTX 5080")).gpus
    assert gpu.spec_name == "RTX-5080"


def make_gpu(index, **changes):
    model = {"name": "NVIDIA GeForce RTX 3090", "spec_name": "RTX-3090", "compute_capability": (8, 6)}
    memory = {"memory_bytes": 24 * GIB, "free_bytes": 24 * GIB}
    return Gpu(index=index, **{"uuid": f"GPU-{index}aaa", **model, **memory, **changes})


def make_4090(index, **changes):
    return make_gpu(index, name="NVIDIA GeForce RTX 4090", spec_name="RTX-4090", compute_capability=(8, 9), **changes)


def indices(gpus):
    return [gpu.index for gpu in gpus]


def test_equal_idle_cards_are_all_used_unless_some_are_requested_that_exist():
    gpus = (make_gpu(0), make_gpu(1))
    assert select_gpus(gpus, wanted=None) == (gpus, ())
    assert select_gpus([], wanted=None) == ((), ())
    chosen, (excluded,) = select_gpus([make_gpu(index) for index in range(8)], wanted=(1, 0))
    assert indices(chosen) == [0, 1]
    assert "GPUs 2 to 7" in excluded and "--gpus 1,0" in excluded
    with pytest.raises(InputError, match=r"--gpus 0,5: .*GPU 5.*GPUs 0 and 1"):
        select_gpus([make_gpu(0), make_gpu(1)], wanted=(0, 5))
    with pytest.raises(InputError, match="no GPU"):
        select_gpus([], wanted=(0,))


def test_a_busy_card_is_skipped_with_its_process_and_used_if_requested():
    process = GpuProcess(pid=4242, name="python", memory_bytes=12 * GIB)
    gpus = (make_gpu(0), make_gpu(1, free_bytes=12 * GIB, processes=(process,)))
    chosen, (excluded,) = select_gpus(gpus, wanted=None)
    assert indices(chosen) == [0]
    for fact in ("GPU 1 ", "python (pid 4242)", "12 GiB of 24 GiB", "--gpus 1"):
        assert fact in excluded
    assert select_gpus(gpus, wanted=(0, 1)) == (gpus, ())


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({"free_bytes": 18 * GIB}, True),  # a display uses a quarter at most
        ({"free_bytes": int(17.9 * GIB)}, False),
        ({"usable_bytes": 17 * GIB, "free_bytes": 17 * GIB}, True),  # what the driver keeps for itself
    ],
)
def test_a_card_is_busy_from_a_quarter_of_its_memory_on(changes, is_used):
    chosen, _ = select_gpus([make_gpu(0), make_gpu(1, **changes)], wanted=None)
    assert (1 in indices(chosen)) is is_used


@pytest.mark.parametrize(
    ("free_gib", "used"), [([10, 10, 1], [0, 1]), ([2, 16, 3], [1]), ([10], [0]), ([9, 8, 7], [0, 1, 2])]
)
def test_if_all_are_busy_the_most_free_memory_is_selected(free_gib, used):
    gpus = [make_gpu(index, free_bytes=free * GIB) for index, free in enumerate(free_gib)]
    chosen, excluded = select_gpus(gpus, wanted=None)
    assert indices(chosen) == used
    assert len(excluded) == len(free_gib) - len(used)


@pytest.mark.parametrize(
    ("torch_version", "chosen"), [("2.13.0", 2), ("2.13.0+cu130", 2), ("2.13.0+cu126", 0), ("2.13.0+cpu", 0), (None, 0)]
)
def test_cards_without_code_are_left_out_where_others_have_it(torch_version, chosen):
    """Two P40 hold more than a RTX 3060, which the build for CUDA 13 can use."""
    old = tuple(make_gpu(index, name="P40", spec_name=None, compute_capability=(6, 1)) for index in range(2))
    gpus = (*old, make_gpu(2, name="RTX 3060", spec_name=None, memory_bytes=12 * GIB, free_bytes=12 * GIB))
    used, excluded = select_gpus(gpus, wanted=None, torch_version=torch_version)
    assert used[0].index == chosen and len(excluded) == (2 if chosen else 1)
    assert select_gpus(gpus, wanted=(0,), torch_version=torch_version)[0] == old[:1]
    assert select_gpus(old, wanted=None, torch_version=torch_version) == (old, ())


UNKNOWN = make_gpu(0, name="X", spec_name=None, memory_bytes=80 * GIB, free_bytes=None)
OLD = make_gpu(0, name="Old", spec_name=None, compute_capability=(6, 1))
SMALL = make_gpu(0, memory_bytes=12 * GIB, free_bytes=12 * GIB)


@pytest.mark.parametrize(
    ("gpus", "chosen", "rest"),
    [
        # 2 x 24 GiB and 142 TFLOP/s are worth more than 1 x 24 GiB and 165
        ([make_4090(0), make_gpu(1), make_gpu(2)], [1, 2], "GPU 0 (NVIDIA GeForce RTX 4090, 24 GiB)"),
        ([make_4090(0), make_gpu(1)], [0], "GPU 1 (NVIDIA GeForce RTX 3090, 24 GiB)"),
        ([UNKNOWN, make_gpu(1)], [0], "GPU 1"),  # memory alone decides
        ([OLD, make_gpu(1, spec_name=None)], [1], "GPU 0 (Old"),  # equal memory: the newer chip
        ([SMALL, make_gpu(1)], [1], "GPU 0 (NVIDIA GeForce RTX 3090, 12 GiB)"),  # one name, two sizes
    ],
)
def test_of_several_models_the_best_equal_ones_are_planned_for_and_the_rest_named(gpus, chosen, rest):
    found, (excluded,) = select_gpus(gpus, wanted=None)
    assert indices(found) == chosen and excluded.startswith(rest)
    slices = [make_gpu(index, is_mig_on=True, name="A100 MIG 3g.20gb", spec_name=None) for index in (2, 3)]
    found, (excluded,) = select_gpus(slices, wanted=None)
    assert indices(found) == [2] and "GPU 3" in excluded and "MIG" in excluded
    found, others = select_gpus([make_4090(0), make_gpu(1), make_gpu(2)], wanted=(0, 1))
    assert indices(found) == [0] and len(others) == 2, "also of requested ones"


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [0, 2]),
        ("1,1", [1]),
        ("0,7,1", [0]),  # CUDA stops at the first that does not exist
        ("GPU-1aaa", [1]),
        ("GPU-1", [1]),
        (" GPU-2aaa , 0", [0, 2]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(setting, seen):
    gpus = [make_gpu(0), make_gpu(1), make_gpu(2)]
    visible, sentences = visible_gpus(gpus, setting)
    assert indices(visible) == seen
    assert bool(sentences) is (len(seen) < 3)
    if seen == [0]:
        assert f"CUDA_VISIBLE_DEVICES={setting}" in sentences[0] and "GPUs 1 and 2" in sentences[0]
