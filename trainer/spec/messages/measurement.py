"""Requests and answers of measuring processes, and the parts that are stored.

Facts about the installed torch and the GPUs it sees, read in a separate process.
"""

from typing import Any

from shardwise.trainer.spec.hardware import MeasuredRates
from shardwise.trainer.spec.plan import Fp8Gain
from shardwise.trainer.spec.strategy import Fp8Recipe
from shardwise.trainer.spec.value import Value


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


class DeviceTrial(Value, frozen=True, kw_only=True):
    """Result of allocating and multiplying on a device."""

    problem: str | None = None  # the first line of what torch raised; None: it works
    is_out_of_memory: bool = False


class TorchFacts(Value, frozen=True, kw_only=True):
    """The answer of `python -m shardwise.trainer.runtime.tools.torch_check`."""

    version: str
    cuda: str | None  # that torch was built for; None: a build for the CPU
    architectures: tuple[str, ...] = ()  # that it has code for; empty: torch does not say
    devices: tuple[DeviceTrial, ...] = ()  # that torch sees, in the order of CUDA_VISIBLE_DEVICES
    expands_segments: bool | None = None  # whether the trials' memory came from expandable segments; None: not known
    problem: str | None = None  # what torch raised when CUDA was to be initialised
