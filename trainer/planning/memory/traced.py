"""Memory of the blocks of a model that was traced: amounts of a dry run, added up over the blocks.

A traced part has moments, each with the bytes alive then and the gradients of weights made until then
(`spec.model.blocks`). The worst moment of a step is at one of a few blocks: the last and the first of each kind with
each kind of neighbours. At block i, from 0 to L - 1, are alive, besides what stays for the whole step,

    activations   what runs before the blocks and the blocks up to i have saved; under recomputation the inputs of these
    at work       the gradient of the block's output, and a moment of its backward; a block that is recomputed first
                  saves what it saves otherwise, besides the gradients that were made until these were needed
    gradients     complete ones of the blocks after i, and those of the moment: whole until they are reduced, under an
                  engine that adds them to earlier ones a tensor at a time
    gathered      weights of block i and of the one that is gathered ahead, under an engine that shards weights

Under adapters the first block of all saves nothing before its first adapter; it is counted as the others of its kind.
Where blocks run again, hidden states that a library holds for a moment may make one tensor of them more or less.
Selective recomputation and that of attention alone have no trace: they are counted as if everything was saved. A mode
that was not traced is counted as the nearest one that was, in the ratio of the widths.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.engines.engine import Widths
from shardwise.trainer.planning.policy.precision_policy import Dims, PrecisionPolicy
from shardwise.trainer.spec.model.blocks import Amount, Mode, ModeTrace, Moment, Part, TracedBlocks
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Method

Event = dict[str, int]


class Run(NamedTuple):
    """A traced run at the tokens and the length of a micro batch."""

    trace: ModeTrace
    order: tuple[int, ...]
    tokens: int
    length: int
    width: float  # of the computing type, relative to the traced one
    runs_again: bool  # some blocks do, and what they are given stays

    def retained(self, part: Part) -> float:
        """Bytes that the trace freed, inputs of blocks and masks, and that stay because blocks run again."""
        return self.bytes_of(part.lost) if self.runs_again else 0.0

    def bytes_of(self, amount: Amount) -> float:
        return self.width * amount.at(self.tokens, self.length)

    @property
    def boundary(self) -> float:
        """Bytes of the input of a block."""
        return self.bytes_of(self.trace.boundary)

    @property
    def before(self) -> float:
        """Bytes that embeddings, masks and positions hold afterwards, the input of the first block included."""
        return self.bytes_of(self.trace.before.saved)

    @property
    def complete(self) -> float:
        """Bytes alive when what runs before the blocks begins its backward."""
        return self.bytes_of(self.trace.before.begun)

    @property
    def after(self) -> float:
        """Bytes that the last norm adds, the hidden states included; negative where masks are freed."""
        return self.bytes_of(self.trace.after.saved) + self.retained(self.trace.after)

    def saved(self, kind: int) -> float:
        """Bytes that a block of a kind saves without recomputation, its output included."""
        return self.bytes_of(self.trace.blocks[kind].saved)

    def begun(self, kind: int) -> float:
        """Of a block that begins its backward, what its forward and the gradient of its output have added."""
        part = self.trace.blocks[kind]
        return self.bytes_of(part.begun) + self.retained(part)

    def begun_end(self, part: Part) -> float:
        """The same of what runs after the blocks."""
        return self.bytes_of(part.begun) + self.retained(part)

    def constant(self, kind: int) -> float:
        """Of these, what does not depend on the micro batch: cast weights."""
        return self.width * self.trace.blocks[kind].saved.constant


def run_of(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> Run:
    """The run that is nearest to a configuration of a traced model."""
    assert dims.traced is not None
    trace = nearest(dims.traced, mode_of(configuration, is_autocast=policy.is_autocast))
    return Run(
        trace=trace,
        order=dims.traced.order,
        tokens=policy.tokens,
        length=policy.seq_len,
        width=policy.compute_bytes / trace.mode.compute_bytes,
        runs_again=configuration.checkpointing in (Checkpointing.FULL, Checkpointing.EVERY_N),
    )


def mode_of(configuration: Configuration, *, is_autocast: bool) -> Mode:
    """How a configuration holds and computes weights."""
    return Mode(
        method=configuration.method if configuration.method.freezes_base else Method.FULL,
        compute_bytes=configuration.strategy.precision.compute_bytes,
        is_autocast=is_autocast,
        attention=Attention.SDPA if configuration.attention is Attention.FLASH else configuration.attention,
    )


@lru_cache(maxsize=256)
def nearest(traced: TracedBlocks, mode: Mode) -> ModeTrace:
    """The traced mode that has most in common with a mode."""

    def distance(run: ModeTrace) -> tuple[bool, ...]:
        other = run.mode
        return (
            other.method.freezes_base != mode.method.freezes_base,
            other.is_autocast != mode.is_autocast,
            other.method is not mode.method,
            other.compute_bytes != mode.compute_bytes,
            other.attention is not mode.attention,
        )

    return min(traced.modes, key=distance)


class Retained(NamedTuple):
    """Bytes between the forward and the backward."""

    recomputed: tuple[bool, ...]  # whether each block runs again
    of_blocks: tuple[float, ...]  # each block, as it is saved
    before: tuple[float, ...]  # what runs before the blocks, and the blocks before each one; at the end, all


@lru_cache(maxsize=512)
def _retained(run: Run, checkpointing: Checkpointing, every: int | None) -> Retained:
    num_blocks = len(run.order)
    is_again = [
        checkpointing is Checkpointing.FULL
        or (
            checkpointing is Checkpointing.EVERY_N
            and bool(every)
            and place % (every or 1) == 0
            and place < num_blocks // (every or 1) * (every or 1)
        )
        for place in range(num_blocks)
    ]
    of_blocks = tuple(
        run.boundary if again else run.saved(kind) for again, kind in zip(is_again, run.order, strict=True)
    )
    return Retained(tuple(is_again), of_blocks, tuple(accumulate(of_blocks, initial=run.before)))


def retained(configuration: Configuration, run: Run) -> Retained:
    """What the blocks of a configuration keep between forward and backward."""
    return _retained(run, configuration.checkpointing, configuration.checkpoint_every_n)


@lru_cache(maxsize=128)
def places(traced: TracedBlocks) -> tuple[int, ...]:
    """The last and the first block of each kind with each kind of neighbours: one of them has the worst moment."""
    order = traced.order
    neighbours = [
        (order[place - 1] if place else None, kind, order[place + 1] if place + 1 < len(order) else None)
        for place, kind in enumerate(order)
    ]
    first = {each: place for place, each in reversed(list(enumerate(neighbours)))}
    last = {each: place for place, each in enumerate(neighbours)}
    return tuple(sorted({*first.values(), *last.values(), 0, len(order) - 1}))


class Worst(NamedTuple):
    """The worst moment of a part at work: bytes, and bytes of gradients among them."""

    held: float
    gradients: float

    @property
    def total(self) -> float:
        return self.held + self.gradients


def worst_block(run: Run, kind: int, widths: Widths, *, is_recomputed: bool) -> Worst:
    """The worst moment of a block's backward, beyond what is alive without the block."""
    part = run.trace.blocks[kind]
    moments = [_worst(run, moment, run.begun(kind), widths) for moment in part.backward]
    if is_recomputed:
        run_again = run.boundary + run.bytes_of(part.before_use)
        moments += [_worst(run, moment, run_again, widths) for moment in part.again]
    return max(moments, key=lambda worst: worst.total, default=Worst(run.begun(kind), 0.0))


def worst_end(run: Run, part: Part) -> Worst:
    """The worst moment of the backward of what runs before or after the blocks; gradients are elements."""
    begun = run.begun_end(part)
    moments = [_worst(run, moment, begun, Widths(made=1, fresh=0)) for moment in part.backward]
    return max(moments, key=lambda worst: worst.held, default=Worst(begun, 0.0))


def _worst(run: Run, moment: Moment, more: float, widths: Widths) -> Worst:
    gradients = widths.made * moment.gradients if widths.made else widths.fresh * moment.fresh
    return Worst(more + run.bytes_of(moment.held), gradients)


def worst_forward(run: Run, kind: int) -> float:
    """The most that a block holds in its forward, beyond what was alive when it began."""
    part = run.trace.blocks[kind]
    return max((run.bytes_of(moment.held) for moment in part.forward), default=0.0)
