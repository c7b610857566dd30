"""Three hundred plans: ten models on twenty-five machines, most of them with one method, some with two.

Every machine is measured as it is while nothing else runs, so the reserve for its system applies. The plans are made
once; each promise is one test that lists what breaks it.
"""

import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from planning_factory import data_of, job_of

from shardwise.launch.inputs.model_files import read_preset
from shardwise.trainer.planning.candidates import (
    BOTH_ERRORS,
    FULL_CARD,
    FULL_CARD_PRICE,
    configuration_of,
    roomy_need,
    upper_seconds,
)
from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.planner import Extent, PlanOrder, context_of, make_plan, plan_on_enough_gpus
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import NothingFitsError
from shardwise.trainer.spec.hardware import Hardware, Host
from shardwise.trainer.spec.host_ram import usable_ram
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Calibration, Candidate, Plan
from shardwise.trainer.spec.strategy import Method, Precision
from shardwise.trainer.spec.units import GIB

pytestmark = [pytest.mark.long, pytest.mark.products]
MODELS = (
    *("qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-8b", "llama-3.1-8b", "gemma-2-9b", "phi-4"),
    *("qwen2.5-32b", "qwen3-30b-a3b", "llama-3.1-70b"),
)
# Cards, GiB of RAM of a machine.
MACHINES = (
    *(("1xRTX-4060-8GB", 16), ("1xRTX-4060-8GB", 32), ("1xRTX-3060-12GB", 32), ("1xRTX-4060Ti-16GB", 32)),
    *(("1xRTX-3090", 64), ("2xRTX-3090", 64), ("1xRTX-4090", 64), ("1xRTX-4090", 128), ("2xRTX-4090", 128)),
    *(("8xRTX-4090", 512), ("1xRTX-5090", 128), ("1xT4", 16), ("1xL4", 48), ("1xRTX-A6000", 128), ("1xL40S", 128)),
    *(("8xL40S", 1024), ("1xA100-SXM4-40GB", 128), ("8xA100-SXM4-40GB", 1024), ("1xA100-SXM4-80GB", 192)),
    *(("2xA100-SXM4-80GB", 256), ("1xH100-SXM5-80GB", 192), ("8xH100-SXM5-80GB", 2048)),
    *(("2x8xH100-SXM5-80GB", 2048), ("1xH200", 256), ("8xB200", 2048)),
)
METHODS = (Method.LORA, Method.FULL, Method.QLORA)
FIGURES = (
    *("usable_bytes", "num_nodes", "devices_per_node", "host_ram_bytes", "pinnable_ram_bytes", "memory_bytes_per_s"),
    "pcie_bytes_per_s",
)
TIES = 1.01**2  # candidates within one per cent count as equal


class Case(NamedTuple):
    """A job on a machine."""

    model: str
    cards: str
    ram_gib: int
    method: Method

    @property
    def hardware(self) -> Hardware:
        host = Host(
            cpu_name="Test CPU", num_cores=16, ram_bytes=self.ram_gib * GIB, ram_available_bytes=self.ram_gib * GIB,
            is_desktop=GPU_SPECS[self.cards.rpartition("x")[2]].is_consumer,
        )  # fmt: skip
        hardware = hardware_from_spec(self.cards, local_host=lambda: host)
        return replace(hardware, host=host, libraries={"bitsandbytes": "1.0"})


def cases() -> list[Case]:
    found = []
    for row, model in enumerate(MODELS):
        for column, (cards, ram) in enumerate(MACHINES):
            first = METHODS[(row + column) % 3]
            methods = [first, METHODS[(row + column + 1) % 3]] if (row + column) % 5 == 0 else [first]
            found += [Case(model, cards, ram, method) for method in methods]
    return found


@cache
def plan_for(case: Case, vram_bytes: int | None = None) -> Plan | None:
    """The plan of a case, on a card of which so many bytes are free; None: nothing fits."""
    config = read_preset(case.model)
    job = job_of(method=case.method, seq_len=2048, tokens_per_step=65536)

    def plan_on(hardware: Hardware, *, extent: Extent, beats: PlanOrder | None = None) -> Plan:
        return make_plan(
            job, name="grid", shape=read_model_shape(config), model_path=None, tokenizer_path=None,
            hardware=hardware, model_config=config, calibration=Calibration(), data=data_of(seq_len=2048), trials=(),
            extension=None, versions={"shardwise": "0", "transformers": "5.23.0"}, fp8_gain=None, extent=extent,
            beats=beats,
        )  # fmt: skip

    try:
        return plan_on_enough_gpus(plan_on, replace(case.hardware, vram_cap_bytes=vram_bytes), extent=Extent.SCREEN)
    except NothingFitsError:
        return None


def test_no_plan_uses_ram_that_the_system_needs() -> None:
    plans = [plan for case in cases() if (plan := plan_for(case)) is not None]
    assert len(plans) > 200
    over = [
        plan.chosen.strategy.name
        for plan in plans
        if plan.chosen.memory.pinned_bytes + plan.chosen.memory.host_bytes > (usable_ram(plan.hardware.host) or 0)
    ]
    assert over == []


def test_a_card_is_filled_only_where_it_is_faster() -> None:
    found = []
    for case in cases():
        plan = plan_for(case)
        if plan is None or not fills(plan, plan.chosen):
            continue
        roomy = plan_for(case, int(FULL_CARD * context_of(plan).device.usable_bytes))
        if roomy is None or fills(plan, roomy.chosen):
            continue
        if roomy.chosen.speed.step_s * TIES < (1 + FULL_CARD_PRICE) * plan.chosen.speed.step_s:
            found.append((case, roomy.chosen))
    assert found == []


def fills(plan: Plan, candidate: Candidate) -> bool:
    context = context_of(plan)
    return candidate.memory.need_bytes > roomy_need(context, configuration_of(context, candidate))


def test_offload_on_one_card_says_what_a_step_needs_without_it() -> None:
    silent = []
    for case in cases():
        plan = plan_for(case)
        if plan is None or plan.hardware.num_devices > 1 or plan.chosen.strategy.sharding is Sharding.NONE:
            continue
        need = re.search(r"without it a step needs at least ([\d.]+) GiB, ([\d.]+) GiB are", plan.chosen.reasons[0])
        slower = re.search(r"without it is predicted ([\d.]+) times as long", plan.chosen.reasons[0])
        is_full = re.search(r"times as long and fills (9[789]|100)% of the card$", plan.chosen.reasons[0]) is not None
        is_explained = (
            float(need[1]) > float(need[2])
            if need
            else slower is not None and float(slower[1]) > (1 if is_full else BOTH_ERRORS)
        )
        silent += [] if is_explained else [(case, plan.chosen.reasons[0])]
    assert silent == []


def test_a_better_machine_is_not_slower() -> None:
    better = [(one, other) for one, other in permutations(MACHINES, 2) if is_better(device(one), device(other))]
    assert len(better) > 50
    found = []
    for model, method, (one, other) in product(MODELS, METHODS, better):
        seconds, bound = compared(Case(model, *one, method)), compared(Case(model, *other, method))
        found += [(model, method, one, other)] if seconds > TIES * bound else []
    assert found == []


def compared(case: Case) -> float:
    """The upper end of the predicted time of a step, by which plans are compared."""
    plan = plan_for(case)
    if plan is None:
        return math.inf
    context = context_of(plan)
    return upper_seconds(context, configuration_of(context, plan.chosen), plan.chosen.speed.step_s)


def device(machine: tuple[str, int]) -> Device:
    return device_of(Case(MODELS[0], *machine, Method.LORA).hardware)


def is_better(one: Device, other: Device) -> bool:
    """True if no figure of a machine is below that of another."""

    def figures(device: Device) -> Iterator[float]:
        for name in (*FIGURES, *(["link_bytes_per_s"] if other.devices_per_node > 1 else [])):
            yield getattr(device, name) or 0
        yield (device.network_bytes_per_s or 0) if other.num_nodes > 1 else 0
        yield from (device.peak_flops_per_s(precision) or 0 for precision in Precision)
        yield from device.compute_capability or (0, 0)
        yield -device.halves_fp32_sums

    return all(mine >= its for mine, its in zip(figures(one), figures(other), strict=True))
