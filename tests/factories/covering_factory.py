"""Points of the product of all axes that a CPU can run, and a small set of them with every pair of values."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from random import Random
from typing import NamedTuple

from msgspec.structs import replace
from planning_factory import context_for, job_of

from shardwise.trainer.planning.rules.rule import may_run
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import Allowance, NvmeLimit
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision, Strategy

PRECISIONS = (Precision.FP32, Precision.BF16_MIXED, Precision.BF16, Precision.FP16_MIXED)
LOSSES = (LossHead.EAGER, LossHead.CHUNKED, LossHead.FUSED)
IN_BACKWARD = (Optimizer.LOMO, Optimizer.ADALOMO)
BACKWARD_RUNS = (Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.SGD, Optimizer.ADAMW_8BIT)


class Point(NamedTuple):
    sharding: Sharding
    offload: Offload
    optimizer: Optimizer
    precision: Precision
    method: Method
    checkpointing: Checkpointing
    loss: LossHead
    accumulation: int
    activation_offload: bool
    optimizer_in_backward: bool

    def __str__(self) -> str:
        return self.name

    @property
    def num_ranks(self) -> int:
        return {Sharding.NONE: 1, Sharding.HSDP: 4}.get(self.sharding, 2)

    @property
    def name(self) -> str:
        flags = "".join(
            f"-{flag}"
            for flag, is_on in (("offload", self.activation_offload), ("backward", self.optimizer_in_backward))
            if is_on
        )
        layout = self.sharding if self.offload is Offload.NONE else f"{self.sharding}+{self.offload}"
        words = (layout, self.precision, self.optimizer, self.method, self.checkpointing, self.loss)
        return f"{'-'.join(words)}-x{self.accumulation}{flags}"

    @property
    def values(self) -> tuple[tuple[str, object], ...]:
        axes = self._asdict()
        layout = (axes.pop("sharding"), axes.pop("offload"))
        return (("layout", layout), *axes.items())

    @property
    def pairs(self) -> tuple[tuple[tuple[str, object], tuple[str, object]], ...]:
        """Every two of its values, in an order that no hash decides: the covering set must be the same each time."""
        return tuple(combinations(self.values, 2))

    @property
    def core_needs(self) -> tuple[object, ...]:
        """Its values, and the pairs of where state lives with what changes an engine most: the core has them all."""
        values = dict(self.values)
        return (*self.values, (self.sharding, self.precision), (values["layout"], self.method))


@cache
def rows() -> tuple[tuple[Strategy, Method], ...]:
    """Every row of the catalogue that gloo ranks, or one process, can run with a method."""
    runnable = [strategy for strategy in CATALOGUE if strategy.precision in PRECISIONS]
    return tuple((strategy, method) for strategy in runnable for method in Method if is_row_allowed(strategy, method))


def is_row_allowed(strategy: Strategy, method: Method) -> bool:
    """Whether no rule forbids the row on a CPU once it is pinned and everything is allowed."""
    spec = {Sharding.NONE: "1xCPU", Sharding.HSDP: "2x2xCPU"}.get(strategy.sharding, "2xCPU")
    pin = {axis: getattr(strategy, axis) for axis in ("sharding", "offload", "optimizer", "precision")}
    job = job_of(allow=tuple(Allowance), pin=pin, seq_len=512, tokens_per_step=8192)
    job = replace(job, limits=replace(job.limits, nvme=NvmeLimit(path="/nvme")))
    context = context_for("tiny", spec, method=method, job=job)
    return may_run(context, strategy)


def points() -> Iterator[Point]:
    flags = product(Checkpointing, LOSSES, (1, 2), (False, True), (False, True))
    settings = list(flags)
    for strategy, method in rows():
        for checkpointing, loss, accumulation, offloads, in_backward in settings:
            point = Point(
                strategy.sharding, strategy.offload, strategy.optimizer, strategy.precision, method,
                checkpointing, loss, accumulation, offloads, in_backward,
            )  # fmt: skip
            if is_sound(point):
                yield point


def is_sound(point: Point) -> bool:
    """Updates inside the backward pass need the whole gradient there: one rank, one micro batch.

    What selective recomputation keeps stays on the device. Where each of four ranks has few rows, gradients of whole
    weights are too large for the first loss scale of fp16, and a step would be skipped.
    """
    if point.activation_offload and point.checkpointing is Checkpointing.SELECTIVE:
        return False
    if point.precision is Precision.FP16_MIXED and point.num_ranks > 2 and not point.method.freezes_base:
        return False
    if point.optimizer in IN_BACKWARD and (point.accumulation > 1 or point.optimizer_in_backward):
        return False
    return not point.optimizer_in_backward or (
        point.sharding is Sharding.NONE
        and point.accumulation == 1
        and point.method is Method.FULL
        and point.optimizer in BACKWARD_RUNS
        and point.precision is not Precision.FP16_MIXED
    )


def core(candidates: Sequence[Point]) -> list[Point]:
    """Few of `candidates` that have every value of every axis, and every pair of what changes an engine most."""
    return chosen(candidates, lambda point: point.core_needs)


def covering(candidates: Sequence[Point]) -> list[Point]:
    """The core, and few more of `candidates`, so that every pair of values occurs that occurs in any of them."""
    return chosen(candidates, lambda point: point.pairs, begun=core(candidates))


def chosen(
    candidates: Sequence[Point], needs: Callable[[Point], Sequence[object]], *, begun: Sequence[Point] = (),
    tries: int = 60,
) -> list[Point]:  # fmt: skip
    """`begun`, and few of `candidates` that together meet every need that any of them meets, by a greedy choice."""
    random = Random(0)
    by_need: dict[object, list[Point]] = {}
    for point in candidates:
        for need in needs(point):
            by_need.setdefault(need, []).append(point)
    missing = dict.fromkeys(by_need)  # ordered, unlike a set
    found, updates = list(begun), {(point.optimizer, point.method) for point in begun}
    for point in begun:
        for need in needs(point):
            missing.pop(need, None)
    while missing:
        processes = by_need[next(iter(missing))]
        some = processes if len(processes) <= tries else random.sample(processes, tries)
        best = max(
            some,
            key=lambda point: (
                sum(need in missing for need in needs(point)),
                (point.optimizer, point.method) in updates,
            ),
        )
        found.append(best)
        updates.add((best.optimizer, best.method))
        for need in needs(best):
            missing.pop(need, None)
    return found
