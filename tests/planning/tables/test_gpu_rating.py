"""Cards without a row are rated by what their driver reports, near the datasheet where there is one to compare."""

import pytest
from planning_factory import plan_of

from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.speed.step import speed_notes
from shardwise.trainer.planning.tables.gpu_names import match_gpu_name, rated_spec, spec_of
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host, MeasuredRates
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import GIB

NO_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
# What drivers of such cards usually report: CUDA cores, highest clock, bits of the bus, highest memory clock.
# fmt: off
REPORTED = [
    ("V100-SXM2-16GB", (7, 0), 5120, 1530, 4096, 877), ("GeForce GTX 1660 Ti", (7, 5), 1536, 2130, 192, 6001),
    ("GeForce RTX 2080 Ti", (7, 5), 4352, 2100, 352, 7000), ("T4", (7, 5), 2560, 1590, 256, 5001),
    ("GeForce RTX 3060 Ti", (8, 6), 4864, 2100, 256, 7001), ("GeForce RTX 3090", (8, 6), 10496, 2100, 384, 9751),
    ("RTX A4000", (8, 6), 6144, 2100, 256, 7001), ("A100-SXM4-80GB", (8, 0), 6912, 1410, 5120, 1593),
    ("GeForce RTX 4060 Laptop GPU", (8, 9), 3072, 3105, 128, 8001), ("L4", (8, 9), 7424, 2040, 192, 6251),
    ("GeForce RTX 4070 SUPER", (8, 9), 7168, 3105, 192, 10501), ("GeForce RTX 4090", (8, 9), 16384, 3105, 384, 10501),
    ("H100 80GB HBM3", (9, 0), 16896, 1980, 5120, 2619), ("B200", (10, 0), 18944, 1965, 8192, 3996),
    ("GeForce RTX 5090", (12, 0), 21760, 3090, 512, 14001),
    ("RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 24064, 3090, 512, 14001),
]
# fmt: on


def card(name: str, capability: tuple[int, int], cores: int, clock: int, bus: int, memory_clock: int) -> Gpu:
    return Gpu(
        index=0,
        name=f"NVIDIA {name}",
        spec_name=None,
        memory_bytes=16 * GIB,
        compute_capability=capability,
        pcie_generation=4,
        pcie_width=16,
        num_cuda_cores=cores,
        max_clock_mhz=clock,
        memory_bus_bits=bus,
        max_memory_clock_mhz=memory_clock,
    )


@pytest.mark.parametrize("reported", REPORTED, ids=[row[0] for row in REPORTED])
def test_a_rating_is_near_the_datasheet(reported: tuple[str, tuple[int, int], int, int, int, int]) -> None:
    """Within a third, far inside the factor of two that a plan states."""
    rated = rated_spec(card(*reported))
    name = match_gpu_name(f"NVIDIA {reported[0]}", None)
    assert rated is not None and name is not None
    row = GPU_SPECS[name]
    assert rated.num_sms == row.num_sms
    assert rated.memory_bytes_per_s == pytest.approx(row.memory_bytes_per_s, rel=0.03)
    assert rated.halves_fp32_sums == row.halves_fp32_sums
    for kind in ("fp32_flops_per_s", "tf32_flops_per_s", "fp16_flops_per_s", "bf16_flops_per_s", "fp8_flops_per_s"):
        mine, theirs = getattr(rated, kind), getattr(row, kind)
        assert (mine is None) is (theirs is None)
        assert mine is None or 0.75 < mine / theirs < 1.34


def test_a_row_comes_before_what_the_driver_reports() -> None:
    known = Gpu(index=0, name="x", spec_name="RTX-4090", memory_bytes=GIB, num_cuda_cores=1, max_clock_mhz=1)
    assert spec_of(known) is GPU_SPECS["RTX-4090"]


def test_a_chip_that_is_not_known_is_not_rated() -> None:
    assert rated_spec(card("GeForce GTX 1080 Ti", (6, 1), 3584, 1911, 352, 5505)) is None
    assert rated_spec(card("Future", (13, 0), 3584, 1911, 352, 5505)) is None


RATED = Hardware(gpus=(card("GeForce RTX 6070", (12, 0), 7168, 3200, 192, 16000),), host=NO_HOST)
FASTER = Hardware(gpus=(card("GeForce RTX 6080", (12, 0), 14336, 3200, 256, 16000),), host=NO_HOST)
STRANGER = Hardware(gpus=(Gpu(index=0, name="NVIDIA Future 1", spec_name=None, memory_bytes=16 * GIB),), host=NO_HOST)


def plan_on(hardware: Hardware) -> Plan:
    return plan_of("1b", hardware)


def expectation(plan: Plan) -> str:
    (note,) = [note for note in plan.notes if note.startswith("no run on this device")]
    return note


def test_two_unknown_cards_have_two_speeds_and_a_wide_range() -> None:
    slow, fast = plan_on(RATED), plan_on(FASTER)
    assert 1.3 < fast.chosen.speed.tokens_per_s_per_gpu / slow.chosen.speed.tokens_per_s_per_gpu < 2.1
    assert slow.chosen.speed.mfu is not None
    assert "a factor of 2" in expectation(slow)
    assert any("RTX 6070" in note and "driver" in note for note in slow.notes)


def test_where_nothing_is_known_no_speed_is_promised() -> None:
    plan = plan_on(STRANGER)
    assert "tokens/s" not in expectation(plan) and "memory" in expectation(plan)
    assert any("not known" in note and "probe --measure" in note for note in plan.notes)
    assert plan.chosen.speed.mfu is None


def test_a_measured_card_needs_no_rating() -> None:
    rates = MeasuredRates(matmul_flops_per_s=10**14, matmul_precision="bf16", memory_bytes_per_s=10**12)
    devices: list[Device] = [
        device_of(Hardware(gpus=hardware.gpus, host=NO_HOST, rates=rates)) for hardware in (RATED, STRANGER)
    ]
    assert all(device.has_known_speed for device in devices)
    assert [speed_notes(device) for device in devices] == [(), ()]
