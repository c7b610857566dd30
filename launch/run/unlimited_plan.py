"""Plans for what is to be measured whether it fits or not: the prediction is put to the test, not obeyed.

Where a plan does not fit, it is made for a machine that nothing is too large for, and held to this one afterwards: on a
CPU under a data limit of what is usable, so that the run ends and not the machine.
"""

import os
from collections.abc import Mapping

from msgspec.structs import replace

from launch.plan.gather import PlanInputs, plan_inputs
from trainer.planning.device import device_of
from trainer.spec.data.profile import DataProfile
from trainer.spec.errors import NothingFitsError
from trainer.spec.hardware import DeviceKind, Hardware
from trainer.spec.job.sections import Limits
from trainer.spec.plan import Plan

_AMPLE_BYTES = 2**50  # of a machine that nothing is too large for
_AMPLE_HOURS = 1e6


def plan_regardless(inputs: PlanInputs, data: DataProfile, *, environment: Mapping[str, str] = os.environ) -> Plan:
    """The plan of these inputs, whether it fits or not; InputError and NothingFitsError where there is none."""
    try:
        return plan_inputs(inputs, data, environment=environment)
    except NothingFitsError:
        ample = inputs._replace(hardware=_ample(inputs.hardware))
        return held_to(plan_inputs(ample, data, environment=environment), inputs.hardware)


def held_to(plan: Plan, hardware: Hardware) -> Plan:
    """A plan that was made without a limit, on the machine that has one."""
    usable = device_of(hardware).usable_bytes
    chosen = replace(plan.chosen, memory=replace(plan.chosen.memory, usable_bytes=usable))
    if plan.device_kind is DeviceKind.CPU:
        hardware = replace(hardware, vram_cap_bytes=usable)
    return replace(plan, hardware=hardware, candidates=(chosen,))


def without_limits(limits: Limits) -> Limits:
    """Neither time nor money limits a few steps."""
    return replace(limits, hours=_AMPLE_HOURS, cost=None)


def _ample(hardware: Hardware) -> Hardware:
    gpus = tuple(
        replace(gpu, memory_bytes=_AMPLE_BYTES, usable_bytes=_AMPLE_BYTES, free_bytes=None) for gpu in hardware.gpus
    )
    host = replace(hardware.host, ram_bytes=_AMPLE_BYTES, ram_available_bytes=None)
    return replace(hardware, gpus=gpus, host=host, vram_cap_bytes=None)
