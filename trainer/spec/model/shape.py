"""A causal language model as numbers: its blocks, their linear layers, its tables and its norms; and its own code.

A model is a table of embeddings, `num_layers` blocks and a head. The blocks are alike, with two exceptions that are
counted rather than listed: mixture-of-experts models may have `num_dense_layers` blocks with a dense feed-forward layer
(`dense_linears` in place of `linears`), and in `num_sliding_layers` blocks a token sees the last `sliding_window`
tokens only. No formula depends on which blocks they are. `block_parameters` sums over all blocks;
`parameters_per_block` is one block of the usual kind.

A shape comes from a config (`readers`), or is described from the model itself (`is_described`), which works for any
architecture: its sums are then exact as well, and its structure is what the modules show.

Code that comes with a model runs only if `model.trust_remote_code` names the model's own repository or folder. A run
has its own copy of the files, and every process runs them only while their SHA-256 is the planned one. No code is taken
from a checkpoint or an export.
"""

from enum import StrEnum
from typing import Any

from shardwise.trainer.spec.model.blocks import Linear as Linear
from shardwise.trainer.spec.model.blocks import TracedBlocks
from shardwise.trainer.spec.strategy import Attention, LossHead, Quant
from shardwise.trainer.spec.value import Value


class Norm(StrEnum):
    """The normalisation of a block: RMSNorm runs as a chain of kernels, LayerNorm as one."""

    RMS = "rms"
    LAYER = "layer"


class Positions(StrEnum):
    """Encoding of token positions: rotated queries and keys, a learned table, or a bias of the scores."""

    ROTARY = "rotary"
    LEARNED = "learned"
    ALIBI = "alibi"


class ModelShape(Value, frozen=True, kw_only=True, cache_hash=True):
    """Dimensions of a model; sizes are elements."""

    model_type: str
    block_class: str  # the class FSDP wraps and checkpointing recomputes, in transformers
    vocab_size: int
    hidden_size: int
    ffn_size: int  # of one expert, if there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None
    is_tied: bool  # lm_head shares the embedding's weight
    linears: tuple[Linear, ...]  # of one block, in the order they run
    num_dense_layers: int = 0  # blocks among `num_layers` that have `dense_linears` instead: no experts
    dense_linears: tuple[Linear, ...] = ()
    norm: Norm = Norm.RMS
    norm_parameters_per_block: int = 0
    is_gated: bool = True
    sliding_window: int | None = None
    num_sliding_layers: int = 0  # blocks whose attention stays within `sliding_window`
    positions: Positions = Positions.ROTARY
    rotary_dim: int | None = None  # of each head; None: the whole head
    position_parameters: int = 0  # of a learned table
    final_norm_parameters: int | None = None  # None: hidden_size
    head_bias_parameters: int = 0
    embedding_norm_parameters: int = 0
    num_norms: int = 2  # of a block, norms of query and key not counted
    has_qk_norm: bool = False
    is_parallel: bool = False  # attention and MLP read the block's input and are added together
    activation: str = "silu"
    num_experts: int = 1
    experts_per_token: int = 1
    hidden_dropout: float = 0.0  # of the residual branches
    attention_dropout: float = 0.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attentions: tuple[Attention, ...] = (Attention.FLASH, Attention.SDPA, Attention.EAGER)  # that transformers offers
    is_described: bool = False  # from the model itself: the closed form does not know the activations of its blocks
    other_parameters: int = 0  # that no field counts, of a described model; negative if blocks share weights
    loss_obstacle: str | None = None  # why no loss here is this model's
    loss_heads: tuple[LossHead, ...] = tuple(LossHead)  # that compute its loss; `eager` alone for logits of its own
    has_router_loss: bool = False  # transformers has a loss that balances its experts
    quant: Quant | None = None  # of a base that is stored in 4 bit
    packed_linears: int | None = None  # weights of the blocks' linear layers that it stores so; None: all of them are
    packing_obstacle: str | None = None  # why packed documents are not learned as alone, or not known to be
    is_packing_measured: bool = True  # the obstacle is a fact, and not the lack of a measurement
    traced: TracedBlocks | None = None  # what a dry run of one block of each kind measured

    @property
    def has_form(self) -> bool:
        """True if the activations of its blocks are known: by a closed form, or by a trace."""
        return not self.is_described or self.traced is not None

    @property
    def timed(self) -> TracedBlocks | None:
        """The traces that the time of a step follows from: those of a model whose operations no form counts."""
        return self.traced if self.is_described else None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linear_parameters_per_block(self) -> int:
        """Weights of the linear layers of one block, biases left out, every expert counted."""
        return sum(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in self.linears)

    @property
    def parameters_per_block(self) -> int:
        """Parameters of a block of the usual kind, which has experts if only some blocks have."""
        return sum(linear.num_parameters for linear in self.linears) + self.norm_parameters_per_block

    @property
    def dense_parameters_per_block(self) -> int:
        return sum(linear.num_parameters for linear in self.dense_linears) + self.norm_parameters_per_block

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks, biases left out, every expert counted."""
        dense = sum(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in self.dense_linears)
        num_usual = self.num_layers - self.num_dense_layers
        return num_usual * self.linear_parameters_per_block + self.num_dense_layers * dense

    @property
    def block_parameters(self) -> int:
        """Parameters of all blocks."""
        num_usual = self.num_layers - self.num_dense_layers
        return num_usual * self.parameters_per_block + self.num_dense_layers * self.dense_parameters_per_block

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter; all experts of a layer are one."""
        linears = self.linears + self.dense_linears
        weights = (linear.num_copies * linear.num_inputs * linear.num_outputs for linear in linears)
        return max(self.embedding_parameters, self.position_parameters, *weights)

    @property
    def head_parameters(self) -> int:
        """Weights of lm_head that are not the embedding's."""
        return 0 if self.is_tied else self.embedding_parameters

    @property
    def num_parameters(self) -> int:
        return (
            self.block_parameters
            + self.embedding_parameters
            + self.head_parameters
            + self.head_bias_parameters
            + self.position_parameters
            + self.embedding_norm_parameters
            + (self.hidden_size if self.final_norm_parameters is None else self.final_norm_parameters)
            + self.other_parameters
        )


class ModelCode(Value, frozen=True, kw_only=True):
    """The Python files of one model."""

    repository: str  # as the job names it: ORG/NAME, or a path
    revision: str | None  # the commit, if it is from the hub
    folder: str  # absolute; of a run, the copy in its directory
    files: dict[str, str]  # sha256 by path below `folder`: the two that config.json names and what they import
    config_class: str  # MODULE.CLASS, as config.json has it
    model_class: str

    @property
    def description(self) -> str:
        """One line for the plan."""
        at = f" at {self.revision}" if self.revision is not None else ""
        return f"code of {self.repository}{at} runs ({', '.join(sorted(self.files))})"


class DescriptionRequest(Value, frozen=True, kw_only=True):
    """Request for the shape of a model."""

    model_config: dict[str, Any]
    origin: str  # names the config in messages
    model_code: ModelCode | None = None
    offers_code_of: str | None = None  # the value of `model.trust_remote_code` that lets its code run
