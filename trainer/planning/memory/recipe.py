"""What our runtime does that decides bytes: the type of every kind of tensor, the attention kernel, who casts what.

    none, ddp    a Hugging Face model in the type of its master weights; torch.autocast in mixed precision, which casts
                 every weight once (and caches the cast until the forward ends) and every input of a linear layer anew;
                 the residual stream stays fp32
    zero*        DeepSpeed's 16-bit engine: the whole model is 16 bit, masters are the engine's partition
    fsdp*, hsdp  FSDP2: shards in the type of the master weights, gathered in the computing type, gradients reduced in
                 the type of the master weights; the model sees 16 bit only
    lora, qlora  frozen base in the computing type, adapters in fp32 (16 bit where the whole precision is)

A value of this module is a function of the setting and the device alone; everything else in this package reads it.
"""

from enum import StrEnum
from functools import lru_cache

from trainer.planning.device import Device
from trainer.planning.setting import Setting
from trainer.spec.hardware import DeviceKind
from trainer.spec.model_shape import ModelShape
from trainer.spec.strategy import Attention, Method, Precision, Sharding
from trainer.spec.value import Value


class Kernel(StrEnum):
    """How attention is computed; only `flash` and `efficient` keep no sequence x sequence array."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"  # scaled_dot_product_attention without a fused kernel
    EAGER = "eager"  # transformers' own


class Dims(Value, frozen=True, kw_only=True):
    """The sizes of a model in elements, summed once for thousands of estimates."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    query: int
    kv: int
    is_tied: bool
    is_gated: bool
    has_qk_norm: bool
    linear: int  # weights of the linear layers of a block
    block: int
    embedding: int
    head: int  # 0 where tied
    parameters: int
    root: int  # parameters outside the blocks
    largest_tensor: int
    linears: tuple[tuple[str, int, int], ...]  # name, inputs, outputs


class Recipe(Value, frozen=True, kw_only=True):
    """Bytes an element of each kind of tensor has in a setting, and the degrees it is spread over."""

    tokens: int  # of a micro batch on a rank
    seq_len: int
    master_bytes: int  # as the optimizer sees it
    weight_bytes: int  # as the parameter is stored on the device
    compute_bytes: int  # input of a matrix product
    residual_bytes: int  # residual stream
    is_autocast: bool
    is_frozen: bool  # base weights are not trained
    uses_deepspeed: bool
    uses_fsdp: bool
    shard_degree: int  # ranks that share what is sharded
    kernel: Kernel
    is_cuda: bool
    is_hopper_or_later: bool


@lru_cache(maxsize=64)
def dims_of(shape: ModelShape) -> Dims:
    """The sizes that the formulas use."""
    linears = tuple((linear.name, linear.num_inputs, linear.num_outputs) for linear in shape.linears)
    return Dims(
        vocab=shape.vocab_size,
        hidden=shape.hidden_size,
        ffn=shape.ffn_size,
        layers=shape.num_layers,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        query=shape.query_size,
        kv=shape.kv_size,
        is_tied=shape.is_tied,
        is_gated=shape.is_gated,
        has_qk_norm=shape.norm_parameters_per_block > 2 * shape.hidden_size,
        linear=shape.linear_parameters_per_block,
        block=shape.parameters_per_block,
        embedding=shape.embedding_parameters,
        head=shape.head_parameters,
        parameters=shape.num_parameters,
        root=shape.num_parameters - shape.num_layers * shape.parameters_per_block,
        largest_tensor=max(shape.embedding_parameters, *(i * o for _, i, o in linears)),
        linears=linears,
    )


def recipe_of(setting: Setting, device: Device, dims: Dims) -> Recipe:
    """The recipe of our runtime for a setting."""
    sharding, precision = setting.strategy.sharding, setting.strategy.precision
    compute = precision.compute_bytes
    is_frozen = setting.method.freezes_base
    uses_deepspeed, uses_fsdp = sharding.uses_deepspeed, sharding.uses_fsdp
    is_mixed = precision not in (Precision.FP32, Precision.BF16)
    is_autocast = is_mixed and not uses_deepspeed and not uses_fsdp
    return Recipe(
        tokens=setting.micro_batch * setting.seq_len,
        seq_len=setting.seq_len,
        master_bytes=precision.master_bytes,
        weight_bytes=compute if uses_deepspeed or is_frozen else precision.master_bytes,
        compute_bytes=compute,
        residual_bytes=4 if is_autocast and not is_frozen else compute,
        is_autocast=is_autocast,
        is_frozen=is_frozen,
        uses_deepspeed=uses_deepspeed,
        uses_fsdp=uses_fsdp,
        shard_degree=shard_degree(setting),
        kernel=attention_kernel(setting, device, dims),
        is_cuda=device.kind is DeviceKind.CUDA,
        is_hopper_or_later=(device.compute_capability or (0, 0)) >= (9, 0),
    )


def shard_degree(setting: Setting) -> int:
    """Ranks over which what a sharding shards is spread; hsdp shards inside a node."""
    sharding = setting.strategy.sharding
    if sharding is Sharding.HSDP:
        return max(1, min(setting.ranks_per_node, setting.num_ranks))
    return setting.num_ranks if sharding.shards_optimizer else 1


def attention_kernel(setting: Setting, device: Device, dims: Dims) -> Kernel:
    """The kernel that runs, without an attention mask: rows are padded on the right and attention is causal.

    PyTorch's flash kernel takes 16 bit from compute capability 8.0; its memory-efficient one takes fp32 and older
    chips but no grouped key and value heads, for which the sequence x sequence path remains.
    """
    if setting.attention is Attention.EAGER:
        return Kernel.EAGER
    if device.kind is DeviceKind.CPU:
        return Kernel.FLASH
    is_16_bit = setting.strategy.precision is not Precision.FP32
    if is_16_bit and (device.compute_capability is None or device.compute_capability >= (8, 0)):
        return Kernel.FLASH
    return Kernel.EFFICIENT if dims.kv_heads == dims.heads else Kernel.MATH


def adapter_parameters(setting: Setting, dims: Dims) -> int:
    """Elements of the low-rank adapters of one block; 0 where the method has none."""
    if setting.method not in (Method.LORA, Method.QLORA):
        return 0
    return sum(setting.lora.rank * (i + o) for _, i, o in adapted_linears(setting, dims))


def adapted_linears(setting: Setting, dims: Dims) -> tuple[tuple[str, int, int], ...]:
    """The linear layers of a block that carry an adapter."""
    targets = setting.lora.targets
    if targets == ("all-linear",):
        return dims.linears
    return tuple(linear for linear in dims.linears if linear[0] in targets)
