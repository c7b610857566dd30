"""Points of the product of all axes as attempts that ranks run, and the plain run that each is held against."""

from collections.abc import Callable, Sequence
from pathlib import Path

from covering_factory import IN_BACKWARD, Point
from rank_factory import rank_plan, write_attempt

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import GaloreJob, Limits, LoraJob, NvmeLimit
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

NUM_STEPS = 4  # GaLore finds its projectors anew in the third
LR = 1e-3  # differences of rounding grow with it
EXACT, SIGNED, ORTHOGONALISED, MIXED, ROUGH = 1e-5, 1e-4, 2e-4, 2e-3, 2e-2
LORA = LoraJob(rank=4, alpha=8.0)
GALORE = GaloreJob(rank=8, update_gap=2, scale=1.0)
STEP_BY_SHARE = frozenset({Optimizer.ADALOMO, Optimizer.ADAFACTOR, Optimizer.LAMB_8BIT})
CUT_ANYWHERE = frozenset(
    {Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.PAGED_ADAMW, Optimizer.LION, Optimizer.SGD,
     Optimizer.DEEPSPEED_CPU_ADAM}
)  # fmt: skip


def reference_of(point: Point) -> Point:
    """One process, fp32, and nothing that saves memory."""
    optimizer = Optimizer.ADAMW if point.optimizer is Optimizer.DEEPSPEED_CPU_ADAM else point.optimizer
    return Point(
        Sharding.NONE, Offload.NONE, optimizer, Precision.FP32, point.method, Checkpointing.NONE, LossHead.EAGER, 1,
        activation_offload=False, optimizer_in_backward=False,
    )  # fmt: skip


def is_clipped(point: Point) -> bool:
    """An update inside the backward pass has no whole gradient to clip."""
    return not point.optimizer_in_backward and point.optimizer not in IN_BACKWARD


def plan_of(point: Point, cache_dir: Path, nvme: Path, *, clip: float) -> Plan:
    per_rank = 8 // (point.num_ranks * point.accumulation)
    return rank_plan(
        cache_dir,
        point.sharding,
        point.offload,
        num_steps=NUM_STEPS,
        clip=clip,
        lr=LR,
        train={"lora": LORA, "galore": GALORE},
        limits=Limits(nvme=NvmeLimit(path=str(nvme))),
        optimizer=point.optimizer,
        method=point.method,
        num_ranks=point.num_ranks,
        precision=point.precision,
        micro_batch=per_rank,
        accumulation=point.accumulation,
        checkpointing=point.checkpointing,
        checkpoint_every_n=2 if point.checkpointing is Checkpointing.EVERY_N else None,
        loss=point.loss,
        activation_offload=point.activation_offload,
        optimizer_in_backward=point.optimizer_in_backward,
    )


def tolerance(point: Point) -> float:
    """Largest difference of a loss that rounding explains."""
    if point.precision is Precision.FP32:
        if point.optimizer is Optimizer.MUON:
            return ORTHOGONALISED  # in bf16, by torch's implementation
        is_flat = point.sharding.uses_deepspeed and point.optimizer not in CUT_ANYWHERE
        if is_flat or (point.sharding.uses_fsdp and point.optimizer is Optimizer.ADAMW_8BIT):
            return MIXED  # blocks of 8-bit state fall elsewhere in a flat partition or a shard
        # A sum in another order moves an 8-bit code now and then, and with it the sign that is a whole step of Lion.
        return SIGNED if point.optimizer is Optimizer.LION_8BIT else EXACT
    if point.precision is Precision.BF16_MIXED and not point.sharding.uses_fsdp and point.method is not Method.GALORE:
        # Of Lion in other blocks rounding turns whole steps as well.
        return 2 * MIXED if point.sharding.uses_deepspeed and point.optimizer is Optimizer.LION_8BIT else MIXED
    # GaLore's projector turns with rounding; a step that is a share of the weight is rounded coarsely with it in bf16.
    return 2 * ROUGH if point.optimizer in STEP_BY_SHARE else ROUGH


def name_of(point: Point, *, clip: float) -> str:
    return f"{point.name}-clip{clip:g}"


def run_points(
    wanted: Sequence[Point],
    folder: Path,
    cache_dir: Path,
    nvme: Path,
    run_ranks: Callable[[Sequence[Path], int], None],
) -> Path:
    """Trains every point and every reference, many in one group of ranks; answers the folder of their runs."""
    groups: dict[tuple[int, bool], list[Path]] = {}
    seen = set()
    for point in wanted:
        clip = float(is_clipped(point))
        for each in (point, reference_of(point)):
            name = name_of(each, clip=clip)
            if name in seen:
                continue
            seen.add(name)
            attempt = write_attempt(folder / name, plan_of(each, cache_dir, nvme, clip=clip))
            groups.setdefault((each.num_ranks, each.sharding.uses_deepspeed), []).append(attempt)
    for (num_ranks, _), attempts in groups.items():
        run_ranks(attempts, num_ranks)
    return folder
