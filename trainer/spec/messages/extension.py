"""A user's own Python file, as a plan names it: which functions of it are called, and the content that was agreed to.

    format_row(row)              a row of a source as it was read, to a row of a known shape; None skips it
    build_model(config, dtype)   the model to train, a transformers causal LM with its weights
    loss(logits, labels)         sum of the losses of a micro batch: logits [B, S, V], labels [B, S], unshifted
    on_step(step, metrics)       after every step, on the first rank, with what metrics.jsonl gets

Each is optional. The file is the one that `extensions` of the job file names on this machine: none is ever taken from a
checkpoint, a model's folder or the hub. A run keeps a copy, and runs it only while its SHA-256 is the planned one.
"""

from enum import StrEnum

from shardwise.trainer.spec.value import Value


class Hook(StrEnum):
    """A function that an extensions file may have."""

    FORMAT_ROW = "format_row"
    BUILD_MODEL = "build_model"
    LOSS = "loss"
    ON_STEP = "on_step"


# Arguments that each is called with, by position.
ARGUMENTS: dict[Hook, tuple[str, ...]] = {
    Hook.FORMAT_ROW: ("row",),
    Hook.BUILD_MODEL: ("config", "dtype"),
    Hook.LOSS: ("logits", "labels"),
    Hook.ON_STEP: ("step", "metrics"),
}


class Extension(Value, frozen=True, kw_only=True):
    """The file of one job."""

    path: str  # absolute
    sha256: str
    hooks: tuple[Hook, ...]
