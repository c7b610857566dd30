"""The input of the rules, a strategy with the settings that are fixed so far, and incompatibilities as data.

An incompatibility is between two settings, or a setting and hardware: a name, a test, the reason, the alternative, and
the evidence, a measurement or a source, issue or paper. The tables are in `incompatible`. The planner applies them to
every strategy and to the pins of a job, `shardwise estimate` to every case, and `benchmarks/support_matrix.py` to every
pair of values, so the documents agree with the program.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from operator import attrgetter

from shardwise.trainer.planning.configuration import Configuration, group_sizes
from shardwise.trainer.planning.device import Device
from shardwise.trainer.spec.engines import Offload, shardings_with
from shardwise.trainer.spec.fp8 import DEFAULT_RECIPES, FP8_RECIPES
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.kinds import one_of
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.packages import extra_lines
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Strategy
from shardwise.trainer.spec.value import Value


class RuleInput(Value, frozen=True, kw_only=True):
    """A strategy with method, machine and settings; None or False: not fixed, which breaks no rule."""

    strategy: Strategy
    method: Method
    num_ranks: int
    device: Device
    shape: ModelShape
    accumulation: int | None = None
    checkpointing: Checkpointing | None = None
    attention: Attention | None = None
    loss: LossHead | None = None
    compile: bool = False
    fused_kernels: bool = False
    activation_offload: bool = False
    optimizer_in_backward: bool = False
    fp8_recipe: Fp8Recipe | None = None
    shard_group: int | None = None
    reduce_every_micro_batch: bool = False
    embedding_on_host: bool = False
    prefetch_two_blocks: bool = False
    fused_adapters: bool = False
    compiled_head: bool = False
    lora: LoraJob = LoraJob()
    galore: GaloreJob = GaloreJob()
    router_aux_loss: float | None = None
    libraries: frozenset[str] | None = None  # names as on the package index; None: unknown, assumed to be complete
    cpu_flags: frozenset[str] | None = None  # of the host; None: unknown, assumed to be complete
    trusts_unknown_cards: bool = False  # a card of unknown compute capability is assumed to support everything

    @property
    def is_cpu(self) -> bool:
        return self.device.kind is DeviceKind.CPU

    @property
    def backward_update(self) -> str | None:
        """The setting that updates weights during the backward pass, as a job file spells it, or None."""
        if self.optimizer_in_backward:
            return "optimizer_in_backward"
        if self.strategy.optimizer.facts.updates_in_backward:
            return f"optimizer: {self.strategy.optimizer}"
        return "layerwise" if self.method is Method.GALORE and self.galore.layerwise else None

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes that a group of hybrid sharding may have on this machine."""
        return group_sizes(self.num_ranks, self.device.devices_per_node)

    @property
    def tile(self) -> int:
        """The number that both dimensions of a weight must be a multiple of for FP8."""
        return FP8_RECIPES[self.fp8_recipe or DEFAULT_RECIPES[0]].tile

    def capability_below(self, least: tuple[int, int]) -> bool:
        """True if the GPU is older; False on a CPU."""
        unknown = (99, 0) if self.trusts_unknown_cards else (0, 0)
        return not self.is_cpu and (self.device.compute_capability or unknown) < least

    def lacks(self, library: str) -> bool:
        """True if a package is known not to be installed."""
        return self.libraries is not None and library not in self.libraries

    def lacks_flag(self, flag: str) -> bool:
        """True if the CPU is known to lack an instruction set."""
        return self.cpu_flags is not None and flag not in self.cpu_flags


def rule_input_of(
    configuration: Configuration,
    shape: ModelShape,
    device: Device,
    *,
    libraries: frozenset[str] | None = None,
    trusts_unknown_cards: bool = False,
) -> RuleInput:
    """A configuration with model and device: everything is fixed but the host, except for `libraries`."""
    return RuleInput(
        **dict(zip(_SHARED_FIELDS, _SHARED_OF(configuration), strict=True)),
        device=device,
        shape=shape,
        libraries=libraries,
        trusts_unknown_cards=trusts_unknown_cards,
    )


_SHARED_FIELDS = tuple(name for name in RuleInput.__struct_fields__ if name in Configuration.__struct_fields__)
_SHARED_OF = attrgetter(*_SHARED_FIELDS)


class Reach(IntEnum):
    """The software that an incompatibility applies to."""

    PLANNER = 0  # ours runs it, and something else is better in every respect
    OURS = 1  # our runtime; other software may
    ALL = 2  # all software: the arithmetic, the chip, or the only library that has the feature


class Incompatibility(Value, frozen=True, kw_only=True):
    """Two incompatible settings, or a setting and hardware; `PLACEHOLDERS` are filled into its texts."""

    name: str
    is_broken: Callable[[RuleInput], bool]
    reason: str
    evidence: str
    instead: str | None = None
    reach: Reach = Reach.OURS

    def reason_of(self, rule_input: RuleInput) -> str:
        return filled(self.reason, rule_input)

    def instead_of(self, rule_input: RuleInput) -> str | None:
        return None if self.instead is None else filled(self.instead, rule_input)


def reaching(rules: Iterable[Incompatibility], reach: Reach) -> tuple[Incompatibility, ...]:
    """Those of at least this reach."""
    return tuple(rule for rule in rules if rule.reach >= reach)


def first_broken(rules: Iterable[Incompatibility], rule_input: RuleInput) -> Incompatibility | None:
    """The first incompatibility; None if everything is compatible."""
    for rule in rules:
        if rule.is_broken(rule_input):
            return rule
    return None


# The placeholders of reasons.
PLACEHOLDERS: Mapping[str, Callable[[RuleInput], object]] = {
    "sharding": lambda c: c.strategy.sharding,
    "offload": lambda c: c.strategy.offload,
    "optimizer": lambda c: c.strategy.optimizer,
    "precision": lambda c: c.strategy.precision,
    "layout": lambda c: "+".join(c.strategy.layout) if c.strategy.offload is not Offload.NONE else c.strategy.sharding,
    "offload_shardings": lambda c: one_of(shardings_with(c.strategy.offload)),
    "method": lambda c: c.method,
    "device": lambda c: c.device.name,
    "capability": lambda c: capability_text(c.device),
    "num_ranks": lambda c: c.num_ranks,
    "shard_group": lambda c: c.shard_group,
    "group_sizes": lambda c: one_of(tuple(map(str, sorted(c.group_sizes)))) if c.group_sizes else "none",
    "accumulation": lambda c: c.accumulation,
    "backward_update": lambda c: c.backward_update,
    "checkpointing": lambda c: c.checkpointing,
    "loss": lambda c: c.loss,
    "model_type": lambda c: c.shape.model_type,
    "recipe": lambda c: c.fp8_recipe,
    "tile": lambda c: c.tile,
    "install": lambda _: extra_lines(),
}


class LazyValues(dict[str, object]):
    """A mapping for `str.format_map` that computes the value of a placeholder when the text has it."""

    def __init__(self, placeholders: Mapping[str, Callable[..., object]], *subjects: object) -> None:
        self._placeholders, self._subjects = placeholders, subjects

    def __missing__(self, name: str) -> object:
        return self._placeholders[name](*self._subjects)


def filled(text: str, rule_input: RuleInput) -> str:
    """The text with its `PLACEHOLDERS` filled in."""
    return text.format_map(LazyValues(PLACEHOLDERS, rule_input))


def capability_text(device: Device) -> str:
    """`V100-16GB has 7.0`, the second half of a sentence on compute capability."""
    if device.kind is DeviceKind.CPU:
        return f"{device.name} is a CPU"
    capability = device.compute_capability
    return f"{device.name} has " + (f"{capability[0]}.{capability[1]}" if capability else "an unknown one")
