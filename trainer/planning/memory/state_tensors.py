"""The tensors that are trained, as optimizers that go by the size of each see them.

bitsandbytes and torchao keep the state of a tensor below 4,096 elements in fp32, whatever its bits, and bitsandbytes
pages state from 100,000 elements on (`Optimizer8bit.get_state_buffer`): both leave norms and the small sides of
adapters alone. DeepSpeed hands its optimizer one flat partition.
"""

from collections.abc import Iterator

from trainer.planning.memory.recipe import Dims, Recipe, adapted_linears, adapts_all
from trainer.planning.setting import Setting
from trainer.spec.value import Value

LEAST_8BIT_ELEMENTS = 4096
LEAST_PAGED_ELEMENTS = 100_000
EIGHT_BIT_BYTES = 1 + 4 / 256  # one 8-bit state of one element with its share of the scale


class StateTensors(Value, frozen=True, kw_only=True):
    """(elements, how many of that size) of everything that is trained, before sharding."""

    groups: tuple[tuple[int, int], ...]

    def num_elements(self, least: int = 0) -> int:
        """Elements of the tensors that have at least so many."""
        return sum(size * count for size, count in self.groups if size >= least)

    @property
    def largest_8bit(self) -> int:
        """Elements of the largest tensor whose state is 8 bit; 0 where none is."""
        return max((size for size, _ in self.groups if size >= LEAST_8BIT_ELEMENTS), default=0)

    def state_bytes(self, *, is_8bit: bool, num_moments: int = 2, least: int = 0) -> int:
        """Bytes of the moments of tensors of at least `least` elements, fp32 or 8 bit with their scales."""
        if not is_8bit:
            return 4 * num_moments * self.num_elements(least)
        compact = self.num_elements(max(least, LEAST_8BIT_ELEMENTS))
        return num_moments * (4 * (self.num_elements(least) - compact) + round(EIGHT_BIT_BYTES * compact))


def state_tensors(setting: Setting, recipe: Recipe, dims: Dims, *, num_trained: int) -> StateTensors:
    """The tensors that are trained, `num_trained` elements together."""
    if recipe.uses_deepspeed:
        return StateTensors(groups=((num_trained // recipe.shard_degree, recipe.shard_degree),))
    groups = tuple(_adapters(setting, dims) if recipe.is_frozen else _weights(dims))
    return StateTensors(groups=groups)


def _adapters(setting: Setting, dims: Dims) -> Iterator[tuple[int, int]]:
    rank = setting.lora.rank
    for _, num_inputs, num_outputs in adapted_linears(setting, dims):
        yield rank * num_inputs, dims.layers
        yield rank * num_outputs, dims.layers
        if setting.lora.dora:
            yield num_outputs, dims.layers
    if adapts_all(setting) and dims.bare_adapter_elements:
        yield rank * dims.bare_adapter_elements, dims.layers


def _weights(dims: Dims) -> Iterator[tuple[int, int]]:
    """Matrices and tables as they are; what remains, norms and biases, is taken to have the width of the model."""
    shares = sum(num_inputs * num_outputs * copies for num_inputs, num_outputs, copies in dims.matrices)
    for num_inputs, num_outputs, copies in dims.matrices:  # blocks of another kind in the same proportions
        size = num_inputs * num_outputs
        yield size, round(dims.block_linears * copies / shares)
    yield dims.embedding, 1
    if dims.head:
        yield dims.head, 1
    rest = dims.parameters - dims.block_linears - dims.embedding - dims.head
    yield dims.hidden, rest // dims.hidden
    if rest % dims.hidden:
        yield rest % dims.hidden, 1
