"""Lines of a plan on a model whose blocks were traced: its blocks, and functions without their kernels."""

from collections.abc import Iterator
from functools import lru_cache

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import configuration_of
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.speed.step import step_seconds
from shardwise.trainer.spec.model.blocks import Amount, Kernel, Part, TracedBlocks
from shardwise.trainer.spec.model.readers import furthest_forms
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.packages import pip_line
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.value import Value


def traced_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    """The kinds of blocks that were traced, and functions whose kernels are missing."""
    shape = context.shape
    if shape.traced is not None:
        kinds = [f"{shape.traced.order.count(place)} {kind.name}" for place, kind in enumerate(shape.traced.kinds)]
        yield f"{_reason(shape)} a dry run of one block of each kind ({', '.join(kinds)})"
    slow = slow_kernels(context, chosen)
    if slow is not None and slow.gain < NOTED_RATIO:
        yield slow.text


def _reason(shape: ModelShape) -> str:
    if shape.is_described:
        return f"{shape.model_type} has no closed form: memory and time follow from"
    furthest = furthest_forms()[shape.model_type]
    return f"the closed form of {shape.model_type} is up to {furthest:.1%} off: memory of plain blocks follows from"


NOTED_RATIO = 1.05  # times as long; below, a missing package is no warning


class MissingPackage(Value, frozen=True, kw_only=True):
    """A package, or several that belong together, with the gain in times as fast and the command that installs it."""

    gain: float
    sentence: str
    fix: str

    @property
    def text(self) -> str:
        return f"{self.sentence}; {self.fix}"


def slow_kernels(context: PlanningContext, chosen: Candidate) -> MissingPackage | None:
    """Functions that run operation by operation on the GPU; None where there are none."""
    shape = context.shape
    if shape.timed is None or context.is_cpu:
        return None
    of_kind = [part.kernels for part in shape.timed.modes[0].blocks]
    kernels = [kernel for kernels in of_kind for kernel in kernels]
    if not kernels:
        return None
    configuration = configuration_of(context, chosen)
    fast = replace(shape, traced=with_kernels(shape.timed))
    ratio = step_seconds(shape, configuration, context.device) / step_seconds(fast, configuration, context.device)
    longer = f"{ratio:.2g} times as long as" if ratio >= 2 else f"{ratio - 1:.0%} longer than".replace("%", " %")
    count = sum(bool(of_kind[kind]) for kind in shape.timed.order)
    packages, names = sorted({kernel.package for kernel in kernels}), sorted({kernel.name for kernel in kernels})
    return MissingPackage(
        gain=ratio,
        sentence=f"{count} of {len(shape.timed.order)} blocks compute {_listed(names)} in plain torch: a step takes "
        f"about {longer} with {_listed(packages)}",
        fix=pip_line("--no-build-isolation", *packages, python=context.hardware.other_python),
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@lru_cache(maxsize=16)
def with_kernels(traced: TracedBlocks) -> TracedBlocks:
    """The blocks as if the packages with kernels for their functions were installed, as far as time goes."""
    modes = (replace(mode, blocks=tuple(_with_kernels(part) for part in mode.blocks)) for mode in traced.modes)
    return replace(traced, modes=tuple(modes))


def _with_kernels(part: Part) -> Part:
    moved, operators = part.moved, part.operators
    for kernel in part.kernels:
        moved = _exchanged(moved, kernel)
        operators += kernel.num_calls - kernel.operators
    return replace(part, moved=moved, operators=operators, kernels=())


def _exchanged(moved: Amount, kernel: Kernel) -> Amount:
    axes = Amount.__struct_fields__
    return Amount(
        **{axis: getattr(moved, axis) - getattr(kernel.moved, axis) + getattr(kernel.passed, axis) for axis in axes}
    )
