"""Fallbacks for an out of memory: settings with the same global batch, each with a lower predicted peak.

The order is what it costs: half the micro batch and twice the accumulation (nothing but time), recomputation, smaller
slices of logits, smaller buffers, a rank's whole share at once where gradients that add up take more than activations,
and only then another place for the state. A step that would not lower the predicted peak is left out: if memory runs
out in the optimizer's step, a smaller micro batch is no help.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import candidate_of, setting_of, with_micro_batch
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.rule import obstacle_to
from shardwise.trainer.planning.search.budget import excess
from shardwise.trainer.planning.search.settings import (
    MIN_CHUNK_TOKENS,
    least_need,
    smallest_buckets,
    updates_in_backward,
)
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.planning.tables.learning_rates import shares_rate
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Offload, Sharding

MIN_GAIN = 0.02  # of the peak, to be worth a restart


def fallbacks(context: PlanningContext, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Ordered settings for after an out of memory of `candidates[0]`."""
    chain = [candidates[0]]
    setting = setting_of(context, candidates[0])
    while True:
        lower = _next_lower(context, setting, chain[-1])
        if lower is None:
            break
        setting, candidate = lower
        chain.append(candidate)
    for other in candidates[1:]:
        if _keeps_the_update(other, candidates[0]) and _layout(other) not in {_layout(link) for link in chain}:
            smallest = least_need(context, other.strategy)
            if _is_lower(smallest, chain[-1]) and excess(context, smallest) is None:
                chain.append(smallest)
    return tuple(chain[1:])


def _keeps_the_update(other: Candidate, chosen: Candidate) -> bool:
    has_same_rate = shares_rate(other.strategy.optimizer, chosen.strategy.optimizer)
    return has_same_rate and (other.strategy.is_exact or not chosen.strategy.is_exact)


def _layout(candidate: Candidate) -> tuple[Sharding, Offload]:
    return candidate.strategy.sharding, candidate.strategy.offload


def _next_lower(context: PlanningContext, setting: Setting, last: Candidate) -> tuple[Setting, Candidate] | None:
    for smaller in _smaller_settings(context, setting):
        if obstacle_to(context, smaller) is not None:
            continue
        candidate = candidate_of(context, smaller)
        # Half a micro batch also answers activations that were predicted too low: any gain will do.
        if _is_lower(candidate, last, gain=0 if smaller.micro_batch < setting.micro_batch else MIN_GAIN):
            return smaller, candidate
    return None


def _is_lower(candidate: Candidate, last: Candidate, *, gain: float = MIN_GAIN) -> bool:
    return (
        candidate.memory.peak_allocated_bytes < (1 - gain) * last.memory.peak_allocated_bytes
        and candidate.memory.need_bytes <= last.memory.need_bytes
    )


def _smaller_settings(context: PlanningContext, setting: Setting) -> Iterator[Setting]:
    """One step down on each axis that a pin leaves free, the cheapest first."""
    pin = context.job.pin
    is_one = pin.micro_batch is not None or updates_in_backward(context, setting.strategy)
    micro_batch = 1 if is_one else setting.micro_batch
    while micro_batch > 1:  # the first halves may need more: gradients that add up take room of their own
        micro_batch //= 2
        yield with_micro_batch(context, setting, micro_batch)
    if setting.checkpointing in (Checkpointing.NONE, Checkpointing.SELECTIVE) and pin.checkpointing is None:
        yield replace(setting, checkpointing=Checkpointing.FULL)
    if setting.loss is LossHead.EAGER and pin.loss is None:
        yield replace(setting, loss=LossHead.CHUNKED, loss_chunk_tokens=MIN_CHUNK_TOKENS)
    if setting.loss_chunk_tokens is not None and setting.loss_chunk_tokens > MIN_CHUNK_TOKENS:
        half = min(setting.loss_chunk_tokens, setting.tokens_per_micro_batch) // 2
        yield replace(setting, loss_chunk_tokens=max(MIN_CHUNK_TOKENS, half))
    least = smallest_buckets(context.shape, setting.strategy)
    if setting.buckets != least:
        yield replace(setting, buckets=least)
    if setting.accumulation > 1 and pin.micro_batch is None:  # a share at once keeps no gradients beside its own
        yield with_micro_batch(context, setting, context.sequences_per_rank)
