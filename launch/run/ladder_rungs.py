"""The rungs of the ladder: which settings each one switches on, over those of the rungs before it.

A rung is written as it would be in a job file: `bf16-mixed` is `pin.precision=bf16-mixed`, `lora` is
`train.method=lora`, `compile` is `pin.compile=true`. What several settings are called (`eager`, `none`) is written with
its name, `loss=eager`, and so is what has no name of its own: `train.lora.rank=8`. A `+` joins what is one rung.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from trainer.spec.errors import InputError
from trainer.spec.hardware import Hardware
from trainer.spec.nearest import close_matches
from trainer.spec.strategy import (
    Attention,
    Checkpointing,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
)
from trainer.spec.value import Value

METHOD = "train.method"
GROUND = {
    "pin.precision": "fp32",
    "pin.checkpointing": "none",
    "pin.attention": "eager",
    "pin.loss": "eager",
    "pin.optimizer": "adamw",
    "pin.offload": "none",
    METHOD: "full",
}
# In this order a value that two settings have is the first one's: `full` is of checkpointing, where the ladder starts
# from the method of that name anyway.
_VALUES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("pin.precision", Precision),
    ("pin.checkpointing", Checkpointing),
    ("pin.attention", Attention),
    ("pin.loss", LossHead),
    ("pin.optimizer", Optimizer),
    ("pin.sharding", Sharding),
    ("pin.offload", Offload),
    (METHOD, Method),
)
_SWITCHES = ("compile", "activation_offload", "optimizer_in_backward")
_AMBIGUOUS = ("eager", "none")
_SECTIONS = ("pin.", METHOD, "train.lora.", "train.galore.")  # what leaves batch, data and seed as they are


class Rung(Value, frozen=True, kw_only=True):
    """One more technique: its name, and what it sets."""

    name: str
    settings: dict[str, str]  # by their paths in the job file


def parse_rungs(text: str) -> tuple[Rung, ...]:
    """The rungs of `a,b,c`; InputError for a word that is no setting's value."""
    names = [name.strip() for name in text.split(",")]
    return tuple(Rung(name=name, settings=dict(map(_setting_of, name.split("+")))) for name in names)


def default_rungs(hardware: Hardware) -> tuple[Rung, ...]:
    """The order of the tutorials; 16 bit is what the cards compute in."""
    capabilities = [gpu.compute_capability for gpu in hardware.gpus if gpu.compute_capability is not None]
    half = Precision.FP16_MIXED if capabilities and min(capabilities) < (8, 0) else Precision.BF16_MIXED
    return parse_rungs(f"fp32,{half},full,sdpa,flash,chunked,adamw_8bit,lora,qlora")


def _setting_of(word: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in word.partition("="))
    if equals:
        return _named(name), value
    if name in _AMBIGUOUS:
        examples = " or ".join(f"{key.removeprefix('pin.')}={name}" for key, kind in _VALUES if name in _words(kind))
        raise InputError(f"--rungs: {name} could be of several settings; write {examples}")
    if name in _SWITCHES:
        return f"pin.{name}", "true"
    for key, kind in _VALUES:
        if name in _words(kind):
            return key, name
    meant = close_matches(name, _known())
    hint = f"did you mean {meant[0]}?" if meant else "a rung is a value of a pin, such as bf16-mixed, full, chunked"
    raise InputError(f"--rungs: {name!r} is not a technique; {hint}")


def _named(name: str) -> str:
    """The path of a setting that is named, with or without its section."""
    pins = [key for key, _ in _VALUES]
    path = name if "." in name else next((key for key in pins if key.endswith(f".{name}")), f"pin.{name}")
    if not path.startswith(_SECTIONS):
        raise InputError(f"--rungs: {name} cannot be a rung: batch, data and seed are the same on all of them")
    return path


def _known() -> Iterator[str]:
    for _, kind in _VALUES:
        yield from _words(kind)
    yield from _SWITCHES


def _words(kind: type[StrEnum]) -> Sequence[str]:
    return [member.value for member in kind]
