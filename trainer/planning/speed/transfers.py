"""Transfers: collectives between ranks, and copies to and from the host or its disks.

FSDP gathers a block's weights for each forward and backward, or once where they stay gathered, and reduces gradients
with the last micro batch; DeepSpeed's ZeRO-2 and 3 reduce with each, DDP and ZeRO-1 once a step. Some programs
reduce with each micro batch whatever the engine: a row of `memory.stacks`, or of the case.

Offload (DeepSpeed and FSDP alike): gradients of a shard to the host after each micro batch, the CPU's update of
fp32 weight and moments (28 bytes a parameter), new 16-bit weights back; parameters on the host cross PCIe for each
forward and backward; NVMe holds 12 bytes a parameter, read and written once a step. Copies are pinned.
"""

from shardwise.trainer.planning.memory.stacks import stack_of
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.speed.rates import Rates
from shardwise.trainer.planning.speed.work import Work, tokens_computed
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.strategy import Method, Offload, Precision

ADAM_BYTES = 28  # a parameter: fp32 weight and two moments read and written, gradient read
NVME_STATE_BYTES = 12  # a parameter: fp32 weight and two moments
NF4_BYTES = 0.52  # a weight, its scales included


def collective_seconds(setting: Setting, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """Seconds of collectives (of each micro batch, of each step)."""
    num_ranks, sharding = setting.num_ranks, setting.strategy.sharding
    if num_ranks == 1 or sharding.facts.is_one_rank:
        return 0.0, 0.0
    if sharding.facts.shards_within_node:
        return _hybrid_seconds(setting, work, rates, trained)
    share, latency = (num_ranks - 1) / num_ranks, (work.blocks + 1) * num_ranks * constants.HOP_S
    reduction = trained * _gradient_bytes(setting) * share / rates.link + latency
    if not sharding.shards_gradients:
        reduction += trained * _gradient_bytes(setting) * share / rates.link  # all-reduced, or gathered as weights
        return _per_micro_batch_or_step(setting, 0.0, reduction)
    gathered = gathered_bytes(setting, work) * share / rates.link + latency
    if not sharding.shards_weights:
        weights = trained * setting.strategy.precision.compute_bytes * share / rates.link
        return reduction, weights
    gathers = 1 if sharding.facts.keeps_weights_gathered else 2
    if sharding.uses_deepspeed:
        return gathers * gathered + reduction, 0.0
    return _per_micro_batch_or_step(setting, gathers * gathered, reduction)


def gathered_bytes(setting: Setting, work: Work) -> float:
    """Bytes of the whole model as ranks gather it."""
    width = setting.strategy.precision.compute_bytes
    linear = NF4_BYTES if setting.method is Method.QLORA else float(width)
    return work.linear_parameters * linear + work.num_tables * work.table * width


def offload_seconds(setting: Setting, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """PCIe, the host's optimizer and NVMe: seconds (of each micro batch, of each step)."""
    offload = setting.strategy.offload
    if offload is Offload.NONE:
        return 0.0, 0.0
    mine = trained / (setting.num_ranks if setting.strategy.sharding.shards_optimizer else 1)
    on_node = mine * min(setting.ranks_per_node, setting.num_ranks)
    is_fast = setting.strategy.optimizer.facts.updates_on_host
    host_rate = rates.host_adam * (1.0 if is_fast else constants.TORCH_CPU_ADAM_SHARE)
    micro, step = 2.0 * mine / rates.pcie, mine * 2 / rates.pcie + ADAM_BYTES * on_node / host_rate
    if offload.moves_parameters:
        micro += 2 * gathered_bytes(setting, work) / setting.num_ranks / rates.pcie
    if offload.uses_nvme:
        step += 2 * NVME_STATE_BYTES * on_node / rates.nvme
    return micro, step


def activation_copy_seconds(shape: ModelShape, setting: Setting, rates: Rates) -> float:
    """Block inputs to the host and back, by copy engines beside the computation."""
    if not setting.activation_offload:
        return 0.0
    width = setting.recipe.residual_bytes or setting.strategy.precision.compute_bytes
    return 2.0 * width * tokens_computed(setting) * shape.hidden_size * shape.num_layers / rates.pcie


def _per_micro_batch_or_step(setting: Setting, gathered: float, reduction: float) -> tuple[float, float]:
    every = setting.recipe.reduces_every_micro_batch
    if every is None:
        every = stack_of(setting.stack).reduces_every_micro_batch
    return (gathered + reduction, 0.0) if every else (gathered, reduction)


def _hybrid_seconds(setting: Setting, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """Full sharding inside a node, one all-reduce of the shards across nodes."""
    inside = min(setting.ranks_per_node, setting.num_ranks)
    share, latency = (inside - 1) / inside, (work.blocks + 1) * inside * constants.HOP_S
    gathered = gathered_bytes(setting, work) * share / rates.inner_link
    gradients = trained * _gradient_bytes(setting)
    across = 2 * gradients / inside / rates.link if setting.num_ranks > inside else 0.0
    reduction = gradients * share / rates.inner_link + latency + across
    return _per_micro_batch_or_step(setting, 2 * (gathered + latency), reduction)


def _gradient_bytes(setting: Setting) -> float:
    """Of a gradient as ranks add it up: fp32 but where everything is bf16."""
    precision = setting.strategy.precision
    chosen = setting.recipe.reduce_bytes or stack_of(setting.stack).reduce_bytes
    return float(chosen or (2 if precision is Precision.BF16 else 4))
