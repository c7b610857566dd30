"""The time of one optimizer step in closed form: a roofline per kind of work, added up with imperfect overlap.

    computing   both(device, host)                                       `speed_compute`
    micro batch both(computing, collectives + offload)                   `speed_transfers`
    step        accumulation * micro batch + collectives and offload of the step + optimizer + a constant

What is done is counted (`speed_work`, `speed_stacks`), rates are shares of datasheet figures or measured
(`speed_rates`), and what is neither is one table (`speed_constants`). Errors on published rows: docs/speed-model.md.

Not covered: data loading and checkpoints, mixed fabrics inside a node, throttling, memory pressure (a plan keeps its
margin, so it never runs there).
"""

from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.speed.compute import (
    FORWARD,
    both,
    device_seconds,
    fed,
    forward_host_seconds,
    host_seconds,
    training_passes,
)
from shardwise.trainer.planning.speed.optimizer import optimizer_seconds
from shardwise.trainer.planning.speed.rates import rates_of, speed_notes
from shardwise.trainer.planning.speed.transfers import activation_copy_seconds, collective_seconds, offload_seconds
from shardwise.trainer.planning.speed.work import adapters_of, trained_parameters, work_of
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import SpeedEstimate
from shardwise.trainer.spec.strategy import Method

__all__ = ["estimate_speed", "evaluation_seconds", "flops_per_token", "speed_notes", "step_seconds"]


def flops_per_token(shape: ModelShape, seq_len: int, method: Method) -> float:
    """FLOPs that a training token is said to take: 6 N + 12 L q s, N parameters, q heads x head_dim, s tokens a row.

    The convention of llm-foundry and torchtitan: N includes embeddings, attention counts as if it were not causal,
    recomputation does not count. Of experts N counts those a token passes. A frozen base needs no gradient of its
    weights: 4 N + 12 L q s.
    """
    per_parameter, work = 4.0 if method.freezes_base else 6.0, work_of(shape)
    return per_parameter * work.used_parameters + 12.0 * work.blocks * shape.query_size * seq_len


def estimate_speed(shape: ModelShape, setting: Setting, device: Device) -> SpeedEstimate:
    """Seconds of one optimizer step of `setting`, by part; the parts sum to the step."""
    return _estimate(shape, setting, device, _parts(shape, setting, device))


def step_seconds(shape: ModelShape, setting: Setting, device: Device) -> float:
    """`step_s` of `estimate_speed` alone, for a search over settings."""
    return sum(_parts(shape, setting, device).values())


def _parts(shape: ModelShape, setting: Setting, device: Device) -> dict[str, float]:
    work, rates, adapters = work_of(shape), rates_of(setting, device), adapters_of(shape, setting)
    is_cpu = device.kind is DeviceKind.CPU
    trained = trained_parameters(setting, work, adapters)
    busy = device_seconds(shape, setting, work, adapters, rates, device, training_passes(setting))
    host = host_seconds(setting, work, adapters, is_cpu=is_cpu)
    wire, wire_step = collective_seconds(setting, work, rates, trained)
    moved, moved_step = offload_seconds(setting, work, rates, trained)
    if setting.runs_reference:
        busy += device_seconds(shape, setting, work, adapters, rates, device, FORWARD)
        host += forward_host_seconds(setting, work, adapters, is_cpu=is_cpu)
        wire += collective_seconds(setting, work, rates, 0)[0] / 2
    computing = busy + host if is_cpu else fed(busy, host)
    micro = both(computing, wire + moved)
    exposed = micro - computing
    on_wire = exposed * wire / (wire + moved) if wire + moved else 0.0
    waits = max(0.0, activation_copy_seconds(shape, setting, rates) - micro)
    accumulation = setting.accumulation
    return {
        "compute_s": accumulation * busy,
        "host_s": accumulation * (computing - busy),
        "communication_s": accumulation * on_wire + both(computing, wire_step) - computing,
        "offload_s": accumulation * (exposed - on_wire + waits) + moved_step,
        "optimizer_s": optimizer_seconds(setting, work, rates, device, trained),
        "overhead_s": constants.CPU_STEP_S if is_cpu else constants.STEP_S,
    }


def evaluation_seconds(shape: ModelShape, setting: Setting, device: Device, num_tokens: int) -> float:
    """Seconds that a forward over `num_tokens`, shared by the ranks, takes in the micro batches of training."""
    work, rates, adapters = work_of(shape), rates_of(setting, device), adapters_of(shape, setting)
    is_cpu = device.kind is DeviceKind.CPU
    busy = device_seconds(shape, setting, work, adapters, rates, device, FORWARD)
    host = forward_host_seconds(setting, work, adapters, is_cpu=is_cpu)
    wire, _ = collective_seconds(setting, work, rates, 0)
    micro = both(busy + host if is_cpu else fed(busy, host), wire / 2)
    return micro * num_tokens / setting.tokens_per_micro_batch / setting.num_ranks


def _estimate(shape: ModelShape, setting: Setting, device: Device, parts: dict[str, float]) -> SpeedEstimate:
    step_s = sum(parts.values())
    flops = flops_per_token(shape, setting.seq_len, setting.method)
    rate = setting.accumulation * setting.tokens_per_micro_batch / step_s
    precision = setting.strategy.precision
    peak = device.tf32_flops_per_s if setting.tf32 else device.peak_flops_per_s.get(precision)
    return SpeedEstimate(
        parts=parts,
        step_s=step_s,
        tokens_per_s_per_gpu=rate,
        flops_per_token=flops,
        peak_flops_per_s=None if peak is None else float(peak),
        mfu=None if peak is None else rate * flops / peak,
    )
