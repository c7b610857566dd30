"""The axes of a strategy, a strategy (one row of the catalogue), and the kernel of PyTorch's attention.

Every member's value is its one name everywhere: job file, plan.json, command line, prediction cases, docs, wandb.

The attention kernel is the same for the plan, the dry run, `probe --measure` and the ranks.

`scaled_dot_product_attention` has four kernels on CUDA and chooses by device, type and arguments (sdp_utils.cpp). A
rank narrows the choice until it is the one below (`trainer.runtime.attention`, checked before the first step):

    cuDNN       switched off, also on compute capability 9.0 and 10.x, where torch prefers it: docs/speed-model.md
    flash       16 bit without a mask, compute capability 8.0 or newer, heads of up to 256 elements
    efficient   every other call: fp32, older chips, a mask. It has no grouped heads, so key and value heads are
                repeated before it is called
    math        keeps the sequence x sequence scores; left only to a model that broadcasts its single key head itself

On a CPU the flash kernel supports every type, masks and grouped heads.
"""

from enum import StrEnum
from functools import cached_property

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.value import Value


class Method(StrEnum):
    """Training methods, from the most to the least faithful: the order in which `auto` tries them."""

    FULL = "full"
    GALORE = "galore"
    LORA = "lora"
    QLORA = "qlora"

    @cached_property
    def freezes_base(self) -> bool:
        return self in (Method.LORA, Method.QLORA)


class Quant(StrEnum):
    """Storage of the base weights of qlora; dq quantises the scales as well."""

    NF4 = "nf4"
    NF4_DQ = "nf4-dq"


class Precision(StrEnum):
    """Precision of weights and computation; mixed keeps fp32 master weights, bf16 keeps everything in bf16."""

    FP32 = "fp32"
    FP16_MIXED = "fp16-mixed"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"
    FP8 = "fp8"

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of one trained weight as the optimizer sees it."""
        return 2 if self is Precision.BF16 else 4

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes of one activation element in a matrix product's input."""
        return 4 if self is Precision.FP32 else 2


class Fp8Recipe(StrEnum):
    """Scaling of FP8 tensors."""

    DELAYED = "delayed"
    CURRENT = "current"
    BLOCK = "block"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    TORCHAO_TENSORWISE = "torchao_tensorwise"
    TORCHAO_ROWWISE = "torchao_rowwise"


class Checkpointing(StrEnum):
    """Activations that are recomputed in the backward pass instead of saved."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    EVERY_N = "every_n"
    ATTENTION = "attention"


class Attention(StrEnum):
    """flash = flash-attn's FlashAttention-2; sdpa = PyTorch's, whichever kernel it picks."""

    FLASH = "flash"
    SDPA = "sdpa"
    EAGER = "eager"


class LossHead(StrEnum):
    """Part of the logits that is alive at a time: all and upcast, all in place, a slice of tokens, none."""

    EAGER = "eager"
    CHUNKED = "chunked"
    FUSED = "fused"
    FUSED_LINEAR = "fused_linear"


class Strategy(Value, frozen=True, kw_only=True, cache_hash=True):
    """One row of the catalogue: where state lives, who updates it, in which precision.

    `base_config` names the file under ds_configs/ or fsdp_configs/ that this row fills, None where there is none.
    `is_exact` is true where the mathematics of AdamW in mixed precision is unchanged.
    """

    name: str
    sharding: Sharding
    offload: Offload
    optimizer: Optimizer
    precision: Precision
    is_exact: bool
    base_config: str | None = None

    @property
    def layout(self) -> tuple[Sharding, Offload]:
        return self.sharding, self.offload

    def is_exact_with(self, *, tf32: bool, optimizer_in_backward: bool) -> bool:
        """True if the settings change nothing either: TF32 rounds products, an update in the backward never clips."""
        return self.is_exact and not tf32 and not optimizer_in_backward


FLASH_CAPABILITY = (8, 0)
MAX_FLASH_HEAD_DIM = 256


class AttentionKernel(StrEnum):
    """Implementation of attention; only `flash` and `efficient` store no sequence x sequence array."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"  # scaled_dot_product_attention without a fused kernel
    EAGER = "eager"  # transformers' own

    @cached_property
    def is_fused(self) -> bool:
        return self in (AttentionKernel.FLASH, AttentionKernel.EFFICIENT)


def sdpa_kernel(
    kind: DeviceKind,
    compute_capability: tuple[int, int] | None,
    *,
    is_16_bit: bool,
    head_dim: int,
    is_masked: bool = False,
) -> AttentionKernel:
    """The fused kernel of a call; an unknown chip counts as a new one."""
    if kind is DeviceKind.CPU:
        return AttentionKernel.FLASH
    is_new = compute_capability is None or compute_capability >= FLASH_CAPABILITY
    supports_flash = is_new and is_16_bit and not is_masked and head_dim <= MAX_FLASH_HEAD_DIM
    return AttentionKernel.FLASH if supports_flash else AttentionKernel.EFFICIENT
