"""The blocks of a model: their linear layers, and what a dry run of one block of each kind measured.

A model without a closed form is planned from one block of each kind. The order of the blocks shows how often each kind
occurs. What runs before the blocks, each block and what runs after them were run forwards and backwards once for each
way in which a plan may hold and compute weights (`Mode`). Amounts are polynomials of the tokens of a micro batch and of
the length of a row, so that one run serves all micro batches.
"""

from enum import StrEnum

from shardwise.trainer.spec.strategy import Attention, Method
from shardwise.trainer.spec.value import Value


class Component(StrEnum):
    """The part of a block that a linear layer belongs to."""

    ATTENTION = "attention"
    STATE = "state layers"  # state spaces, linear attention, convolutions over tokens
    FEED_FORWARD = "feed-forward layers"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"  # feed-forward layers next to experts, which every token passes
    ROUTER = "routers"


class Linear(Value, frozen=True, kw_only=True):
    """The weight of one linear layer of a block; of experts, `num_copies` exist and a token passes `num_used`.

    `name` is the last part of the module's name in transformers, which an adapter names as its target; two layers of a
    block may share it. Routers and experts are bare parameters there, and the weights of some layers are read past
    their forward: `is_linear_module` is false, 4-bit storage leaves them as they are. Under "all-linear" peft gives the
    experts of some models adapters of `adapter_rank_factor` times the rank, and none to others, nor to routers (0).
    """

    name: str
    num_inputs: int
    num_outputs: int
    has_bias: bool = False
    num_copies: int = 1
    num_used: int = 1
    is_linear_module: bool = True
    adapter_rank_factor: int = 1
    component: Component = Component.FEED_FORWARD

    @property
    def num_weights(self) -> int:
        """Weights of all copies, biases left out."""
        return self.num_copies * self.num_inputs * self.num_outputs

    @property
    def num_parameters(self) -> int:
        """Parameters of all copies, biases included."""
        return self.num_copies * (self.num_inputs * self.num_outputs + (self.num_outputs if self.has_bias else 0))


class Amount(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes, or FLOPs: a constant, and shares that grow with T tokens of a micro batch and S tokens of a row."""

    constant: float = 0.0
    token: float = 0.0  # times T
    score: float = 0.0  # times T S
    row: float = 0.0  # times S
    mask: float = 0.0  # times S S

    def at(self, tokens: int, length: int) -> float:
        """The amount of a micro batch of `tokens` in rows of `length`."""
        return self.constant + self.token * tokens + length * (self.score * tokens + self.row + self.mask * length)


class Moment(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes alive at one moment of a forward or a backward, beyond those at its begin.

    The gradients of weights are elements: engines keep them in different types, and free them at different times.
    """

    held: Amount
    gradients: int = 0  # of weights, made since the begin
    fresh: int = 0  # of those, of the tensor that was just made


class Kernel(Value, frozen=True, kw_only=True):
    """Calls of a function that a package computes in one kernel and transformers in many operations.

    Amounts are those of the operations, in one forward of a block; `passed` is what goes in and out.
    """

    name: str
    package: str  # as pip names it
    moved: Amount
    passed: Amount
    operators: int
    num_calls: int = 1


class Part(Value, frozen=True, kw_only=True):
    """One part of a model, run forwards and backwards."""

    saved: Amount  # bytes that its forward retains for the backward, its output included
    begun: Amount  # bytes alive when its backward begins, beyond those before its forward
    before_use: Amount  # bytes made from then until its backward needs what the forward has saved
    lost: Amount  # bytes of earlier parts that were freed since its forward began, and stay where blocks run again
    forward: tuple[Moment, ...]
    again: tuple[Moment, ...]  # of a forward that is run again, which ends when everything is saved
    backward: tuple[Moment, ...]
    moved: Amount  # bytes that the operations of a forward read and write, products left out
    flops: Amount  # of products that no linear layer counts: scores, states, experts without a token
    fp32_flops: Amount  # of those, where the model computes in 16 bit
    scored: float  # elements of a token that kernels of attention read as queries
    operators: int  # that a forward starts
    kernels: tuple[Kernel, ...] = ()

    @property
    def attended(self) -> float:
        """Query elements of a token under attention, by a kernel or by two products of 4 FLOPs a key."""
        return self.scored + (self.flops.score + self.fp32_flops.score) / 4


class Mode(Value, frozen=True, kw_only=True, cache_hash=True):
    """How weights are held and computed."""

    method: Method  # full, lora or qlora
    compute_bytes: int
    is_autocast: bool
    attention: Attention


class Adapter(Value, frozen=True, kw_only=True):
    """The adapter of one layer of a block, or of all experts of one."""

    num_inputs: int
    num_outputs: int
    num_elements: int
    num_tensors: int


class ModeTrace(Value, frozen=True, kw_only=True):
    """A run of one block of each kind in one mode."""

    mode: Mode
    boundary: Amount  # the input of a block
    before: Part
    blocks: tuple[Part, ...]  # one for each kind
    after: Part
    adapters: tuple[tuple[Adapter, ...], ...] = ()  # of each kind


class BlockKind(Value, frozen=True, kw_only=True):
    """Blocks that are built alike."""

    name: str  # the class that mixes tokens, as transformers calls it
    num_parameters: int
    linears: tuple[Linear, ...]
    tensors: tuple[tuple[int, int, int], ...]  # rows, elements of a row, tensors of that shape
    window: int | None = None  # tokens that they see


class TracedBlocks(Value, frozen=True, kw_only=True, cache_hash=True):
    """The blocks of a model that was traced."""

    kinds: tuple[BlockKind, ...]
    order: tuple[int, ...]  # the kind of each block
    modes: tuple[ModeTrace, ...]
    separates_documents: bool  # rows of several documents were traced
    num_tokens: int  # of a traced row
