"""The time of one optimizer step in closed form: a roofline per kind of work, added up with imperfect overlap.

T tokens of a micro batch, i x o a linear layer, r the share of a block that is computed again, w = 1 where base
weights are trained, R and M the rates of matrix products and of memory (`speed_rates`):

    both(a, b)  a + b - overlap * min(a, b): two activities on different resources, the shorter hides imperfectly
    linear      sum over matrices (2 + r + w) * both(2 T i o / R, 2 (T (i + o) + i o) / M)
    attention   (3.5 + [r = 1]) * 4 T s heads head_dim / 2 / A          backward is 2.5 forwards; half for causality
    elementwise (3 + [r > 0]) * T * bytes a token / M
    head        (2 + w [+ 1 chunked]) * 2 T h V / R + (bytes a logit * T V + 6 V h) / M
    host        layers * operators * (3 + [r > 0]) * time an operator
    micro batch both(both(device, host), collectives + offload)
    step        accumulation * micro batch + collectives of the step + optimizer + a constant

Collectives: FSDP gathers what it needs for each micro batch and reduces with the last one; ZeRO-2 and 3 reduce with
each; DDP and ZeRO-1 once a step. Constants and their errors are in `speed_rates` and docs/speed-model.md.

Not covered: rows shorter than seq_len, data loading, evaluation and checkpoints, mixed fabrics inside a node,
throttling, memory pressure (a plan keeps its margin, so it never runs there).
"""

from trainer.planning.device import Device
from trainer.planning.memory.recipe import Dims, Kernel, adapter_parameters, attention_kernel, dims_of
from trainer.planning.setting import Setting
from trainer.planning.speed_rates import Rates, rates_of, speed_notes
from trainer.planning.speed_work import (
    LOGIT_BYTES,
    adapters,
    elementwise_bytes,
    operators,
    optimizer_bytes_per_parameter,
    recomputation,
)
from trainer.spec.hardware import DeviceKind
from trainer.spec.model_shape import ModelShape
from trainer.spec.plan import SpeedEstimate
from trainer.spec.strategy import LossHead, Method, Offload, Precision, Sharding

__all__ = ["estimate_speed", "flops_per_token", "speed_notes"]

OVERLAP = 0.492  # fitted: share of the shorter of two concurrent activities that hides
OPERATOR_S = 33.7e-6  # fitted: host time of one operator in Python and autograd, not of a kernel launch
CPU_OPERATOR_S = 8e-6
STEP_S = 0.020  # host time of a step outside micro batches
CPU_STEP_S = 0.005
HOP_S = 5e-6  # latency of a collective, per rank
HOST_ADAM_BYTES_PER_S = 100e9  # of a node, where the CPU updates offloaded state; 28 B a parameter
NVME_BYTES_PER_S = 6e9


def flops_per_token(shape: ModelShape, seq_len: int, method: Method) -> float:
    """FLOPs that a training token is said to take: 6 N + 12 L q s, N parameters, q heads x head_dim, s tokens a row.

    The convention of llm-foundry and torchtitan: N includes embeddings, attention counts as if it were not causal,
    recomputation does not count. A frozen base needs no gradient of its weights: 4 N + 12 L q s.
    """
    per_parameter, dims = 4.0 if method.freezes_base else 6.0, dims_of(shape)
    return per_parameter * dims.parameters + 12.0 * dims.layers * dims.query * seq_len


def estimate_speed(shape: ModelShape, setting: Setting, device: Device) -> SpeedEstimate:
    """Seconds of one optimizer step of `setting`, by part; the parts sum to the step."""
    dims, rates = dims_of(shape), rates_of(setting, device)
    is_cpu = device.kind is DeviceKind.CPU
    trained = dims.layers * adapter_parameters(setting, dims) if setting.method.freezes_base else dims.parameters
    busy = _device_seconds(setting, dims, rates, device)
    host = _host_seconds(setting, dims, CPU_OPERATOR_S if is_cpu else OPERATOR_S)
    wire, wire_step = _collective_seconds(setting, dims, rates, trained)
    moved, moved_step = _offload_seconds(setting, dims, rates, trained)
    computing = busy + host if is_cpu else _both(busy, host)
    micro = _both(computing, wire + moved)
    exposed = micro - computing
    on_wire = exposed * wire / (wire + moved) if wire + moved else 0.0
    copies = _activation_copies(setting, dims, rates)
    waits = max(0.0, copies - micro)
    accumulation = setting.accumulation
    parts = {
        "compute_s": accumulation * busy,
        "host_s": accumulation * (computing - busy),
        "communication_s": accumulation * on_wire + _both(computing, wire_step) - computing,
        "offload_s": accumulation * (exposed - on_wire + waits) + moved_step,
        "optimizer_s": _optimizer_seconds(setting, rates, trained),
        "overhead_s": CPU_STEP_S if is_cpu else STEP_S,
    }
    step_s = sum(parts.values())
    return _estimate(shape, setting, device, parts, step_s)


def _estimate(
    shape: ModelShape, setting: Setting, device: Device, parts: dict[str, float], step_s: float
) -> SpeedEstimate:
    flops = flops_per_token(shape, setting.seq_len, setting.method)
    rate = setting.accumulation * setting.tokens_per_micro_batch / step_s
    peak = device.peak_flops_per_s.get(setting.strategy.precision)
    return SpeedEstimate(
        parts=parts,
        step_s=step_s,
        tokens_per_s_per_gpu=rate,
        flops_per_token=flops,
        peak_flops_per_s=None if peak is None else float(peak),
        mfu=None if peak is None else rate * flops / peak,
    )


def _both(a: float, b: float) -> float:
    return a + b - OVERLAP * min(a, b)


def _device_seconds(setting: Setting, dims: Dims, rates: Rates, device: Device) -> float:
    """Time of one micro batch on the device: forward, recomputation and backward."""
    tokens, precision = setting.tokens_per_micro_batch, setting.strategy.precision
    again, learns = recomputation(setting), not setting.method.freezes_base
    forwards = 3 + (again > 0)
    passes = 2 + again + learns
    width = precision.compute_bytes
    seconds = bytes_moved = 0.0
    for _, inputs, outputs in dims.linears:
        weight = inputs * outputs
        traffic = width * (tokens * (inputs + outputs) + weight)
        seconds += passes * _both(2 * tokens * weight / rates.linear, traffic / rates.memory)
        if precision is Precision.FP8:  # casts of input, output gradient and weight
            bytes_moved += 2 * traffic
    if setting.method is Method.QLORA:  # four bits in, sixteen out
        bytes_moved += (2 + again) * 2.5 * dims.linear
    if setting.method.freezes_base:
        sizes = sum(i + o for _, i, o in adapters(setting, dims))
        seconds += (3 + again) * 2 * tokens * setting.lora.rank * sizes / rates.matmul
    bytes_moved += forwards * tokens * elementwise_bytes(setting, dims, width)
    scores = 4.0 * tokens * setting.seq_len * dims.query
    if attention_kernel(setting, device, dims) in (Kernel.FLASH, Kernel.EFFICIENT):
        seconds += (3.5 + (again == 1)) * scores / 2 / rates.attention
    else:
        seconds += (3 + again) * scores / rates.matmul
        bytes_moved += (3 + again) * tokens * setting.seq_len * dims.heads * 14
    return dims.layers * (seconds + bytes_moved / rates.memory) + _head_seconds(setting, dims, rates, learns=learns)


def _head_seconds(setting: Setting, dims: Dims, rates: Rates, *, learns: bool) -> float:
    tokens, table = setting.tokens_per_micro_batch, dims.embedding
    products = 2 + learns + (setting.loss is LossHead.CHUNKED)
    moved = LOGIT_BYTES[setting.loss] * tokens * dims.vocab + 6 * table
    return products * 2.0 * tokens * table / rates.matmul + moved / rates.memory


def _host_seconds(setting: Setting, dims: Dims, per_operator: float) -> float:
    return dims.layers * operators(setting, dims) * (3 + (setting.checkpointing != "none")) * per_operator


def _collective_seconds(setting: Setting, dims: Dims, rates: Rates, trained: int) -> tuple[float, float]:
    """Seconds of collectives (of each micro batch, of each step)."""
    num_ranks, sharding = setting.num_ranks, setting.strategy.sharding
    if num_ranks == 1 or sharding is Sharding.NONE:
        return 0.0, 0.0
    if sharding is Sharding.HSDP:
        return _hybrid_seconds(setting, dims, rates, trained)
    share, latency = (num_ranks - 1) / num_ranks, (dims.layers + 1) * num_ranks * HOP_S
    gradients = _reduced_bytes(setting, trained) * share / rates.link
    gathered = _gathered_bytes(setting, dims) * share / rates.link
    learns = not setting.method.freezes_base
    if sharding is Sharding.ZERO3:
        return 2 * gathered + gradients + (2 + learns) * latency, 0.0
    if sharding is Sharding.FSDP:
        return 2 * (gathered + latency), gradients + latency
    if sharding is Sharding.FSDP_GRAD_OP:
        return gathered + latency, gradients + latency
    if sharding is Sharding.ZERO2:
        weights = trained * setting.strategy.precision.compute_bytes * share / rates.link
        return gradients + latency, weights
    return 0.0, 2 * gradients + latency


def _hybrid_seconds(setting: Setting, dims: Dims, rates: Rates, trained: int) -> tuple[float, float]:
    """Full sharding inside a node, one all-reduce of the shards across nodes."""
    inside = min(setting.ranks_per_node, setting.num_ranks)
    share, latency = (inside - 1) / inside, (dims.layers + 1) * inside * HOP_S
    gathered = _gathered_bytes(setting, dims) * share / rates.inner_link
    gradients = _reduced_bytes(setting, trained)
    across = 2 * gradients / inside / rates.link if setting.num_ranks > inside else 0.0
    return 2 * (gathered + latency), gradients * share / rates.inner_link + latency + across


def _gathered_bytes(setting: Setting, dims: Dims) -> float:
    width = 0.52 if setting.method is Method.QLORA else float(setting.strategy.precision.compute_bytes)
    tables = dims.embedding + dims.head
    return dims.layers * dims.linear * width + tables * setting.strategy.precision.compute_bytes


def _reduced_bytes(setting: Setting, trained: int) -> float:
    """Gradients travel in fp32 but where everything is bf16."""
    return trained * (2.0 if setting.strategy.precision is Precision.BF16 else 4.0)


def _offload_seconds(setting: Setting, dims: Dims, rates: Rates, trained: int) -> tuple[float, float]:
    """PCIe, the host's optimizer and NVMe: seconds (of each micro batch, of each step)."""
    offload = setting.strategy.offload
    if offload is Offload.NONE:
        return 0.0, 0.0
    mine = trained / (setting.num_ranks if setting.strategy.sharding.shards_optimizer else 1)
    on_node = mine * min(setting.ranks_per_node, setting.num_ranks)
    micro, step = 2.0 * mine / rates.pcie, mine * 2 / rates.pcie + 28 * on_node / HOST_ADAM_BYTES_PER_S
    if offload.moves_parameters:
        micro += 2 * _gathered_bytes(setting, dims) / setting.num_ranks / rates.pcie
    if offload.uses_nvme:
        step += 2 * 12 * on_node / NVME_BYTES_PER_S
    return micro, step


def _activation_copies(setting: Setting, dims: Dims, rates: Rates) -> float:
    """Block inputs to the host and back, by copy engines beside the computation."""
    if not setting.activation_offload:
        return 0.0
    width = setting.strategy.precision.compute_bytes
    return 2.0 * width * setting.tokens_per_micro_batch * dims.hidden * dims.layers / rates.pcie


def _optimizer_seconds(setting: Setting, rates: Rates, trained: int) -> float:
    if setting.strategy.offload is not Offload.NONE:
        return 0.0
    degree = setting.num_ranks if setting.strategy.sharding.shards_optimizer else 1
    per_parameter = optimizer_bytes_per_parameter(setting, setting.strategy.precision.master_bytes)
    return trained / degree * per_parameter / rates.memory
