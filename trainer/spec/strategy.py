"""The axes of a strategy, and a strategy: one row of the catalogue.

Every member's value is its one name everywhere: job file, plan.json, command line, prediction cases, docs, wandb.
"""

from enum import StrEnum

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.value import Value


class Method(StrEnum):
    """Training methods, from the most to the least faithful: the order in which `auto` tries them."""

    FULL = "full"
    GALORE = "galore"
    LORA = "lora"
    QLORA = "qlora"

    @property
    def freezes_base(self) -> bool:
        return self in (Method.LORA, Method.QLORA)


class Quant(StrEnum):
    """How the base weights of qlora are stored; dq quantises the scales as well."""

    NF4 = "nf4"
    NF4_DQ = "nf4-dq"


class Precision(StrEnum):
    """Of weights and computation; mixed keeps fp32 master weights, bf16 keeps everything in bf16."""

    FP32 = "fp32"
    FP16_MIXED = "fp16-mixed"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def master_bytes(self) -> int:
        """Bytes of one trained weight as the optimizer sees it."""
        return 2 if self is Precision.BF16 else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element in a matrix product's input."""
        return 4 if self is Precision.FP32 else 2


class Fp8Recipe(StrEnum):
    """How FP8 scales are found."""

    DELAYED = "delayed"
    CURRENT = "current"
    BLOCK = "block"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    TORCHAO_TENSORWISE = "torchao_tensorwise"
    TORCHAO_ROWWISE = "torchao_rowwise"


class Checkpointing(StrEnum):
    """Which activations are recomputed in the backward pass instead of saved."""

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
    """How much of the logits is ever alive: all and upcast, all in place, a slice of tokens, none."""

    EAGER = "eager"
    CHUNKED = "chunked"
    FUSED = "fused"
    FUSED_LINEAR = "fused_linear"


class Strategy(Value, frozen=True, kw_only=True):
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
