"""Everything that the events of a step are put together from, and what follows from it in one word."""

from trainer.planning.memory.activations import BlockActivations
from trainer.planning.memory.loss_head import HeadMemory
from trainer.planning.memory.recipe import Dims, Recipe
from trainer.planning.memory.sharding import ShardingMemory, reduces_every_micro_batch
from trainer.planning.memory.states import States
from trainer.planning.setting import Setting
from trainer.spec.value import Value

Event = dict[str, int]


class StepMemory(Value, frozen=True, kw_only=True):
    """Everything that the events of a step are put together from."""

    setting: Setting
    recipe: Recipe
    dims: Dims
    states: States
    blocks: BlockActivations
    head: HeadMemory
    sharding: ShardingMemory

    @property
    def waits_for_last_micro_batch(self) -> bool:
        """True if whole gradients stay on this rank until the last micro batch reduces them."""
        is_accumulating = self.setting.accumulation > 1 and not self.recipe.updates_in_backward
        return is_accumulating and self.recipe.uses_fsdp and not reduces_every_micro_batch(self.setting, self.recipe)

    @property
    def holds_earlier_gradients(self) -> bool:
        """True if a new gradient is added to an existing one: DDP's bucket, or that of an earlier micro batch."""
        is_accumulating = self.setting.accumulation > 1 and not self.recipe.updates_in_backward
        return is_accumulating or self.sharding.holds_gradients
