"""Precision policy: the dtype of every kind of tensor, the attention kernel and the casts, all of which decide bytes.

Ours, unless the setting names another stack (`stacks`) or says a value itself:

    none, ddp    a Hugging Face model in the type of its master weights; torch.autocast in mixed precision, which casts
                 every weight once (and caches the cast until the forward ends) and every input of a linear layer anew;
                 the residual stream stays fp32
    zero*        DeepSpeed's 16-bit engine: the whole model is 16 bit, masters are the engine's partition
    fsdp*, hsdp  FSDP2: shards in the type of the master weights, gathered in the computing type, gradients reduced in
                 the type of the master weights; the model sees 16 bit only
    lora, qlora  frozen base in the computing type, adapters in fp32 (16 bit where the whole precision is)

A value of this module is a function of the setting and the device alone; everything else in this package reads it.
"""

from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.dims import Dims, adapted_linears, adapter_parameters, adapts_all, dims_of
from shardwise.trainer.planning.memory.stacks import AdapterInputs, Stack, stack_of
from shardwise.trainer.planning.setting import OUR_STACK, Setting
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.attention_kernel import AttentionKernel, sdpa_kernel
from shardwise.trainer.spec.model.shape import Norm
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.value import Value

__all__ = [
    "Dims",
    "Recipe",
    "adapted_linears",
    "adapter_parameters",
    "adapts_all",
    "attention_kernel",
    "dims_of",
    "recipe_of",
    "shard_degree",
]


class Recipe(Value, frozen=True, kw_only=True):
    """Bytes an element of each kind of tensor has in a setting, and the degrees it is spread over."""

    stack: Stack
    tokens: int  # of a micro batch on a rank
    seq_len: int  # of its longest row, which the others are padded to
    is_packed: bool  # rows of several documents, with positions of their own
    master_bytes: int  # of a model weight, as the optimizer would see it
    trained_bytes: int  # of a weight that is trained: an adapter, or any
    reduce_bytes: int  # of a gradient while ranks add it up
    weight_bytes: int  # as the parameter is stored on the device
    compute_bytes: int  # input of a matrix product
    residual_bytes: int  # residual stream
    sum_bytes: int  # an element of a matrix product's result, beside the result until that is complete
    adapter_inputs: AdapterInputs
    replicates_adapters: bool
    is_autocast: bool
    has_fp32_products: bool  # of 4-bit layers, in the type of their input: after autocast's LayerNorm, or DoRA
    is_fused: bool  # norms keep their input only: fused kernels, or torch.compile
    is_compiled: bool
    is_checkpointed: bool
    updates_in_backward: bool  # each weight as soon as its gradient is there, which is then freed
    is_fp8: bool
    is_frozen: bool  # base weights are not trained
    uses_deepspeed: bool
    uses_fsdp: bool
    shard_degree: int  # ranks that share what is sharded
    kernel: AttentionKernel
    repeats_kv: bool  # attention is handed as many key and value heads as query heads
    is_cuda: bool
    is_hopper_or_later: bool


def recipe_of(setting: Setting, device: Device, dims: Dims) -> Recipe:
    """The recipe of a setting: as its stack does, unless the setting says otherwise."""
    stack, choices = stack_of(setting.stack), setting.recipe
    sharding, precision = setting.strategy.sharding, setting.strategy.precision
    compute, master = precision.compute_bytes, precision.master_bytes
    is_frozen = setting.method.freezes_base
    uses_deepspeed, uses_fsdp = sharding.uses_deepspeed, sharding.uses_fsdp
    is_mixed = precision not in (Precision.FP32, Precision.BF16)
    is_autocast = is_mixed and not uses_deepspeed and not uses_fsdp
    has_fp32_products = is_autocast and setting.method is Method.QLORA
    has_fp32_products = has_fp32_products and (dims.norm is Norm.LAYER or setting.lora.dora)
    fuses_adapters = stack.fuses_adapters and setting.method is Method.QLORA and setting.loss is not LossHead.EAGER
    replicates_adapters = fuses_adapters and uses_fsdp
    trained = master
    if is_frozen:
        trained = choices.adapter_bytes or (compute if replicates_adapters else stack.adapter_bytes or master)
    seq_len = choices.longest_seq or setting.seq_len
    kernel = attention_kernel(setting, device, dims)
    return Recipe(
        stack=stack,
        tokens=setting.micro_batch * choices.rows_per_example * seq_len,
        seq_len=seq_len,
        is_packed=choices.document_tokens is not None,
        master_bytes=master,
        trained_bytes=trained,
        reduce_bytes=choices.reduce_bytes or stack.reduce_bytes or trained,
        weight_bytes=compute if uses_deepspeed or is_frozen else master,
        compute_bytes=compute,
        residual_bytes=choices.residual_bytes
        or (4 if is_autocast and (not is_frozen or has_fp32_products) else compute),
        sum_bytes=4 if device.sums_bf16_apart and precision in (Precision.BF16_MIXED, Precision.BF16) else 0,
        has_fp32_products=has_fp32_products,
        adapter_inputs=AdapterInputs.FUSED
        if fuses_adapters
        else _adapter_inputs(
            stack,
            setting,
            is_autocast=is_autocast and _casts_adapter_inputs(setting, device, has_fp32_products=has_fp32_products),
        ),
        replicates_adapters=replicates_adapters,
        is_autocast=is_autocast,
        is_fused=setting.compile or (stack.has_fused_kernels and setting.loss is not LossHead.EAGER),
        is_compiled=setting.compile,
        is_checkpointed=setting.checkpointing is not Checkpointing.NONE,
        updates_in_backward=_updates_in_backward(setting),
        is_fp8=precision is Precision.FP8,
        is_frozen=is_frozen,
        uses_deepspeed=uses_deepspeed,
        uses_fsdp=uses_fsdp,
        shard_degree=shard_degree(setting),
        kernel=kernel,
        repeats_kv=_repeats_kv(setting, stack, kernel),
        is_cuda=device.kind is DeviceKind.CUDA,
        is_hopper_or_later=(device.compute_capability or (0, 0)) >= (9, 0),
    )


def _updates_in_backward(setting: Setting) -> bool:
    is_layerwise = setting.method is Method.GALORE and setting.galore.layerwise
    return setting.optimizer_in_backward or is_layerwise or setting.strategy.optimizer.facts.updates_in_backward


def _casts_adapter_inputs(setting: Setting, device: Device, *, has_fp32_products: bool) -> bool:
    """True if PEFT casts the input of an adapter to the adapter's dtype, so that autocast makes a copy for each.

    A 4-bit layer does so unless it sees autocast, and it looks for that of CUDA alone.
    """
    return setting.method is Method.LORA or has_fp32_products or device.kind is DeviceKind.CPU


def _adapter_inputs(stack: Stack, setting: Setting, *, is_autocast: bool) -> AdapterInputs:
    strategy = setting.strategy
    if strategy.sharding.uses_fsdp and strategy.precision is Precision.BF16 and stack.adapter_inputs_pure_fsdp:
        return stack.adapter_inputs_pure_fsdp
    # A 4-bit layer does not cast its adapter's input, which is 16 bit already unless a LayerNorm made it fp32.
    return stack.adapter_inputs or (AdapterInputs.AUTOCAST if is_autocast else AdapterInputs.SHARED)


def shard_degree(setting: Setting) -> int:
    """Ranks over which what a sharding shards is spread; hsdp shards inside a node."""
    sharding = setting.strategy.sharding
    if sharding.facts.shards_within_node:
        return max(1, min(setting.ranks_per_node, setting.num_ranks))
    return setting.num_ranks if sharding.shards_optimizer else 1


def attention_kernel(setting: Setting, device: Device, dims: Dims) -> AttentionKernel:
    """The kernel that runs, without an attention mask: rows are padded on the right and attention is causal.

    flash-attn 1.x takes 16 bit from compute capability 7.5. Where PyTorch's memory-efficient kernel runs, our runtime
    repeats grouped key and value heads for it; a program that does not is left the sequence x sequence path.
    """
    if setting.attention is Attention.EAGER:
        return AttentionKernel.EAGER
    if device.kind is DeviceKind.CPU:
        return AttentionKernel.FLASH
    if dims.broadcasts_heads and setting.attention is Attention.SDPA:
        return AttentionKernel.MATH
    is_16_bit = setting.strategy.precision is not Precision.FP32
    capability = device.compute_capability
    if setting.attention is Attention.FLASH and is_16_bit and (capability or (7, 5)) >= (7, 5):
        return AttentionKernel.FLASH
    head_dim = dims.query // dims.heads
    kernel = sdpa_kernel(device.kind, capability, is_16_bit=is_16_bit, head_dim=head_dim)
    repeats = setting.stack == OUR_STACK or stack_of(setting.stack).repeats_kv or dims.kv_heads == dims.heads
    return kernel if repeats or kernel is AttentionKernel.FLASH else AttentionKernel.MATH


def _repeats_kv(setting: Setting, stack: Stack, kernel: AttentionKernel) -> bool:
    return setting.attention is Attention.SDPA and (stack.repeats_kv or kernel is AttentionKernel.EFFICIENT)
