"""The kernel of PyTorch's attention, the same for the plan, the dry run, `probe --measure` and the ranks.

`scaled_dot_product_attention` has four kernels on CUDA and chooses by device, type and arguments (sdp_utils.cpp). A
rank narrows the choice until it is the one below (`trainer.runtime.attention.kernels`, checked before the first step):

    cuDNN       switched off, also on compute capability 9.0 and 10.x, where torch prefers it: docs/speed-model.md
    flash       16 bit without a mask, compute capability 8.0 or newer, heads of up to 256 elements
    efficient   every other call: fp32, older chips, a mask. It has no grouped heads, so key and value heads are
                repeated before it is called
    math        keeps the sequence x sequence scores; left only to a model that broadcasts its single key head itself

On a CPU the flash kernel supports every type, masks and grouped heads.
"""

from enum import StrEnum

from shardwise.trainer.spec.hardware import DeviceKind

FLASH_CAPABILITY = (8, 0)
MAX_FLASH_HEAD_DIM = 256


class AttentionKernel(StrEnum):
    """Implementation of attention; only `flash` and `efficient` store no sequence x sequence array."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"  # scaled_dot_product_attention without a fused kernel
    EAGER = "eager"  # transformers' own

    @property
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
