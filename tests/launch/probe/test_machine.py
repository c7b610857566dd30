"""The probe as a whole, on captured machines and on this one."""

import pytest
from captured_machine import GPU_MACHINES, MACHINES, Machine, lay_out
from engine_plan_factory import engine_plan
from gpu_machines import AMD, lay_out_gpus
from msgspec.structs import replace

from shardwise.launch.probe.machine import describe_hardware, read_hardware
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import notes
from shardwise.trainer.spec import codec
from shardwise.trainer.spec import hardware as spec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.units import GIB, MIB

UNKNOWN_HOST = spec.Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)


def probe(machine, *, gpus=None, cuda_visible_devices=None, **changes):
    environment = machine.environment
    if cuda_visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
    return read_hardware(gpus=gpus, root=machine.root, environment=environment, **changes)


def indices(hardware):
    return [gpu.index for gpu in hardware.gpus]


# The cards to plan for and the number of links between them.
PLANNED = {
    "no_gpu_laptop": ([], 0), "rtx4090_desktop": ([0], 0), "wsl_rtx3080": ([0], 0), "pcie_2x_rtx3090": ([0, 1], 1),
    "nvlink_8x_h100": (list(range(8)), 28), "nvlink_4x_v100": ([0, 1, 2, 3], 6),
    "mig_a100": ([1], 0),  # the whole card before the slices of the other
    "mixed_models": ([1, 2], 1), "shared_4x_a100": ([0, 2, 3], 3), "unified_gb10": ([0], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_every_captured_machine_is_planned_for_survives_a_file_and_is_described(tmp_path, name):
    hardware = probe(lay_out(tmp_path, name))
    assert (hardware.device_kind is spec.DeviceKind.CUDA) is (name in GPU_MACHINES)
    if name in PLANNED:
        assert (indices(hardware), len(hardware.links)) == PLANNED[name]
    assert codec.decode(codec.encode(hardware), spec.Hardware, origin="test") == hardware
    text = describe_hardware(hardware)
    assert "None" not in text
    for part in (*(gpu.name for gpu in hardware.gpus), *hardware.excluded, *hardware.notes):
        assert part in text
    if name == "nvlink_8x_h100":
        assert "links      18 NVLinks, 445 GiB/s each way, peer access: 0-1, 0-2, ... 6-7 (28 pairs)\n" in text
    if name == "shared_4x_a100":
        assert "python3.11 (pid 1403377)" in hardware.excluded[0] and "67.6 GiB of 80 GiB" in hardware.excluded[0]
        assert "77.5 GiB to 79.3 GiB" in hardware.notes[0] and "GPU 3" in hardware.notes[0]


def test_cuda_visible_devices_is_respected(tmp_path):
    hardware = probe(lay_out(tmp_path, "nvlink_8x_h100"), cuda_visible_devices="2,3")
    assert indices(hardware) == [2, 3]
    assert [(link.a, link.b) for link in hardware.links] == [(2, 3)]
    (hidden,) = hardware.excluded
    assert "CUDA_VISIBLE_DEVICES=2,3" in hidden and "GPUs 0, 1, 4, 5, 6 and 7" in hidden
    mixed = probe(lay_out(tmp_path / "mixed", "mixed_models"), cuda_visible_devices="0")
    assert indices(mixed) == [0]
    assert any("CUDA" in note for note in mixed.notes), "CUDA may count cards of several models in another order"
    machine = lay_out(tmp_path / "one", "rtx4090_desktop")
    machine.put_gpu_on_bus("0000:0b:00.0", vendor=AMD)
    assert not any("AMD" in note for note in probe(machine, vram_cap_bytes=8 * GIB).notes)
    none = probe(machine, cuda_visible_devices="", vram_cap_bytes=8 * GIB)
    assert none.device_kind is spec.DeviceKind.CPU and none.vram_cap_bytes == 8 * GIB
    assert "CUDA_VISIBLE_DEVICES= " in none.excluded[0] and "GPU 0" in none.excluded[0]


def failing_machine(tmp_path, script, *, is_on_bus):
    machine = Machine(tmp_path)
    machine.install_nvidia_smi(script)
    if is_on_bus:
        machine.put_gpu_on_bus()
    return machine


MISMATCH = 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18\n'
NOT_LOADED = 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9\n'


@pytest.mark.parametrize(
    ("script", "is_on_bus", "remedy"),
    [(MISMATCH, False, "restart the machine"), (NOT_LOADED, True, "sudo modprobe nvidia")],
)
def test_a_card_whose_driver_fails_stops_the_probe_with_the_remedy(tmp_path, script, is_on_bus, remedy):
    with pytest.raises(EnvironmentFaultError, match=remedy) as raised:
        probe(failing_machine(tmp_path, script, is_on_bus=is_on_bus), cuda_visible_devices="1")
    assert "CUDA_VISIBLE_DEVICES=" in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 3


def test_a_failing_program_is_a_note_without_a_card_and_where_the_cards_are_hidden(tmp_path):
    machine = failing_machine(tmp_path, NOT_LOADED, is_on_bus=False)
    for setting in (None, "", "-1", " ", "NoDevFiles"):
        if setting is not None:
            machine.put_gpu_on_bus()
        hardware = probe(machine, cuda_visible_devices=setting)
        (note,) = hardware.notes
        assert hardware.device_kind is spec.DeviceKind.CPU and "nvidia-smi" in note and "\n" not in note


def test_gpus_of_amd_are_named_as_found_and_not_supported_also_in_a_plan(tmp_path):
    hardware = probe(lay_out_gpus(tmp_path, "amd"))
    plan = engine_plan(Sharding.NONE, hardware=hardware)
    assert hardware.gpus == ()
    for text in (describe_hardware(hardware), "\n".join(notes(context_of(plan), plan.data, (), plan.candidates))):
        assert all(fact in text for fact in ("2 AMD GPUs", "0000:03:00.0", "not supported"))


def test_a_library_at_a_version_that_its_user_does_not_accept_is_reported(tmp_path, monkeypatch):
    (tmp_path / "kernels-0.0.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    hardware = probe(lay_out(tmp_path, "rtx4090_desktop"))
    assert hardware.libraries["kernels"] == "0.0.1"
    assert "transformers" in hardware.unfit_libraries["kernels"]


def test_measuring_fills_disks_and_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machine = lay_out(tmp_path, "no_gpu_laptop")
    machine.write("proc/self/mountinfo", f"29 1 0:25 / {tmp_path} rw - ext4 /dev/x rw\n")
    (machine.root / str(tmp_path).lstrip("/")).mkdir(parents=True)
    hardware = probe(machine, measure=True)
    (disk,) = hardware.host.disks
    rates = hardware.rates
    assert disk.write_bytes_per_s and disk.read_bytes_per_s and rates.matmul_flops_per_s and rates.memory_bytes_per_s
    assert rates.matmul_precision in ("fp32", "bf16")
    assert rates.host_to_device_bytes_per_s is None  # the CPU is the host
    assert "TFLOP/s" in describe_hardware(hardware)


def test_the_table_of_a_machine_of_which_nothing_is_known():
    assert describe_hardware(spec.Hardware(gpus=(), host=UNKNOWN_HOST)) == "devices    CPU"
    two = spec.Hardware(gpus=(), host=UNKNOWN_HOST, num_cpu_devices=2, vram_cap_bytes=GIB)
    (line,) = describe_hardware(two).splitlines()
    assert "CPU, 2 ranks" in line and "1 GiB" in line
    login = replace(UNKNOWN_HOST, slurm=spec.SlurmEnvironment(has_sbatch=True))
    assert "login node" in describe_hardware(spec.Hardware(gpus=(), host=login))


def test_the_table_of_a_machine_with_everything(tmp_path):
    found = probe(lay_out(tmp_path, "rtx4090_desktop"))
    card = replace(found.gpus[0], processes=(), numa_node=0)
    disk = replace(found.host.disks[0], total_bytes=100 * GIB, free_bytes=50 * GIB, is_rotational=True)
    host = replace(
        found.host, is_wsl=True, shm_bytes=32 * GIB, memlock_limit_bytes=8 * MIB,
        disks=(replace(disk, write_bytes_per_s=GIB, read_bytes_per_s=2 * GIB),),
        interfaces=(spec.NetworkInterface(name="eth0", address="10.0.0.2", speed_bytes_per_s=1_250_000_000),),
        slurm=spec.SlurmEnvironment(has_sbatch=True, job_id="17", num_nodes=1, node_list="node1"),
    )  # fmt: skip
    rates = spec.MeasuredRates(
        matmul_flops_per_s=150 * 10**12, matmul_precision="bf16", memory_bytes_per_s=900 * GIB,
        host_to_device_bytes_per_s=24 * GIB, fp32_flops_per_s=70 * 10**12, attention_flops_per_s=120 * 10**12,
        host_adam_bytes_per_s=90 * GIB, all_gather_bytes_per_s=9 * GIB, gathers_only_without_peers=True,
        peer_copies=(spec.PeerCopy(a=0, b=1, bytes_per_s=8 * GIB, is_correct=True), spec.PeerCopy(a=1, b=0)),
    )  # fmt: skip
    hardware = replace(
        found, gpus=(replace(card, spec_name=None, is_ecc_on=False), replace(card, index=1, is_ecc_on=True)),
        links=(spec.Link(a=0, b=1, kind=spec.LinkKind.PCIE_HOST, bytes_per_s=16 * GIB, has_peer_access=False),),
        excluded=("GPU 2: not in --gpus 0,1",), notes=("a note",), libraries={"torch": "2.13.0"}, num_nodes=2,
        host=host, rates=rates,
    )  # fmt: skip
    of_it = ("24 GiB (22.2 GiB free)", "8.9", "PCIe 4 x16", "NUMA node 0", "450 W", "ECC off", "580.95.05", "catalogue")
    expected = [
        ("devices ", "2 nodes"),
        ("0: ", *of_it),
        ("1: ", "ECC on"),
        ("links ", "16 GiB/s", "no peer access", "0-1"),
        ("host ", "AMD Ryzen 9 7950X", " cores", "avx2"),
        ("62.7 GiB", "49.9 GiB", "31.3 GiB can be pinned", "8 MiB can be locked", "32 GiB of shared"),
        ("Windows Subsystem for Linux", "Slurm job 17", "node1"),
        ("disks ", "/ (ext4)", "50 GiB", "100 GiB", "rotating", "writes 1 GiB/s", "reads 2 GiB/s"),
        ("network ", "eth0", "10.0.0.2", "10 Gb/s"),
        ("measured ", "bf16 150 TFLOP/s", "fp32 70 TFLOP/s"),
        ("attention 120 TFLOP/s",),
        ("memory 900 GiB/s", "host to device 24 GiB/s", "AdamW", "90 GiB/s"),
        ("all-gather 9 GiB/s (datasheet 16 GiB/s)", "without peer access"),
        ("8 GiB/s", "1 of 2 pairs"),
        ("libraries ", "torch 2.13.0"),
        ("left out ", "GPU 2: not in --gpus 0,1"),
        ("notes ", "a note"),
    ]
    for line, facts in zip(describe_hardware(hardware).splitlines(), expected, strict=True):
        assert [fact for fact in facts if fact not in line] == [], line
    assert "not known" not in describe_hardware(hardware).splitlines()[2]
