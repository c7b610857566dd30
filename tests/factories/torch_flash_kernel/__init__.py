"""A kernel as the hub has them, written in PyTorch: the functions of FlashAttention 2 that training calls."""

from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
