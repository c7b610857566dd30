"""The time of one optimizer step in closed form: a roofline per kind of work, added up with imperfect overlap.

    computing   both(device, host)                                       `compute`
    micro batch both(computing, collectives + offload)
    step        accumulation * micro batch + collectives and offload of the step + optimizer + a constant

Work is counted (`work`), rates are shares of datasheet figures or measured (`rates`), everything else is one table
(`constants`). Errors on published rows: docs/speed-model.md.

Not covered: data loading and checkpoints, mixed fabrics inside a node, throttling, memory pressure (a plan keeps its
margin, so it never runs there).

The update, in bytes through memory and products:

    foreach AdamW   21 reads and writes a parameter: a kernel for each operation of the update rule
    fused           7: weight, gradient and two moments read, three of them written
    8-bit           4 bytes of moments, then weight read and written and gradient read
    GaLore          the gradient projected and the update projected back, 4 m n r FLOPs of an m x n matrix (m <= n), and
                    every update_gap steps a singular value decomposition of it, 22 m^2 n
    Muon            five Newton-Schulz steps of 4 m^2 n + 2 m^3 each, on every rank
    paged           state that does not fit beside weights and gradients crosses PCIe twice a step

Clipping reads each gradient twice and writes it: 6 bytes. Under offload the CPU updates instead.

FSDP gathers a block's weights for each forward and backward, or once where they stay gathered, and reduces gradients
with the last micro batch; DeepSpeed's ZeRO-2 and 3 reduce with each, DDP and ZeRO-1 once a step. Some programs
reduce with each micro batch whatever the engine: a row of `memory.reference_trainers`, or of the case.

Offload (DeepSpeed and FSDP alike): gradients of a shard to the host after each micro batch, the CPU's update of
fp32 weight and moments (28 bytes a parameter), new 16-bit weights back; parameters on the host cross PCIe for each
forward and backward; NVMe holds 12 bytes a parameter, read and written once a step. Copies are pinned.
"""

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.reference_trainers import reference_of
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
from shardwise.trainer.planning.speed.rates import Rates, rates_of, speed_notes
from shardwise.trainer.planning.speed.work import Work, adapters_of, tokens_computed, trained_parameters, work_of
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import SpeedEstimate
from shardwise.trainer.spec.strategy import Method, Precision

__all__ = ["estimate_speed", "evaluation_seconds", "flops_per_token", "speed_notes", "step_seconds"]


def flops_per_token(shape: ModelShape, seq_len: int, method: Method) -> float:
    """FLOPs that a training token is said to take: 6 N + 12 L q s, N parameters, q heads x head_dim, s tokens a row.

    The convention of llm-foundry and torchtitan: N includes embeddings, attention counts as if it were not causal,
    recomputation does not count. Of experts N counts those a token passes. A frozen base needs no gradient of its
    weights: 4 N + 12 L q s.
    """
    per_parameter, work = 4.0 if method.freezes_base else 6.0, work_of(shape)
    return per_parameter * work.used_parameters + 12.0 * work.blocks * shape.query_size * seq_len


def estimate_speed(shape: ModelShape, configuration: Configuration, device: Device) -> SpeedEstimate:
    """Seconds of one optimizer step of `setting`, by part; the parts sum to the step."""
    return _estimate(shape, configuration, device, _parts(shape, configuration, device))


def step_seconds(shape: ModelShape, configuration: Configuration, device: Device) -> float:
    """`step_s` of `estimate_speed` alone, for a search over settings."""
    return sum(_parts(shape, configuration, device).values())


def _parts(shape: ModelShape, configuration: Configuration, device: Device) -> dict[str, float]:
    work, rates, adapters = work_of(shape), rates_of(configuration, device), adapters_of(shape, configuration)
    is_cpu = device.kind is DeviceKind.CPU
    trained = trained_parameters(configuration, work, adapters)
    busy = device_seconds(shape, configuration, work, adapters, rates, device, training_passes(configuration))
    host = host_seconds(configuration, work, adapters, is_cpu=is_cpu)
    wire, wire_step = collective_seconds(configuration, work, rates, trained)
    moved, moved_step = offload_seconds(configuration, work, rates, trained)
    if configuration.runs_reference:
        busy += device_seconds(shape, configuration, work, adapters, rates, device, FORWARD)
        host += forward_host_seconds(configuration, work, adapters, is_cpu=is_cpu)
        wire += collective_seconds(configuration, work, rates, 0)[0] / 2
    computing = busy + host if is_cpu else fed(busy, host)
    micro = both(computing, wire + moved)
    exposed = micro - computing
    on_wire = exposed * wire / (wire + moved) if wire + moved else 0.0
    waits = max(0.0, activation_copy_seconds(shape, configuration, rates) - micro)
    accumulation = configuration.accumulation
    return {
        "compute_s": accumulation * busy,
        "host_s": accumulation * (computing - busy),
        "communication_s": accumulation * on_wire + both(computing, wire_step) - computing,
        "offload_s": accumulation * (exposed - on_wire + waits) + moved_step,
        "optimizer_s": optimizer_seconds(configuration, work, rates, device, trained),
        "overhead_s": constants.CPU_STEP_S if is_cpu else constants.STEP_S,
    }


def evaluation_seconds(shape: ModelShape, configuration: Configuration, device: Device, num_tokens: int) -> float:
    """Seconds that a forward over `num_tokens`, shared by the ranks, takes in the micro batches of training."""
    work, rates, adapters = work_of(shape), rates_of(configuration, device), adapters_of(shape, configuration)
    is_cpu = device.kind is DeviceKind.CPU
    busy = device_seconds(shape, configuration, work, adapters, rates, device, FORWARD)
    host = forward_host_seconds(configuration, work, adapters, is_cpu=is_cpu)
    wire, _ = collective_seconds(configuration, work, rates, 0)
    micro = both(busy + host if is_cpu else fed(busy, host), wire / 2)
    return micro * num_tokens / configuration.tokens_per_micro_batch / configuration.num_ranks


def _estimate(
    shape: ModelShape, configuration: Configuration, device: Device, parts: dict[str, float]
) -> SpeedEstimate:
    step_s = sum(parts.values())
    flops = flops_per_token(shape, configuration.seq_len, configuration.method)
    rate = configuration.accumulation * configuration.tokens_per_micro_batch / step_s
    precision = configuration.strategy.precision
    peak = device.tf32_flops_per_s if configuration.tf32 else device.peak_flops_per_s.get(precision)
    return SpeedEstimate(
        parts=parts,
        step_s=step_s,
        tokens_per_s_per_gpu=rate,
        flops_per_token=flops,
        peak_flops_per_s=None if peak is None else float(peak),
        mfu=None if peak is None else rate * flops / peak,
    )


_CLIPPING_BYTES = 6
_NEWTON_SCHULZ_STEPS = 5


def optimizer_seconds(configuration: Configuration, work: Work, rates: Rates, device: Device, trained: int) -> float:
    """Seconds of the update itself; 0 where the host does it."""
    strategy = configuration.strategy
    if strategy.offload is not Offload.NONE:
        return 0.0
    mine = trained / (configuration.num_ranks if strategy.sharding.shards_optimizer else 1)
    facts = strategy.optimizer.facts
    if facts.fused_form is not None and reference_of(configuration.reference).fuses_adamw:
        facts = facts.fused_form.facts
    moved = facts.passes * strategy.precision.master_bytes + facts.state_traffic_bytes + _CLIPPING_BYTES
    seconds = mine * moved / rates.memory
    if configuration.method is Method.GALORE:
        seconds += _projection_seconds(configuration, work, rates)
    if facts.orthogonalises_matrices:
        seconds += _orthogonalisation_seconds(work, rates)
    return seconds + 2 * _bytes_paged_out(configuration, device, mine) / rates.pcie


def _projection_seconds(configuration: Configuration, work: Work, rates: Rates) -> float:
    rank, gap = configuration.galore.rank, configuration.galore.update_gap
    products = decompositions = 0.0
    for group in work.linears:
        count, short = group.num_layers * group.num_copies, min(group.inputs, group.outputs)
        products += count * 4.0 * group.inputs * group.outputs * min(rank, short)
        decompositions += count * 22.0 * short * group.inputs * group.outputs
    return products / rates.matmul + decompositions / (constants.SVD_SHARE * rates.fp32) / gap


def _orthogonalisation_seconds(work: Work, rates: Rates) -> float:
    flops = 0.0
    for group in work.linears:
        short, long = sorted((group.inputs, group.outputs))
        flops += group.num_layers * group.num_copies * (4.0 * short * short * long + 2.0 * short**3)
    return _NEWTON_SCHULZ_STEPS * flops / rates.matmul


def _bytes_paged_out(configuration: Configuration, device: Device, mine: float) -> float:
    """State in managed memory that has no room on the device between two steps."""
    state = configuration.strategy.optimizer.facts.paged_bytes * mine
    if not state:
        return 0.0
    gradient = 0 if configuration.optimizer_in_backward else configuration.strategy.precision.master_bytes
    held = mine * (configuration.strategy.precision.master_bytes + gradient)
    return min(state, max(0.0, held + state + device.context_bytes - device.usable_bytes))


ADAM_BYTES = 28  # a parameter: fp32 weight and two moments read and written, gradient read
NVME_STATE_BYTES = 12  # a parameter: fp32 weight and two moments
NF4_BYTES = 0.52  # a weight, its scales included


def collective_seconds(configuration: Configuration, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """Seconds of collectives (of each micro batch, of each step)."""
    num_ranks, sharding = configuration.num_ranks, configuration.strategy.sharding
    if num_ranks == 1 or sharding.facts.is_one_rank:
        return 0.0, 0.0
    if sharding.facts.shards_within_node:
        return _hybrid_seconds(configuration, work, rates, trained)
    share, latency = (num_ranks - 1) / num_ranks, (work.blocks + 1) * num_ranks * constants.HOP_S
    reduction = trained * _gradient_bytes(configuration) * share / rates.link + latency
    if not sharding.shards_gradients:
        reduction += (
            trained * _gradient_bytes(configuration) * share / rates.link
        )  # all-reduced, or gathered as weights
        return _per_micro_batch_or_step(configuration, 0.0, reduction)
    gathered = gathered_bytes(configuration, work) * share / rates.link + latency
    if not sharding.shards_weights:
        weights = trained * configuration.strategy.precision.compute_bytes * share / rates.link
        return reduction, weights
    gathers = 1 if sharding.facts.keeps_weights_gathered else 2
    if sharding.uses_deepspeed:
        return gathers * gathered + reduction, 0.0
    return _per_micro_batch_or_step(configuration, gathers * gathered, reduction)


def gathered_bytes(configuration: Configuration, work: Work) -> float:
    """Bytes of the whole model as ranks gather it."""
    width = configuration.strategy.precision.compute_bytes
    linear = NF4_BYTES if configuration.method is Method.QLORA else float(width)
    return work.linear_parameters * linear + work.num_tables * work.table * width


def offload_seconds(configuration: Configuration, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """PCIe, the host's optimizer and NVMe: seconds (of each micro batch, of each step)."""
    offload = configuration.strategy.offload
    if offload is Offload.NONE:
        return 0.0, 0.0
    mine = trained / (configuration.num_ranks if configuration.strategy.sharding.shards_optimizer else 1)
    on_node = mine * min(configuration.ranks_per_node, configuration.num_ranks)
    is_fast = configuration.strategy.optimizer.facts.updates_on_host
    host_rate = rates.host_adam * (1.0 if is_fast else constants.TORCH_CPU_ADAM_SHARE)
    micro, step = 2.0 * mine / rates.pcie, mine * 2 / rates.pcie + ADAM_BYTES * on_node / host_rate
    if offload.moves_parameters:
        micro += 2 * gathered_bytes(configuration, work) / configuration.num_ranks / rates.pcie
    if offload.uses_nvme:
        step += 2 * NVME_STATE_BYTES * on_node / rates.nvme
    return micro, step


def activation_copy_seconds(shape: ModelShape, configuration: Configuration, rates: Rates) -> float:
    """Block inputs to the host and back, by copy engines beside the computation."""
    if not configuration.activation_offload:
        return 0.0
    width = configuration.policy.residual_bytes or configuration.strategy.precision.compute_bytes
    return 2.0 * width * tokens_computed(configuration) * shape.hidden_size * shape.num_layers / rates.pcie


def _per_micro_batch_or_step(configuration: Configuration, gathered: float, reduction: float) -> tuple[float, float]:
    every = configuration.policy.reduces_every_micro_batch
    if every is None:
        every = reference_of(configuration.reference).reduces_every_micro_batch
    return (gathered + reduction, 0.0) if every else (gathered, reduction)


def _hybrid_seconds(configuration: Configuration, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """Full sharding inside a node, one all-reduce of the shards across nodes."""
    inside = min(configuration.ranks_per_node, configuration.num_ranks)
    share, latency = (inside - 1) / inside, (work.blocks + 1) * inside * constants.HOP_S
    gathered = gathered_bytes(configuration, work) * share / rates.inner_link
    gradients = trained * _gradient_bytes(configuration)
    across = 2 * gradients / inside / rates.link if configuration.num_ranks > inside else 0.0
    reduction = gradients * share / rates.inner_link + latency + across
    return _per_micro_batch_or_step(configuration, 2 * (gathered + latency), reduction)


def _gradient_bytes(configuration: Configuration) -> float:
    """Of a gradient as ranks add it up: fp32 but where everything is bf16."""
    precision = configuration.strategy.precision
    chosen = configuration.policy.reduce_bytes or reference_of(configuration.reference).reduce_bytes
    return float(chosen or (2 if precision is Precision.BF16 else 4))
