"""Time of one micro batch on the device and on the host that feeds it.

T tokens with padding, i x o a linear layer, r the share of a block that is computed again, w = 1 where base weights
are trained, s the length of a row, R, A and M the rates of products, attention and memory:

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

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.activations import FUSED_SLICE_TOKENS
from shardwise.trainer.planning.memory.precision_policy import attention_kernel, dims_of
from shardwise.trainer.planning.memory.saved_tensors import keys_and_values
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.speed.constants import reference_speed_of
from shardwise.trainer.planning.speed.rates import Rates
from shardwise.trainer.planning.speed.work import (
    LOGIT_BYTES,
    OWN_FUSED_LOGIT_BYTES,
    SLICE_GRADIENT_BYTES,
    SLICE_OPERATORS,
    SLICE_WEIGHT_BYTES,
    TILE_TOKENS,
    Adapters,
    Work,
    elementwise_bytes,
    is_autocast,
    operators,
    recomputation,
    tokens_computed,
    weight_norm_bytes,
)
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.strategy import AttentionKernel, Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.value import Value

DEFAULT_SLICE_TOKENS = 1024
_CAST_BYTES = 6  # of a weight that autocast casts, and of its gradient on the way back
# Selective checkpointing asks Python about every operator of a block, in the forward and when it runs again (torch's
# SelectiveCheckpointContext, a TorchDispatchMode), whatever the device. Llama blocks 64 wide on a CPU, torch 2.13,
# processor time of a step by that of one without recomputation: 2.2 to 2.6 under `full`, 4.2 to 4.9 under `selective`,
# which is 5.9 to 7.1 forwards more on that CPU.
SELECTIVE_OPERATOR_S = 6 * constants.CPU_OPERATOR_S
SCORE_BYTES = 14  # through memory, of a score that is kept: products, mask, softmax, cast


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
    width = precision.compute_bytes
    seconds = bytes_moved = 0.0
    for group in work.linears:
        weight, sent = group.inputs * group.outputs, tokens * group.num_used
        read = min(group.num_copies, sent) * weight
        rows = sent if group.num_copies == 1 else sent + group.num_copies * TILE_TOKENS / 2
        traffic = width * (sent * (group.inputs + group.outputs) + read)
        seconds += group.num_layers * passes.products * both(2 * rows * weight / rates.linear, traffic / rates.memory)
        if precision is Precision.FP8 and device.measured_fp8_speedup is None:
            # Casts of input, output gradient and weight; a speed-up of whole layers has them in it.
            bytes_moved += group.num_layers * 2 * traffic
    if configuration.method is Method.QLORA:  # four bits in, sixteen out
        bytes_moved += (passes.products) * 2.5 * work.linear_parameters
    if adapters.count:
        seconds += passes.adapter_products * 2 * tokens * configuration.lora.rank * adapters.sizes / rates.matmul
        if configuration.lora.dora:  # both matrices times an identity matrix, to no gradient
            products = 2 * configuration.lora.rank * (adapters.squares + adapters.weights)
            seconds += passes.weight_norms * products / rates.matmul
            bytes_moved += passes.weight_norms * weight_norm_bytes(configuration, adapters)
    if is_autocast(configuration) and not configuration.method.freezes_base:
        bytes_moved += _CAST_BYTES * passes.products * work.linear_parameters
    bytes_moved += passes.elementwise * tokens * elementwise_bytes(configuration, work, adapters)
    seconds += _attention_seconds(shape, configuration, work, rates, device, passes)
    return seconds + bytes_moved / rates.memory + _head_seconds(shape, configuration, work, rates, passes)


def host_seconds(configuration: Configuration, work: Work, adapters: Adapters, *, is_cpu: bool) -> float:
    """Seconds the host takes to start the operators of one micro batch."""
    an_operator = constants.CPU_OPERATOR_S if is_cpu else constants.OPERATOR_S
    in_blocks, slices = operators(configuration, work, adapters), _num_slices(configuration)
    if _is_own_fused(configuration):
        slices = math.ceil(tokens_computed(configuration) / FUSED_SLICE_TOKENS)
    seconds = an_operator * ((3 + (recomputation(configuration) > 0)) * in_blocks + SLICE_OPERATORS * (slices - 1))
    if (
        configuration.checkpointing is Checkpointing.SELECTIVE
        and configuration.reference == SHARDWISE
        and not configuration.compile
    ):
        seconds += SELECTIVE_OPERATOR_S * in_blocks
    return seconds


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
    a_logit = OWN_FUSED_LOGIT_BYTES if _is_own_fused(configuration) else LOGIT_BYTES[configuration.loss]
    if configuration.loss is LossHead.EAGER:
        fused = LOGIT_BYTES[LossHead.FUSED] if configuration.compile else None
        a_logit = reference_speed_of(configuration.reference).eager_logit_bytes or fused or a_logit
    a_weight = SLICE_WEIGHT_BYTES
    if configuration.loss is LossHead.CHUNKED and passes.learns_head:
        a_weight += SLICE_GRADIENT_BYTES
    moved = a_logit * tokens * shape.vocab_size + width * a_weight * _num_slices(configuration) * work.table
    return passes.head_products * 2.0 * tokens * work.table / rates.matmul + passes.head_bytes * moved / rates.memory


def _is_own_fused(configuration: Configuration) -> bool:
    return configuration.loss is LossHead.FUSED and configuration.reference == SHARDWISE


def _num_slices(configuration: Configuration) -> int:
    """Of logits; those of `chunked` are products of their own."""
    if configuration.loss is not LossHead.CHUNKED:
        return 1
    return math.ceil(tokens_computed(configuration) / (configuration.loss_chunk_tokens or DEFAULT_SLICE_TOKENS))
