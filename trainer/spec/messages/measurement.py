"""Requests and answers of measuring processes, and the parts that are stored."""

from typing import Any

from trainer.spec.hardware import MeasuredRates
from trainer.spec.plan import Fp8Gain
from trainer.spec.strategy import Fp8Recipe
from trainer.spec.value import Value


class Measurement(Value, frozen=True, kw_only=True):
    """The figures of one device so far; a process that is stopped leaves those it had."""

    rates: MeasuredRates = MeasuredRates()
    notes: tuple[str, ...] = ()
    is_unfinished: bool = False  # its time was over first: it hangs, or the machine is slow


class GatherResult(Value, frozen=True, kw_only=True):
    """Result of an all-gather on one rank."""

    bytes_per_s: int  # each way through its device
    is_correct: bool


class Fp8GainRequest(Value, frozen=True, kw_only=True):
    """The request to time FP8: a model's config.json, the tokens of one micro batch, and the scaling recipe."""

    model_config: dict[str, Any]
    tokens: int
    recipe: Fp8Recipe = Fp8Recipe.CURRENT


class Fp8GainKey(Value, frozen=True, kw_only=True):
    """Conditions under which a timing of FP8 holds."""

    model_type: str
    layers: tuple[tuple[int, int, int], ...]  # (inputs, outputs, number in the model) of the blocks' linear layers
    device: str  # GPU catalogue or probe name
    recipe: Fp8Recipe
    tokens: int
    versions: dict[str, str]


class KeptFp8Gain(Value, frozen=True, kw_only=True):
    """A timing of FP8 as the cache holds it."""

    key: Fp8GainKey
    gain: Fp8Gain
