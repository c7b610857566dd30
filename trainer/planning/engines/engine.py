"""The interface of an engine to the planner: every term of memory and speed that the library decides."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.policy.precision_policy import Dims, PrecisionPolicy
from shardwise.trainer.spec.model.blocks import TracedBlocks
from shardwise.trainer.spec.strategy import Strategy
from shardwise.trainer.spec.value import Value

Event = dict[str, int]  # named bytes at one moment of a step


class States(Value, frozen=True, kw_only=True):
    """Bytes of one rank; `num_trained` is elements and `saved` bytes over all ranks."""

    num_trained: int
    saved: int  # over all ranks: masters and optimizer state, which a checkpoint holds
    weights: int
    quant_state: int
    adapters: int
    master_weights: int = 0
    gradients: int = 0  # complete, at the end of the last backward
    optimizer_state: int = 0
    optimizer_temporaries: int = 0
    table_temporaries: int = 0  # of the embedding's update, under optimizer_in_backward
    managed: int = 0  # paged optimizer state: CUDA managed memory
    pinned: int = 0
    pageable: int = 0
    nvme: int = 0
    host_table: int = 0  # the input embeddings under embedding_on_host, pageable


class ShardingMemory(Value, frozen=True, kw_only=True):
    """Bytes on one rank."""

    root: int = 0  # gathered parameters outside the blocks that stay for the whole step
    gathered_forward: int = 0  # when the forward ends
    gathered_in_forward: int = 0  # while a block runs forward: frozen ones of few tokens have the peak there
    gathered_loss: int = 0  # backward of cross-entropy
    gathered_head: int = 0  # backward of lm_head
    gathered_top: int = 0  # backward of the last block
    gathered_bottom: int = 0  # backward of the first
    gathered_end: int = 0
    blocks_ahead: int = 1  # gathered in the backward before the one at work needs them
    freed_by_last: int = 0  # when the last block has run backwards, of what stays gathered until then
    freed_before_first: int = 0  # when only the first two are left
    freed_before_second: int = 0  # when only the first three are left
    buffers: int = 0  # for the whole run
    buffers_backward: int = 0  # from the head's backward to the end of backward
    reduce_head: int = 0  # what the head's gradient is copied into to be reduced, before the blocks run backwards
    reduce_block: int = 0  # the same for a block's gradients
    holds_gradients: bool = False  # from step to step
    retains_frozen_inputs: bool = False  # of frozen blocks, with the gradients of those, until the backward ends


class Widths(NamedTuple):
    """Bytes of an element of a weight's gradient: of each that a block has made, or of the newest alone."""

    made: int
    fresh: int


class Gathered(NamedTuple):
    """Bytes at the backward of one block."""

    weights: int  # gathered parameters
    reduced: int | None  # what the gradients of its neighbour are reduced from; None: nothing is


class Transfers(Value, frozen=True, kw_only=True):
    """What ranks send each other in a step, of bytes that the whole model has."""

    gathers: int = 0  # of all weights, in each micro batch
    gathers_updated: bool = False  # of all trained weights, once a step
    reduces_to_shards: bool  # gradients are sent once; else twice: all-reduced, or gathered again as weights
    reduces_every_micro_batch: bool  # else with the last


class StateMemory(Value, frozen=True, kw_only=True):
    """The parts of a step's memory that do not depend on the micro batch, the recomputation or the loss head."""

    configuration: Configuration
    policy: PrecisionPolicy
    dims: Dims
    states: States
    sharding: ShardingMemory

    @property
    def holds_earlier_gradients(self) -> bool:
        """True if a new gradient is added to an existing one: DDP's bucket, or that of an earlier micro batch."""
        is_accumulating = self.configuration.accumulation > 1 and not self.policy.updates_in_backward
        return is_accumulating or self.sharding.holds_gradients


class PlannedEngine(ABC):
    """The terms that a library decides. Nothing has a default: every engine states all of them."""

    def __init__(self, *, expands_segments: bool, other_streams: tuple[str, ...]) -> None:
        """`expands_segments`: all segments of the allocator do, where the launcher sets it; `other_streams`: the parts
        of an event that are allocated in streams of the engine's own."""
        self.expands_segments = expands_segments
        self.other_streams = other_streams

    @abstractmethod
    def builds_whole_model(self, configuration: Configuration) -> bool:
        """True if every rank builds the whole model in host RAM before it keeps its share."""

    @abstractmethod
    def uneven_share(self, policy: PrecisionPolicy, dims: Dims) -> int | None:
        """Elements of the model on the first rank, where weights are cut by rows; None where a share is even."""

    @abstractmethod
    def updated_at_once(
        self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, num_trained: int
    ) -> int:
        """Elements of a rank that the optimizer updates together, of `num_trained` over all."""

    @abstractmethod
    def offloaded(self, states: States, strategy: Strategy, policy: PrecisionPolicy) -> States:
        """The states with those that an offload moves in host RAM or on NVMe."""

    @abstractmethod
    def memory(self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
        """Bytes of gathered parameters, of buffers and of gradients in transfer."""

    @abstractmethod
    def waits_for_last_micro_batch(self, configuration: Configuration, policy: PrecisionPolicy) -> bool:
        """True if whole gradients stay on a rank until the last micro batch reduces them."""

    @abstractmethod
    def earlier_gradients(
        self, configuration: Configuration, policy: PrecisionPolicy, num_trained: int, gradients: int
    ) -> int:
        """Bytes of the gradients of earlier micro batches; `gradients` are the complete ones of a rank."""

    @abstractmethod
    def gradient_widths(self, policy: PrecisionPolicy, *, is_added: bool) -> Widths:
        """Bytes of an element of a gradient that the block at work has made; `is_added` to an existing one."""

    @abstractmethod
    def table_gradients(self, step: StateMemory) -> int:
        """Bytes of the gradients of embedding and head beyond their place among the complete gradients."""

    @abstractmethod
    def traced_block(self, step: StateMemory, traced: TracedBlocks, place: int) -> Gathered:
        """What is gathered and reduced at the backward of the block at a place of a traced model."""

    @abstractmethod
    def load(self, step: StateMemory) -> Event:
        """What the model passes through on its way to the device, beyond the states that stay."""

    @abstractmethod
    def update(self, step: StateMemory, event: Event) -> Event:
        """`event`, the update of the weights, with what the engine copies for it."""

    @abstractmethod
    def transfers(self, configuration: Configuration) -> Transfers:
        """What ranks send each other in a step."""
