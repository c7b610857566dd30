"""One device for a whole machine: the weakest card, the slowest link, nothing guessed."""

from typing import Any

import pytest
from estimate_factory import CPU_HOST, UNKNOWN_HOST
from msgspec.structs import replace

from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Disk, Gpu, Hardware, Link, LinkKind, MeasuredRates
from shardwise.trainer.spec.host_ram import machine_bytes, usable_ram
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import GIB


def machine(spec: str, **changes: Any) -> Hardware:
    return replace(hardware_from_spec(spec, local_host=lambda: CPU_HOST), **changes)


def stranger(index: int = 0, **fields: Any) -> Gpu:
    return Gpu(index=index, name="NVIDIA Future 1", spec_name=None, memory_bytes=24 * GIB, **fields)


def test_a_catalogue_machine_has_the_figures_of_its_row() -> None:
    device, spec = device_of(machine("2x4xH100-SXM5-80GB")), GPU_SPECS["H100-SXM5-80GB"]
    assert device.kind is DeviceKind.CUDA
    assert (device.num_nodes, device.devices_per_node, device.num_devices) == (2, 4, 8)
    assert (device.memory_bytes, device.usable_bytes) == (spec.memory_bytes, spec.usable_bytes)
    assert device.peak_flops_per_s(Precision.FP8) == spec.fp8_flops_per_s
    assert (device.link_bytes_per_s, device.link_kind) == (spec.nvlink_bytes_per_s, LinkKind.NVLINK)
    assert device.host_ram_bytes is None


def test_a_cap_and_memory_that_others_hold_lower_what_is_usable() -> None:
    whole = machine("1xRTX-4090")
    (card,) = whole.gpus
    held = replace(whole, gpus=(replace(card, free_bytes=10 * GIB),))
    assert device_of(held).usable_bytes == 10 * GIB
    assert device_of(replace(held, vram_cap_bytes=8 * GIB)).usable_bytes == 8 * GIB
    assert device_of(replace(held, vram_cap_bytes=16 * GIB)).usable_bytes == 10 * GIB
    assert device_of(held).memory_bytes == card.memory_bytes


def test_unequal_cards_count_as_the_weakest() -> None:
    small, large = machine("1xT4").gpus[0], machine("1xA100-SXM4-80GB").gpus[0]
    device = device_of(machine("1xT4", gpus=(large, replace(small, index=1))))
    assert device.usable_bytes == GPU_SPECS["T4"].usable_bytes
    assert device.compute_capability == (7, 5)
    assert device.peak_flops_per_s(Precision.FP16_MIXED) == GPU_SPECS["T4"].fp16_flops_per_s


def test_a_card_without_a_row_keeps_its_memory_and_has_no_rates() -> None:
    device = device_of(Hardware(gpus=(stranger(),), host=UNKNOWN_HOST))
    assert device.usable_bytes == 24 * GIB and device.context_bytes > 0
    assert device.peaks == ()
    assert device.memory_bytes_per_s is device.link_bytes_per_s is device.matmul_flops_per_s is None
    mixed = device_of(Hardware(gpus=(*machine("1xRTX-4090").gpus, stranger(1)), host=UNKNOWN_HOST))
    assert mixed.peaks == () and mixed.compute_capability is None


MEASURED = [
    ("matmul_flops_per_s", "matmul_flops_per_s"), ("memory_bytes_per_s", "measured_memory_bytes_per_s"),
    ("host_to_device_bytes_per_s", "measured_pcie_bytes_per_s"), ("fp32_flops_per_s", "measured_fp32_flops_per_s"),
    ("fp8_flops_per_s", "measured_fp8_flops_per_s"), ("attention_flops_per_s", "measured_attention_flops_per_s"),
    ("host_adam_bytes_per_s", "measured_host_adam_bytes_per_s"),
    ("all_gather_bytes_per_s", "measured_link_bytes_per_s"),
    ("between_nodes_bytes_per_s", "measured_network_bytes_per_s"),
]  # fmt: skip


@pytest.mark.parametrize(("measured", "field"), MEASURED)
def test_each_measured_rate_has_its_place(measured: str, field: str) -> None:
    device = device_of(machine("2xRTX-4090", rates=replace(MeasuredRates(), **{measured: 12345})))
    assert getattr(device, field) == 12345
    assert getattr(device_of(machine("2xRTX-4090")), field) is None


def test_the_disk_is_the_fastest_that_was_measured_in_its_slower_direction() -> None:
    disk = Disk(path="/", filesystem="ext4", total_bytes=GIB, free_bytes=GIB)
    rates = ((9, 2), (4, 5), (100, None))
    disks = tuple(replace(disk, read_bytes_per_s=read, write_bytes_per_s=write) for read, write in rates)
    host = replace(CPU_HOST, disks=disks)
    assert device_of(machine("1xRTX-4090", host=host)).nvme_bytes_per_s == 4
    assert device_of(machine("1xRTX-4090")).nvme_bytes_per_s is None


def test_a_lowered_power_limit_is_kept_beside_the_rated_one() -> None:
    whole = machine("1xRTX-3090")
    capped = device_of(replace(whole, gpus=(replace(whole.gpus[0], power_limit_w=280.0),)))
    assert (capped.board_watts, capped.rated_watts) == (280.0, 350)
    assert capped.halves_fp32_sums
    assert not device_of(machine("1xA10")).halves_fp32_sums


def test_the_slowest_link_is_the_link() -> None:
    fast = Link(a=0, b=1, kind=LinkKind.NVLINK, bytes_per_s=300 * 10**9, has_peer_access=True)
    slow = Link(a=0, b=2, kind=LinkKind.SOCKET, bytes_per_s=20 * 10**9, has_peer_access=False)
    device = device_of(machine("4xA100-SXM4-80GB", links=(fast, slow)))
    assert (device.link_kind, device.link_bytes_per_s, device.has_peer_access) == (LinkKind.SOCKET, 20 * 10**9, False)
    unknown_rate = replace(slow, bytes_per_s=None, has_peer_access=None)
    device = device_of(machine("4xA100-SXM4-80GB", links=(unknown_rate,)))
    assert device.link_bytes_per_s == GPU_SPECS["A100-SXM4-80GB"].pcie_bytes_per_s


def test_cards_share_an_uplink_by_the_topology_or_as_boards_of_eight_servers_do() -> None:
    def joined(*pairs: tuple[int, int], kind: LinkKind = LinkKind.PCIE_SWITCH) -> int:
        links = tuple(Link(a=a, b=b, kind=kind, has_peer_access=True) for a, b in pairs)
        return device_of(machine("8xL40S", links=links)).cards_per_uplink

    assert joined() == 2 and joined((0, 1), kind=LinkKind.PCIE_HOST) == 1 and joined((0, 1), kind=LinkKind.NVLINK) == 1
    assert joined((0, 1), (2, 3)) == 2 and joined((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)) == 4
    usual = {spec: device_of(machine(spec)).cards_per_uplink for spec in ("4xL40S", "8xRTX-4090", "8xH100-SXM5-80GB")}
    assert usual == {"4xL40S": 1, "8xRTX-4090": 1, "8xH100-SXM5-80GB": 1}


def test_memory_that_is_the_ram_of_the_machine_is_one_pool() -> None:
    chip, card = device_of(machine("1xGB10")), device_of(machine("1xRTX-4090"))
    assert chip.shares_host_memory and not card.shares_host_memory
    pool = GPU_SPECS["GB10"].memory_bytes
    assert chip.usable_bytes == machine_bytes(pool, None) < pool - 8 * GIB
    host = replace(UNKNOWN_HOST, usable_ram_bytes=64 * GIB)
    assert device_of(machine("1xGB10", host=host)).usable_bytes == 64 * GIB  # a grant
    assert device_of(machine("1xRTX-4090", host=host)).usable_bytes == card.usable_bytes


def test_cpu_ranks_share_memory_and_cores_and_have_a_link() -> None:
    one, two = device_of(machine("1xCPU")), device_of(machine("2xCPU"))
    assert (one.memory_bytes, one.usable_bytes) == (CPU_HOST.ram_bytes, usable_ram(CPU_HOST))
    assert two.memory_bytes == one.memory_bytes // 2
    assert device_of(machine("2xCPU", vram_cap_bytes=GIB)).usable_bytes == GIB, "a cap is that of each rank"
    assert (one.matmul_flops_per_s, two.matmul_flops_per_s) == (4 * 20 * 10**9, 2 * 20 * 10**9)
    assert one.is_matmul_assumed
    rates = MeasuredRates(matmul_flops_per_s=10**11, attention_flops_per_s=10**10, all_gather_bytes_per_s=10**9)
    one, two = (device_of(machine(f"{ranks}xCPU", rates=rates)) for ranks in (1, 2))
    assert (two.matmul_flops_per_s, two.is_matmul_assumed) == (10**11 // 2, False)
    assert (one.measured_attention_flops_per_s, one.measured_link_bytes_per_s) == (10**10, None)
    assert (two.measured_attention_flops_per_s, two.measured_link_bytes_per_s) == (10**10 // 2, 10**9)


@pytest.mark.parametrize(
    ("flags", "flops_per_core", "sums_bf16_apart"),
    [
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16"), 80 * 10**9, False),
        (("avx2", "avx512f", "avx512_bf16"), 80 * 10**9, False), (("avx2", "avx512f"), 80 * 10**9, True),
        (("avx2",), 40 * 10**9, False), ((), 20 * 10**9, False),
    ],
)  # fmt: skip
def test_the_rate_and_the_sums_of_a_cpu_follow_its_vectors(flags, flops_per_core, sums_bf16_apart):
    device = device_of(machine("1xCPU", host=replace(CPU_HOST, cpu_flags=flags)))
    assert device.matmul_flops_per_s == 4 * flops_per_core
    assert device.is_matmul_assumed
    assert device.sums_bf16_apart is sums_bf16_apart


def test_a_cpu_of_unknown_memory_needs_a_cap() -> None:
    hardware = machine("1xCPU", host=UNKNOWN_HOST)
    with pytest.raises(InputError, match=r"limits\.vram"):
        device_of(hardware)
    assert device_of(replace(hardware, vram_cap_bytes=4 * GIB)).usable_bytes == 4 * GIB
