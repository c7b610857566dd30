"""The whole model on every rank in plain PyTorch: one device, or DistributedDataParallel.

DDP's buckets are the gradients (`gradient_as_bucket_view`), so they stay between steps. Micro batches without
synchronisation accumulate outside them, and each sum is freed when the last micro batch copies it into its bucket.

A tied head: the gradient of lm_head waits in autograd's buffer for the embedding's. Both are summed in place, so two
tables are alive when gradients are complete where one remains; out of place, three, where the waiting one is a view
(the gradient of a plain linear layer is the transpose of a product). With accumulation the remaining one is separate.
"""

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.engines.engine import (
    Event,
    Gathered,
    PlannedEngine,
    ShardingMemory,
    StateMemory,
    States,
    Transfers,
    Widths,
)
from shardwise.trainer.planning.engines.parts import share
from shardwise.trainer.planning.policy.precision_policy import Dims, PrecisionPolicy
from shardwise.trainer.planning.policy.reference_trainers import reduces_every_micro_batch
from shardwise.trainer.spec.model.blocks import TracedBlocks
from shardwise.trainer.spec.strategy import LossHead, Strategy


class WholeGradients(PlannedEngine):
    """What follows from a gradient that every rank has whole: of its own weights, in their type."""

    def uneven_share(self, policy: PrecisionPolicy, dims: Dims) -> int | None:
        return None

    def waits_for_last_micro_batch(self, configuration: Configuration, policy: PrecisionPolicy) -> bool:
        return False

    def earlier_gradients(
        self, configuration: Configuration, policy: PrecisionPolicy, num_trained: int, gradients: int
    ) -> int:
        return (2 if configuration.strategy.sharding.facts.keeps_gradient_buckets else 1) * gradients

    def gradient_widths(self, policy: PrecisionPolicy, *, is_added: bool) -> Widths:
        width = policy.trained_bytes if policy.is_frozen else policy.weight_bytes
        return Widths(made=0, fresh=width) if is_added else Widths(made=width, fresh=0)

    def table_gradients(self, step: StateMemory) -> int:
        policy, dims = step.policy, step.dims
        table = policy.weight_bytes * dims.embedding
        is_view = dims.is_tied and step.configuration.loss is LossHead.EAGER and not policy.is_autocast
        if policy.updates_in_backward:
            return max((1 + dims.is_tied + is_view) * table, table + step.states.table_temporaries)
        if not dims.is_tied:
            return table if step.holds_earlier_gradients else 0
        return (step.holds_earlier_gradients + (2 if is_view else 1)) * table

    def traced_block(self, step: StateMemory, traced: TracedBlocks, place: int) -> Gathered:
        return Gathered(weights=step.sharding.gathered_top, reduced=None)


class Replicated(WholeGradients):
    """One device, or DDP."""

    def builds_whole_model(self, configuration: Configuration) -> bool:
        return False

    def updated_at_once(
        self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, num_trained: int
    ) -> int:
        return share(num_trained, policy.shard_degree)

    def offloaded(self, states: States, strategy: Strategy, policy: PrecisionPolicy) -> States:
        raise ValueError(f"{strategy.sharding} has no offload {strategy.offload}")

    def memory(self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
        return ShardingMemory(holds_gradients=configuration.strategy.sharding.facts.keeps_gradient_buckets)

    def load(self, step: StateMemory) -> Event:
        return {"gradients": step.states.gradients} if step.sharding.holds_gradients else {}

    def update(self, step: StateMemory, event: Event) -> Event:
        return event

    def transfers(self, configuration: Configuration) -> Transfers:
        return Transfers(reduces_to_shards=False, reduces_every_micro_batch=reduces_every_micro_batch(configuration))
