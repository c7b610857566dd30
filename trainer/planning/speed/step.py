"""The time of one optimizer step in closed form: a roofline per kind of work, added up with imperfect overlap.

    computing   both(device, host)
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
    paged           state that does not fit in addition to weights and gradients crosses PCIe twice a step

Clipping reads each gradient twice and writes it: 6 bytes. Under offload the CPU updates instead.

`Transfers` of an engine (`planning/engines`) are what ranks gather and reduce in a micro batch and in a step. Some
programs reduce with each micro batch under every engine: a value of `policy.reference_trainers`, or of the case.

Offload (DeepSpeed and FSDP alike): gradients of a shard to the host after each micro batch, the CPU's update (7
accesses a parameter to weight, moments and gradient, and no faster than its cores in fp32), new 16-bit weights back;
parameters on the host cross PCIe for each forward and backward; NVMe holds 12 bytes a parameter, read and written once
a step. Copies are pinned. Of embeddings in host RAM a core gathers the rows of a micro batch, which then cross PCIe.

One micro batch on the device and on the host that feeds it: T tokens with padding, i x o a linear layer, r the share of
a block that is recomputed, w = 1 if base weights are trained, s the length of a row, R, A and M the rates of products,
attention and memory:

    both(a, b)  a + b - OVERLAP * min(a, b): two activities on different resources, the shorter hides imperfectly
    linear      sum over matrices (2 + r + w) * both(2 T i o / R, 2 (T (i + o) + i o) / M)
    experts     T times the experts a token is sent to, all that exist read; half a tile of each is empty
    attention   (3.5 + [r = 1]) * 2 T s heads head_dim / A: backward is 2.5 forwards, half is masked; in a window of
                w < s tokens s - s^2 / 4 becomes w (1 - w / 2 s); in packed rows s is the length of a document;
                heads that are repeated for the memory-efficient kernel are read and written, (3 + [r > 0]) times
    elementwise (3 + [r > 0]) * T * bytes a token / M
    head        (2 + w [+ 1 chunked]) * 2 T h V / R + (bytes a logit * T V + bytes of the weight) / M
    host        operators * (3 + [r > 0]) * time an operator; eager selective of ours 48 us an operator more
"""

import math
from collections.abc import Collection

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration, same_for_all
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.engines import engine_of
from shardwise.trainer.planning.engines.engine import Transfers
from shardwise.trainer.planning.memory.activations import FUSED_SLICE_TOKENS, block_activations, liger_slice_tokens
from shardwise.trainer.planning.memory.saved_tensors import keys_and_values
from shardwise.trainer.planning.memory.states import looked_up_bytes
from shardwise.trainer.planning.policy.precision_policy import (
    attention_kernel,
    dims_for,
    dims_of,
    policy_of,
    shard_degree,
)
from shardwise.trainer.planning.policy.reference_trainers import reference_of
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.speed.rates import Rates, rates_of, saved_by_fp8, speed_notes
from shardwise.trainer.planning.speed.work import (
    LIGER_GRADIENT_BYTES,
    LIGER_WEIGHT_BYTES,
    LOGIT_BYTES,
    OWN_FUSED_LOGIT_BYTES,
    SLICE_GRADIENT_BYTES,
    SLICE_OPERATORS,
    SLICE_WEIGHT_BYTES,
    TILE_TOKENS,
    Adapters,
    LinearWork,
    Work,
    adapters_of,
    elementwise_bytes,
    is_autocast,
    operators,
    per_token,
    recomputation,
    tokens_computed,
    trained_parameters,
    weight_norm_bytes,
    work_of,
)
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.fp8 import FP8_RECIPES, Shape, converted_shapes
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import SpeedEstimate
from shardwise.trainer.spec.strategy import AttentionKernel, Checkpointing, Fp8Recipe, LossHead, Method, Precision
from shardwise.trainer.spec.value import Value

__all__ = ["estimate_speed", "evaluation_seconds", "flops_per_token", "fp8_share", "speed_notes", "step_seconds"]


def flops_per_token(shape: ModelShape, seq_len: int, method: Method) -> float:
    """FLOPs of a training token by convention: 6 N + 12 L q s, N parameters, q heads x head_dim, s tokens a row.

    The convention of llm-foundry and torchtitan: N includes embeddings, attention counts as if it were not causal,
    recomputation does not count. Of experts N counts those a token passes. A frozen base needs no gradient of its
    weights: 4 N + 12 L q s. L q of a traced model counts its blocks with attention alone.
    """
    per_parameter, work = 4.0 if method.freezes_base else 6.0, work_of(shape)
    return per_parameter * work.used_parameters + 12.0 * work.attended * seq_len


def estimate_speed(shape: ModelShape, configuration: Configuration, device: Device) -> SpeedEstimate:
    """Seconds of one optimizer step of `configuration`, by part; the parts sum to the step."""
    return _estimate(shape, configuration, device, _parts(shape, configuration, device))


def step_seconds(shape: ModelShape, configuration: Configuration, device: Device) -> float:
    """`step_s` of `estimate_speed` alone, for a search over configurations."""
    return sum(_parts(shape, configuration, device).values())


def _parts(shape: ModelShape, configuration: Configuration, device: Device) -> dict[str, float]:
    is_cpu, accumulation = device.kind is DeviceKind.CPU, configuration.accumulation
    busy, host = computing_seconds(configuration, shape, device)
    moves = state_seconds(configuration, shape, device)
    wire, moved = moves.wire, moves.offload
    computing = busy + host if is_cpu else fed(busy, host)
    micro = both(computing, wire + moved)
    exposed = micro - computing
    on_wire = exposed * wire / (wire + moved) if wire + moved else 0.0
    waits = activation_waits(shape, configuration, device, micro, moved) if configuration.activation_offload else 0.0
    looked_up = lookup_seconds(shape, configuration, device) if configuration.embedding_on_host else 0.0
    return {
        "compute_s": accumulation * busy,
        "host_s": accumulation * (computing - busy),
        "communication_s": accumulation * on_wire + both(computing, moves.wire_step) - computing,
        "offload_s": accumulation * (exposed - on_wire + waits) + moves.offload_step + looked_up,
        "optimizer_s": moves.update,
        "overhead_s": constants.CPU_STEP_S if is_cpu else _step_overhead(configuration),
    }


def _step_overhead(configuration: Configuration) -> float:
    is_own = reference_of(configuration.reference) is reference_of(SHARDWISE)
    return constants.OWN_STEP_S if is_own else constants.STEP_S


@same_for_all(
    "strategy.precision",
    "strategy.sharding.is_replicated",
    num_ranks=1,
    ranks_per_node=1,
    accumulation=1,
    activation_offload=False,
    optimizer_in_backward=False,
    buckets=None,
    shard_group=None,
    reduce_every_micro_batch=False,
    embedding_on_host=False,
    galore=GaloreJob(),
)
def computing_seconds(configuration: Configuration, shape: ModelShape, device: Device) -> tuple[float, float]:
    """Seconds of one micro batch (on the device, on the host that feeds it), without its copies and collectives."""
    work, rates, adapters = work_of(shape), rates_of(configuration, device), adapters_of(shape, configuration)
    is_cpu = device.kind is DeviceKind.CPU
    busy = device_seconds(shape, configuration, work, adapters, rates, device, training_passes(configuration))
    host = host_seconds(shape, configuration, work, adapters, device)
    if configuration.runs_reference:
        busy += device_seconds(shape, configuration, work, adapters, rates, device, FORWARD)
        host += forward_host_seconds(configuration, work, adapters, is_cpu=is_cpu)
    return busy, host


class StateSeconds(Value, frozen=True, kw_only=True):
    """Seconds that a step spends on state: of each micro batch, or of a step."""

    wire: float  # collectives of a micro batch
    wire_step: float
    offload: float  # copies of a micro batch
    offload_step: float
    update: float


@same_for_all(
    micro_batch=1,
    accumulation=1,
    checkpointing=Checkpointing.NONE,
    checkpoint_every_n=None,
    loss=LossHead.EAGER,
    loss_chunk_tokens=None,
    compile=False,
    fused_kernels=False,
    activation_offload=False,
    embedding_on_host=False,
    buckets=None,
)
def state_seconds(configuration: Configuration, shape: ModelShape, device: Device) -> StateSeconds:
    """Seconds of gathering, reducing, moving and updating state."""
    work, rates, adapters = work_of(shape), rates_of(configuration, device), adapters_of(shape, configuration)
    trained = trained_parameters(configuration, work, adapters)
    wire, wire_step = collective_seconds(configuration, work, rates, trained)
    if configuration.runs_reference:
        wire += collective_seconds(configuration, work, rates, 0)[0] / 2
    offload, offload_step = offload_seconds(configuration, work, rates, trained)
    return StateSeconds(
        wire=wire,
        wire_step=wire_step,
        offload=offload,
        offload_step=offload_step,
        update=optimizer_seconds(configuration, work, rates, device, trained),
    )


def compile_seconds(shape: ModelShape, *, is_padded: bool) -> float:
    """Seconds of torch.compile before the first step ends: a graph for each kind of block, two where widths change."""
    kinds = 1 + (shape.sliding_window is not None)
    return constants.COMPILE_S * kinds * (1 + is_padded)


def evaluation_seconds(shape: ModelShape, configuration: Configuration, device: Device, num_tokens: int) -> float:
    """Seconds of a forward over `num_tokens`, shared by the ranks, in the micro batches of training."""
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
    peak = device.tf32_flops_per_s if configuration.tf32 else device.peak_flops_per_s(precision)
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
    mine = trained / shard_degree(configuration)
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


ADAM_ACCESSES = 7  # weight and two moments read and written, gradient read
NVME_STATE_BYTES = 12  # a parameter: fp32 weight and two moments
NF4_BYTES = 0.52  # a weight, its scales included


def collective_seconds(configuration: Configuration, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """Seconds of collectives (of each micro batch, of each step)."""
    num_ranks, sharding = configuration.num_ranks, configuration.strategy.sharding
    if num_ranks == 1 or sharding.facts.is_one_rank:
        return 0.0, 0.0
    if sharding.facts.shards_within_group:
        return _hybrid_seconds(configuration, work, rates, trained)
    share, latency = (num_ranks - 1) / num_ranks, (work.blocks + 1) * num_ranks * constants.HOP_S
    transfers = engine_of(sharding).transfers(configuration)
    reduction = trained * _gradient_bytes(configuration) * share / rates.link + latency
    if not transfers.reduces_to_shards:
        reduction += trained * _gradient_bytes(configuration) * share / rates.link
    gathered = gathered_bytes(configuration, work) * share / rates.link + latency
    updated = trained * configuration.strategy.precision.compute_bytes * share / rates.link
    in_micro, in_step = _with_reduction(transfers, transfers.gathers * gathered, reduction)
    return in_micro, in_step + (updated if transfers.gathers_updated else 0.0)


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
    mine = trained / shard_degree(configuration)
    on_node = mine * min(configuration.ranks_per_node, configuration.num_ranks)
    is_one_kernel = configuration.strategy.optimizer.facts.fused_form is None  # torch's or DeepSpeed's
    through_memory = configuration.strategy.precision.master_bytes / rates.host_adam
    update = ADAM_ACCESSES * on_node * max(through_memory, 4 / rates.host_cores)
    update /= 1.0 if is_one_kernel else constants.TORCH_CPU_ADAM_SHARE
    micro, step = 2.0 * mine / rates.pcie, mine * 2 / rates.pcie + update
    if offload.moves_parameters:
        micro += 2 * gathered_bytes(configuration, work) / shard_degree(configuration) / rates.pcie
    if offload.uses_nvme:
        step += 2 * NVME_STATE_BYTES * on_node / rates.nvme
    return micro, step


def activation_waits(
    shape: ModelShape, configuration: Configuration, device: Device, micro_s: float, moved_s: float
) -> float:
    """Seconds of a micro batch that the device waits for activations on their way to the host, and back.

    The bytes are those that `memory.activations` counts. They move out during the forward and back during the backward,
    where half of the weights that cross PCIe as well (`moved_s`) take the same direction.
    """
    dims = dims_for(shape, configuration)
    blocks = block_activations(configuration, policy_of(configuration, device, dims), dims)
    moved = blocks.offloaded / rates_of(configuration, device).pcie
    forward = micro_s * _forward_share(configuration)
    return max(0.0, moved - forward) + max(0.0, moved + moved_s / 2 - (micro_s - forward))


def lookup_seconds(shape: ModelShape, configuration: Configuration, device: Device) -> float:
    """Seconds of a step that the device waits for rows of embeddings in host RAM.

    A core reads each row and writes it to pinned memory; then it is copied between two kernels of the device. The host
    may be ahead of the device meanwhile, which is not counted. The ids are in host RAM where the loader made them, so
    that no forward waits for them.
    """
    dims = dims_for(shape, configuration)
    rows = looked_up_bytes(configuration, policy_of(configuration, device, dims), dims)
    num_forwards = configuration.accumulation * (2 if configuration.runs_reference else 1)
    return num_forwards * (2 * rows / constants.CORE_ADAM_BYTES_PER_S + rows / rates_of(configuration, device).pcie)


def _forward_share(configuration: Configuration) -> float:
    """Share of a micro batch that is its forward, by matrix products."""
    return 1 / training_passes(configuration).products


def _with_reduction(transfers: Transfers, gathered: float, reduction: float) -> tuple[float, float]:
    """Seconds (of each micro batch, of each step) of both."""
    return (gathered + reduction, 0.0) if transfers.reduces_every_micro_batch else (gathered, reduction)


def _hybrid_seconds(configuration: Configuration, work: Work, rates: Rates, trained: int) -> tuple[float, float]:
    """Full sharding inside a group of ranks, one all-reduce of each shard across the groups.

    Rings of an all-reduce, one for each shard of a node, share its adapters. FSDP2 runs
    the sum of a block's gradients inside groups and that of another across them on streams of their own.
    """
    inside, on_node = shard_degree(configuration), min(configuration.ranks_per_node, configuration.num_ranks)
    copies, hops = configuration.num_ranks / inside, (work.blocks + 1) * constants.HOP_S
    link = rates.link if inside > on_node else rates.inner_link
    share, latency = (inside - 1) / inside, hops * inside
    gathered = gathered_bytes(configuration, work) * share / link
    gradients = trained * _gradient_bytes(configuration)
    spans_nodes = configuration.num_ranks > on_node
    outer = min(rates.inner_link, rates.network / min(inside, on_node)) if spans_nodes else rates.inner_link
    across = 2 * (copies - 1) / copies * gradients / inside / outer + hops * copies if copies > 1 else 0.0
    summed = gradients * share / link + latency
    reduction = both(summed, across) if spans_nodes and link == rates.inner_link else summed + across
    transfers = engine_of(configuration.strategy.sharding).transfers(configuration)
    return _with_reduction(transfers, transfers.gathers * (gathered + latency), reduction)


def _gradient_bytes(configuration: Configuration) -> float:
    """Of a gradient as ranks add it up: fp32 but where everything is bf16, or the job allows it."""
    is_16_bit = configuration.strategy.precision is Precision.BF16 or configuration.bf16_reduction
    chosen = configuration.policy.reduce_bytes or reference_of(configuration.reference).reduce_bytes
    return float(chosen or (2 if is_16_bit else 4))


DEFAULT_SLICE_TOKENS = 1024
_CAST_BYTES = 6  # of a weight that autocast casts, and of its gradient on the way back
# Selective checkpointing calls Python for every operator of a block, in the forward and in the recomputation (torch's
# SelectiveCheckpointContext, a TorchDispatchMode), on every device. Llama blocks 64 wide on a CPU, torch 2.13,
# processor time of a step by that of one without recomputation: 2.2 to 2.6 under `full`, 4.2 to 4.9 under `selective`,
# which is 5.9 to 7.1 forwards more on that CPU.
SELECTIVE_OPERATOR_S = 6 * constants.CPU_OPERATOR_S
SCORE_BYTES = 14  # through memory, of a saved score: products, mask, softmax, cast


def both(a: float, b: float) -> float:
    """Seconds of two activities that run at the same time on different resources."""
    return a + b - constants.OVERLAP * min(a, b)


def fed(device_s: float, host_s: float) -> float:
    """Seconds of a device that a host feeds ahead of time: the longer of the two, and more where they are close.

    Kernels of a block take unequal times, so a host that is as fast on average is still waited for now and then.
    """
    return float(math.hypot(device_s, host_s))


class Passes(Value, frozen=True, kw_only=True):
    """How often each kind of work of one forward is done."""

    products: float
    adapter_products: float
    weight_norms: float
    elementwise: float
    attention: float  # by a kernel that keeps no scores
    retained_scores: float
    head_products: float
    head_bytes: float
    learns_head: bool


FORWARD = Passes(
    products=1,
    adapter_products=1,
    weight_norms=1,
    elementwise=1,
    attention=1,
    retained_scores=1,
    head_products=1,
    head_bytes=1 / 3,
    learns_head=False,
)


def training_passes(configuration: Configuration) -> Passes:
    """Forward, recomputation and backward."""
    again, learns = recomputation(configuration), not configuration.method.freezes_base
    return Passes(
        products=2 + again + learns,
        adapter_products=3 + again,
        weight_norms=1 + again,
        elementwise=3 + (again > 0),
        attention=3.5 + (again == 1),
        retained_scores=3 + again,
        head_products=2 + learns + (configuration.loss is LossHead.CHUNKED),
        head_bytes=1,
        learns_head=learns,
    )


def device_seconds(
    shape: ModelShape,
    configuration: Configuration,
    work: Work,
    adapters: Adapters,
    rates: Rates,
    device: Device,
    passes: Passes,
) -> float:
    """Seconds of one micro batch on the device."""
    tokens, precision = tokens_computed(configuration), configuration.strategy.precision
    width, fp8_recipe = precision.compute_bytes, configuration.fp8_recipe
    converted = frozenset() if fp8_recipe is None else converted_shapes(shape, fp8_recipe)
    is_timed = saved_by_fp8(device, fp8_recipe) is not None
    seconds = bytes_moved = 0.0
    for group in work.linears:
        weight, sent = group.inputs * group.outputs, tokens * group.num_used
        read = min(group.num_copies, sent) * weight
        rows = sent if group.num_copies == 1 else sent + group.num_copies * TILE_TOKENS / 2
        traffic = width * (sent * (group.inputs + group.outputs) + read)
        is_fp8 = _is_converted(group, converted)
        rate = rates.fp8 if is_fp8 else rates.matmul
        seconds += group.num_layers * passes.products * both(2 * rows * weight / rate, traffic / rates.memory)
        if is_fp8 and not is_timed:
            # Casts of input, output gradient and weight; what was timed has them in it.
            bytes_moved += group.num_layers * 2 * traffic
    if configuration.method is Method.QLORA:  # four bits in, sixteen out
        bytes_moved += (passes.products) * 2.5 * work.linear_parameters
    if adapters.count:
        products = 2 * tokens * configuration.lora.rank * (adapters.sizes - adapters.of_experts)
        seconds += passes.adapter_products * products / rates.matmul
        if configuration.lora.dora:  # both matrices times an identity matrix, to no gradient
            products = 2 * configuration.lora.rank * (adapters.squares + adapters.weights)
            seconds += passes.weight_norms * products / rates.matmul
            bytes_moved += passes.weight_norms * weight_norm_bytes(configuration, adapters)
    if work.traced is not None:
        flops = per_token(configuration, work.traced, lambda part: part.flops) / rates.matmul
        flops += per_token(configuration, work.traced, lambda part: part.fp32_flops) / rates.fp32
        seconds += passes.retained_scores * tokens * flops
    elif is_autocast(configuration) and not configuration.method.freezes_base:
        bytes_moved += _CAST_BYTES * passes.products * work.linear_parameters
    bytes_moved += passes.elementwise * tokens * elementwise_bytes(configuration, work, adapters)
    seconds += _attention_seconds(shape, configuration, work, rates, device, passes)
    return seconds + bytes_moved / rates.memory + _head_seconds(shape, configuration, work, rates, passes)


def host_seconds(
    shape: ModelShape, configuration: Configuration, work: Work, adapters: Adapters, device: Device
) -> float:
    """Seconds in which the host starts the operators of one micro batch."""
    is_cpu = device.kind is DeviceKind.CPU
    an_operator = constants.CPU_OPERATOR_S if is_cpu else constants.OPERATOR_S
    in_blocks, slices = operators(configuration, work, adapters), _num_slices(configuration, shape)
    if _is_own_fused(configuration):
        slices = math.ceil(tokens_computed(configuration) / FUSED_SLICE_TOKENS)
    seconds = an_operator * ((3 + (recomputation(configuration) > 0)) * in_blocks + SLICE_OPERATORS * (slices - 1))
    if (
        configuration.checkpointing is Checkpointing.SELECTIVE
        and configuration.reference == SHARDWISE
        and not configuration.compile
    ):
        seconds += SELECTIVE_OPERATOR_S * in_blocks
    fp8_recipe = configuration.fp8_recipe
    if fp8_recipe is not None and not FP8_RECIPES[fp8_recipe].is_compiled and saved_by_fp8(device, fp8_recipe) is None:
        num_layers = _num_converted(work, converted_shapes(shape, fp8_recipe))
        seconds += constants.TE_LAYER_S * (3 + (recomputation(configuration) > 0)) * num_layers
    return seconds


def fp8_share(shape: ModelShape, fp8_recipe: Fp8Recipe) -> float:
    """Share of the FLOPs of the blocks' linear layers that run in FP8."""
    shapes, flops = converted_shapes(shape, fp8_recipe), [0.0, 0.0]
    for group in work_of(shape).linears:
        flops[_is_converted(group, shapes)] += group.num_layers * group.num_used * group.inputs * group.outputs
    return flops[True] / sum(flops)


def _num_converted(work: Work, shapes: Collection[Shape]) -> int:
    converted = (group for group in work.linears if _is_converted(group, shapes))
    return sum(group.num_layers for group in converted)


def _is_converted(group: LinearWork, shapes: Collection[Shape]) -> bool:
    return group.num_copies == 1 and (group.inputs, group.outputs) in shapes


def forward_host_seconds(configuration: Configuration, work: Work, adapters: Adapters, *, is_cpu: bool) -> float:
    """The same of a forward without a backward, in which nothing is recomputed."""
    return operators(configuration, work, adapters) * (constants.CPU_OPERATOR_S if is_cpu else constants.OPERATOR_S)


def _attention_seconds(
    shape: ModelShape, configuration: Configuration, work: Work, rates: Rates, device: Device, passes: Passes
) -> float:
    tokens, row = tokens_computed(configuration), configuration.policy.longest_seq or configuration.seq_len
    dims = dims_of(shape)
    kernel = attention_kernel(configuration, device, dims)
    if kernel.is_fused:
        seen = configuration.policy.document_tokens  # no token of packed rows sees another document
        width = row if seen is None or dims.masks_documents else min(row, seen)
        window = min(width, shape.sliding_window or width)
        keys = work.scored * width / 2 + work.scored_in_window * window * (1 - window / (2 * width))
        seconds = passes.attention * 4 * tokens * keys / rates.attention
        if kernel is AttentionKernel.EFFICIENT:
            seconds += passes.elementwise * tokens * _repeated_bytes(shape, configuration) / rates.memory
        return seconds
    if work.traced is not None:
        return 0.0  # among its products without weights
    scores = tokens * row * (work.scored + work.scored_in_window)
    moved = SCORE_BYTES * scores / shape.head_dim
    return passes.retained_scores * (4 * scores / rates.matmul + moved / rates.memory)


def _repeated_bytes(shape: ModelShape, configuration: Configuration) -> int:
    """Bytes that one token moves in one forward to repeat grouped key and value heads: read once, written for each."""
    dims = dims_of(shape)
    repeated = keys_and_values(dims, is_repeated=True)
    if repeated == 2 * dims.kv:
        return 0
    return shape.num_layers * configuration.strategy.precision.compute_bytes * (2 * dims.kv + repeated)


def _head_seconds(shape: ModelShape, configuration: Configuration, work: Work, rates: Rates, passes: Passes) -> float:
    tokens, width = tokens_computed(configuration), configuration.strategy.precision.compute_bytes / 2
    a_logit = _logit_bytes(configuration)
    a_weight, a_gradient = SLICE_WEIGHT_BYTES, SLICE_GRADIENT_BYTES
    if _is_liger(configuration):
        a_weight, a_gradient = LIGER_WEIGHT_BYTES, LIGER_GRADIENT_BYTES
    if passes.learns_head and (configuration.loss is LossHead.CHUNKED or _is_liger(configuration)):
        a_weight += a_gradient
    moved = a_logit * tokens * shape.vocab_size + width * a_weight * _num_slices(configuration, shape) * work.table
    return passes.head_products * 2.0 * tokens * work.table / rates.matmul + passes.head_bytes * moved / rates.memory


def _logit_bytes(configuration: Configuration) -> int:
    """Bytes through memory for each logit, in both directions."""
    stated = reference_of(configuration.reference).logit_bytes.get(configuration.loss)
    if stated is not None:
        return stated
    if _is_own_fused(configuration):
        return OWN_FUSED_LOGIT_BYTES
    is_compiled = configuration.compile and configuration.reference != SHARDWISE  # ours compiles blocks alone
    is_fused = is_compiled and configuration.loss is LossHead.EAGER
    return LOGIT_BYTES[LossHead.FUSED if is_fused else configuration.loss]


def _is_own_fused(configuration: Configuration) -> bool:
    return configuration.loss is LossHead.FUSED and configuration.reference == SHARDWISE


def _is_liger(configuration: Configuration) -> bool:
    loss = configuration.loss
    return loss is LossHead.FUSED_LINEAR and loss not in reference_of(configuration.reference).logits


def _num_slices(configuration: Configuration, shape: ModelShape) -> int:
    """Number of slices of the logits; each slice of `chunked` and `fused_linear` has a product of its own."""
    if _is_liger(configuration):
        tokens = tokens_computed(configuration)
        return math.ceil(tokens / liger_slice_tokens(tokens, hidden=shape.hidden_size, vocab=shape.vocab_size))
    if configuration.loss is not LossHead.CHUNKED:
        return 1
    return math.ceil(tokens_computed(configuration) / (configuration.loss_chunk_tokens or DEFAULT_SLICE_TOKENS))
