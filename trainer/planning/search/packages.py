"""Packages that are not installed and would make a step faster, each with its predicted gain.

The gain is that of the same strategy, searched again as if the package were there. Packages that only FP8 uses are not
here: whether FP8 pays is measured on the machine.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import configuration_of
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.search.configurations import attention, best_candidate, fuses_kernels, losses
from shardwise.trainer.planning.search.traced_blocks import NOTED_RATIO, MissingPackage, slow_kernels
from shardwise.trainer.planning.speed.step import step_seconds
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import LossHead

_EXTRAS = {"flash-attn": "flash", "liger-kernel": "liger"}


def missing_packages(context: PlanningContext, chosen: Candidate) -> tuple[MissingPackage, ...]:
    """Those that would gain, of all kinds; none on a CPU."""
    slow = slow_kernels(context, chosen)
    found = (*([] if slow is None else [slow]), *_missing_kernels(context, chosen))
    return tuple(each for each in found if each.gain >= NOTED_RATIO)


def _missing_kernels(context: PlanningContext, chosen: Candidate) -> Iterator[MissingPackage]:
    """Kernels for attention and for the head and the blocks, for models of any kind."""
    for package, extra in _EXTRAS.items():
        if context.is_cpu or context.has_library(package):
            continue
        libraries = {**context.hardware.libraries, package: ""}
        there = replace(context, hardware=replace(context.hardware, libraries=libraries))
        best = best_candidate(there, chosen.strategy) if _may_gain(context, there, chosen) else None
        if best is not None:
            gain = chosen.speed.step_s / best.speed.step_s
            is_unnamed = package == "flash-attn" and context.job.model.flash_kernel is None
            prebuilt = ", and model.flash_kernel names no prebuilt one" if is_unnamed else ""
            yield MissingPackage(
                gain=gain,
                sentence=f"{package} is not installed{prebuilt}: with it a step is predicted {gain:.2f}x as fast "
                f"({', '.join(_changes(chosen, best))})",
                fix=extra_line(extra, python=context.hardware.other_python),
            )


def _may_gain(context: PlanningContext, there: PlanningContext, chosen: Candidate) -> bool:
    """False if the chosen configuration with what the package brings is no faster: a search takes longer."""
    configuration = configuration_of(context, chosen)
    kernel = attention(there, chosen.strategy.precision)[0]
    has_head = LossHead.FUSED_LINEAR in losses(there) and LossHead.FUSED_LINEAR not in losses(context)
    fused = replace(
        configuration,
        attention=kernel,
        loss=LossHead.FUSED_LINEAR if has_head else configuration.loss,
        loss_chunk_tokens=None if has_head else configuration.loss_chunk_tokens,
        fused_kernels=configuration.fused_kernels or fuses_kernels(there, configuration),
    )
    now_s, then_s = (step_seconds(context.shape, each, context.device) for each in (configuration, fused))
    return now_s >= NOTED_RATIO * then_s


def _changes(chosen: Candidate, best: Candidate) -> Iterator[str]:
    if best.attention is not chosen.attention:
        yield f"attention {best.attention}, not {chosen.attention}"
    if best.loss is not chosen.loss:
        yield f"loss {best.loss}, not {chosen.loss}"
    if best.fused_kernels and not chosen.fused_kernels:
        yield "fused kernels in the blocks"
    if best.micro_batch != chosen.micro_batch:
        yield f"micro batch {best.micro_batch}"
