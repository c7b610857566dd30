"""Properties of a reference trainer that affect only time; those that affect memory are in `memory.stacks`.

A stack without a row answers as ours does. Every value is read from the program's source, none is fitted.
"""

from shardwise.trainer.spec.value import Value


class SpeedStack(Value, frozen=True, kw_only=True):
    """One row; every default is what our runtime does."""

    source: str
    flash_generation: int = 2  # of FlashAttention, under `flash` and `sdpa`
    eager_logit_bytes: int | None = None  # of `eager`, through memory; None: as transformers' loss
    wraps_adapters: bool = False  # each matrix of an adapter is a unit of FSDP: gathered and reduced by itself


OURS = SpeedStack(source="trainer/runtime: FSDP2 units are blocks")
_ROWS = {
    # PEFT's fsdp_auto_wrap_policy makes a unit of every module without children whose weight is trained.
    **dict.fromkeys(
        ("hf-trainer", "trl", "axolotl", "llama-factory"),
        SpeedStack(source="peft utils/other.py, fsdp_auto_wrap_policy", wraps_adapters=True),
    ),
    "fsdp_qlora": SpeedStack(source="fsdp_qlora train.py, get_wrapping_policy: the same policy", wraps_adapters=True),
    "llm-foundry": SpeedStack(
        source="llm-foundry 0.1 to 0.3: flash-attn 1.0, whose cross-entropy replaces torch's",
        flash_generation=1,
        eager_logit_bytes=14,
    ),
}


def speed_stack_of(name: str) -> SpeedStack:
    """The row of a stack; our own where there is none."""
    return _ROWS.get(name, OURS)
