"""Work of a step: FLOPs, bytes through the device's memory, operators the host starts.

Bytes of one element in one forward, counted from the kernels that run; a backward moves twice as many:

    RMSNorm     36 as transformers writes it (a chain that rounds up to fp32 and back), 28 on fp32, 2 r fused
    LayerNorm   2 r: one kernel; r bytes an element of the residual stream
    residual    3 r; with dropout 5 more for a mask
    rotary      20, fused 4; queries and keys are moved once more, 4, to where attention wants them
    activation  gated 10, fused 6; one matrix 4, and 0 where the compiler joins it to its neighbours
    adapter     4 an input and 8 an output in 16 bit; fp32 matrices on 16-bit layers 23 and 12: inputs cast and saved.
                In our runtime without dropout 2 and 5, and 10 and 5: an input is cast to fp32 and back, 12, and so is
                its gradient, which is added, 6; an output is scaled and added, 10, and its gradient scaled, 4. Fused
                4/3 and 4/3: its products read and write the sum once, 4, of an output forwards, an input backwards
    DoRA        24 an output in 16 bit, 48 in fp32; for the row norms of a weight i x o, at any batch size,
                4 i i + 14 i o in 16 bit, 12 i i + 38 i o in fp32
    autocast    6 an input of every linear layer, since activations are fp32 until a product casts them
    experts     12 an element of a token's hidden state for each expert it is sent to and fetched from

Nothing here is fitted. Operators are counted the same way: views, attention and residual 8 a block, one a linear
layer, 6 a norm, 10 for rotary embeddings, 10 an adapter, 30 with DoRA, 8 an NF4 layer, 20 a unit of FSDP, 20 a
block's experts: transformers sorts tokens by expert and multiplies in groups, however many experts there are. Programs
that loop over experts start 5 for each, and 12 more with adapters: of 128 experts that is most of a step.
"""

from collections.abc import Callable
from functools import lru_cache

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration
from shardwise.trainer.planning.memory.traced import mode_of, nearest
from shardwise.trainer.planning.policy.precision_policy import adapts_all, is_adapted, traced_adapters
from shardwise.trainer.planning.policy.reference_trainers import reference_of
from shardwise.trainer.spec.model.blocks import Amount, ModeTrace, Part, TracedBlocks
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm, Positions
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.value import Value

# Bytes of a logit through memory in forward and backward; chunked computes its slices twice in plain torch.
LOGIT_BYTES = {LossHead.EAGER: 40, LossHead.CHUNKED: 64, LossHead.FUSED: 14, LossHead.FUSED_LINEAR: 10}
# Of our own `fused`, plain torch in slices: forward 30 (cast, highest, difference, exponential, sum), backward 36.
OWN_FUSED_LOGIT_BYTES = 66
# Of the head's weight, for each slice of `chunked`: read three times, in fp32 added to a gradient that is written once.
SLICE_WEIGHT_BYTES, SLICE_GRADIENT_BYTES = 6, 12
# The same of `fused_linear`: read twice; added to an fp32 gradient by the product itself.
LIGER_WEIGHT_BYTES, LIGER_GRADIENT_BYTES = 4, 8
SLICE_OPERATORS = 24  # forward and backward
FUSED_OPERATORS = 4  # of an adapter fused with its layer, forwards: a cast of each matrix, a product, one that adds
TILE_TOKENS = 128  # rows of a tile of a matrix product; of each expert's last tile half is empty, on average
_AGAIN = {Checkpointing.NONE: 0.0, Checkpointing.SELECTIVE: 0.5, Checkpointing.ATTENTION: 0.1}


class LinearWork(Value, frozen=True, kw_only=True):
    """Linear layers of equal size, over all blocks."""

    num_layers: int
    inputs: int
    outputs: int
    num_copies: int
    num_used: int


class Work(Value, frozen=True, kw_only=True):
    """The sizes of a model that decide its speed, summed once for thousands of estimates; elements, over all blocks."""

    linears: tuple[LinearWork, ...]
    linear_inputs: int  # of a token
    linear_parameters: int
    parameters: int
    used_parameters: int  # that a token is multiplied with, embeddings included
    table: int
    num_tables: int
    normed: int  # elements that norms read, of a token
    added: int  # elements of residual additions
    rotated: int
    moved: int  # queries, keys and values on their way to attention
    activated: int
    routed: int
    scored: int  # query elements in blocks that see the whole row
    scored_in_window: int
    attended: float  # query elements in all blocks with attention
    blocks: int
    linear_operators: int
    expert_copies: int  # experts of all blocks
    plain_operators: int
    fused_operators: int
    has_layer_norm: bool
    is_gated: bool
    has_dropout: bool
    traced: TracedBlocks | None = None


class Adapters(Value, frozen=True, kw_only=True):
    """The low-rank matrices of a configuration, over all blocks."""

    count: int = 0
    inputs: int = 0
    outputs: int = 0
    squares: int = 0  # of the inputs
    weights: int = 0  # elements of the adapted layers
    of_experts: int = 0  # inputs and outputs of experts in one tensor, whose weights are made anew

    @property
    def sizes(self) -> int:
        return self.inputs + self.outputs + self.of_experts


_NO_ADAPTERS = Adapters()


@lru_cache(maxsize=256)
def work_of(shape: ModelShape) -> Work:
    """The sizes that the formulas use."""
    blocks, groups = shape.num_layers, _groups(shape)
    has_layer_norm = shape.norm is Norm.LAYER
    query, kv, hidden = shape.query_size, shape.kv_size, shape.hidden_size
    rotates = shape.positions is Positions.ROTARY
    rotary_share = (shape.rotary_dim or shape.head_dim) / shape.head_dim if rotates else 0.0
    linears = sum(group.num_layers for group in groups)
    expert_operators = 20 * (blocks - shape.num_dense_layers) if shape.num_experts > 1 else 0
    # views, attention, residual; then what is fused or a chain of kernels
    plain = 8 + shape.num_norms * (1 if has_layer_norm else 6) + (10 if rotates else 0) + 1 + shape.is_gated
    fused = 8 + shape.num_norms + (2 if rotates else 0) + 1
    windowed = shape.num_sliding_layers if shape.sliding_window else 0
    scored, scored_in_window = (blocks - windowed) * query, windowed * query
    traced = shape.timed
    if traced is not None:
        scored, scored_in_window = _scored(shape, traced)
    return Work(
        linears=groups,
        linear_inputs=sum(group.num_layers * group.num_used * group.inputs for group in groups),
        linear_parameters=sum(group.num_layers * group.num_copies * group.inputs * group.outputs for group in groups),
        parameters=shape.num_parameters,
        used_parameters=shape.num_parameters
        - sum(
            group.num_layers * (group.num_copies - group.num_used) * group.inputs * group.outputs for group in groups
        ),
        table=shape.embedding_parameters,
        num_tables=1 if shape.is_tied else 2,
        normed=blocks * (shape.num_norms * hidden + (query + kv if shape.has_qk_norm else 0)),
        added=blocks * 2 * hidden,
        rotated=round(blocks * rotary_share * (query + kv)),
        moved=blocks * (query + kv),
        activated=blocks * shape.ffn_size * shape.experts_per_token + _shared_experts(shape),
        routed=(blocks - shape.num_dense_layers) * hidden * shape.experts_per_token if shape.num_experts > 1 else 0,
        scored=scored,
        scored_in_window=scored_in_window,
        attended=blocks * query if traced is None else _attended(traced),
        blocks=blocks,
        linear_operators=linears,
        expert_copies=(blocks - shape.num_dense_layers) * shape.num_experts if shape.num_experts > 1 else 0,
        plain_operators=blocks * plain + linears + expert_operators,
        fused_operators=blocks * fused + linears + expert_operators,
        has_layer_norm=has_layer_norm,
        is_gated=shape.is_gated,
        has_dropout=shape.hidden_dropout > 0,
        traced=traced,
    )


def traced_run(configuration: Configuration, traced: TracedBlocks) -> ModeTrace:
    """The traced run that is nearest to a configuration."""
    return nearest(traced, mode_of(configuration, is_autocast=is_autocast(configuration)))


def per_token(configuration: Configuration, traced: TracedBlocks, amount_of: Callable[[Part], Amount]) -> float:
    """An amount of one forward of all parts, of one token of a micro batch."""
    run, length = traced_run(configuration, traced), configuration.policy.longest_seq or configuration.seq_len
    tokens = tokens_computed(configuration)
    parts = (run.before, run.after, *(run.blocks[kind] for kind in traced.order))
    return sum(amount_of(part).at(tokens, length) for part in parts) / tokens


def _groups(shape: ModelShape) -> tuple[LinearWork, ...]:
    counts: dict[tuple[int, int, int, int], int] = {}
    for num_blocks, linears in _kinds(shape):
        for linear in linears if num_blocks else ():
            key = (linear.num_inputs, linear.num_outputs, linear.num_copies, linear.num_used)
            counts[key] = counts.get(key, 0) + num_blocks
    return tuple(
        LinearWork(num_layers=count, inputs=inputs, outputs=outputs, num_copies=copies, num_used=used)
        for (inputs, outputs, copies, used), count in counts.items()
    )


def _kinds(shape: ModelShape) -> list[tuple[int, tuple[Linear, ...]]]:
    """(number of blocks, linear layers of one) of each kind of block."""
    if shape.timed is not None:
        return [(shape.timed.order.count(place), kind.linears) for place, kind in enumerate(shape.timed.kinds)]
    return [
        (shape.num_layers - shape.num_dense_layers, shape.linears),
        (shape.num_dense_layers, shape.dense_linears),
    ]


def _attended(traced: TracedBlocks) -> float:
    return sum(traced.modes[0].blocks[kind].attended for kind in traced.order)


def _scored(shape: ModelShape, traced: TracedBlocks) -> tuple[int, int]:
    """Query elements of all blocks that see the whole row, and of those with a window, where a kernel reads them."""
    run = next((run for run in traced.modes if run.mode.attention is not Attention.EAGER), traced.modes[0])
    whole = windowed = 0.0
    for kind in traced.order:
        if traced.kinds[kind].window == shape.sliding_window is not None:
            windowed += run.blocks[kind].scored
        else:
            whole += run.blocks[kind].scored
    return round(whole), round(windowed)


def _shared_experts(shape: ModelShape) -> int:
    """Shared experts, which every token passes besides its own."""
    if shape.num_experts == 1:
        return 0
    shared = sum(linear.num_inputs for linear in shape.linears if linear.name == "down_proj")
    return (shape.num_layers - shape.num_dense_layers) * shared


def adapters_of(shape: ModelShape, configuration: Configuration) -> Adapters:
    """The adapters of a setting; none for methods without."""
    if shape.timed is not None and configuration.method.freezes_base:
        return _traced_adapters(shape.timed, configuration.method, configuration.lora.rank)
    return _adapters(shape, configuration.lora.targets) if configuration.method.freezes_base else _NO_ADAPTERS


@lru_cache(maxsize=16)
def _traced_adapters(traced: TracedBlocks, method: Method, rank: int) -> Adapters:
    found = [(traced.order.count(place), kind) for place, kind in enumerate(traced_adapters(traced, method))]
    modules = [(count, each) for count, kind in found for each in kind if each.num_inputs]
    return Adapters(
        count=sum(count for count, _ in modules),
        inputs=sum(count * each.num_inputs for count, each in modules),
        outputs=sum(count * each.num_outputs for count, each in modules),
        squares=sum(count * each.num_inputs**2 for count, each in modules),
        weights=sum(count * each.num_inputs * each.num_outputs for count, each in modules),
        of_experts=sum(
            count * each.num_elements // rank for count, kind in found for each in kind if not each.num_inputs
        ),
    )


@lru_cache(maxsize=256)
def _adapters(shape: ModelShape, targets: tuple[str, ...]) -> Adapters:
    usual, dense = (
        [each for each in linears if is_adapted(each, targets) and (each.is_linear_module or each.num_copies == 1)]
        for linears in (shape.linears, shape.dense_linears)
    )
    weights = [(shape.num_layers - shape.num_dense_layers, usual), (shape.num_dense_layers, dense)]
    return Adapters(
        count=sum(blocks * len(linears) for blocks, linears in weights),
        inputs=sum(blocks * linear.num_inputs for blocks, linears in weights for linear in linears),
        outputs=sum(blocks * linear.num_outputs for blocks, linears in weights for linear in linears),
        squares=sum(blocks * linear.num_inputs**2 for blocks, linears in weights for linear in linears),
        weights=sum(
            blocks * linear.num_inputs * linear.num_outputs for blocks, linears in weights for linear in linears
        ),
    )


def trained_parameters(configuration: Configuration, work: Work, adapters: Adapters) -> int:
    if not configuration.method.freezes_base:
        return work.parameters
    return configuration.lora.rank * adapters.sizes + (adapters.outputs if configuration.lora.dora else 0)


def tokens_computed(configuration: Configuration) -> int:
    """Tokens of a micro batch with padding: every row is as long as the longest."""
    policy = configuration.policy
    return configuration.micro_batch * policy.rows_per_example * (policy.longest_seq or configuration.seq_len)


def recomputation(configuration: Configuration) -> float:
    """How much of a block's forward runs again in its backward."""
    if configuration.checkpointing is Checkpointing.EVERY_N:
        return 1 / (configuration.checkpoint_every_n or 1)
    return _AGAIN.get(configuration.checkpointing, 1.0)


def has_fused_kernels(configuration: Configuration) -> bool:
    """True if norms and rotary embeddings are one kernel each."""
    return (
        configuration.compile
        or configuration.fused_kernels
        or (configuration.loss is not LossHead.EAGER and reference_of(configuration.reference).has_fused_kernels)
    )


def is_autocast(configuration: Configuration) -> bool:
    """True if torch.autocast casts fp32 weights and activations: mixed precision without an engine of its own."""
    sharding, precision = configuration.strategy.sharding, configuration.strategy.precision
    return precision not in (Precision.FP32, Precision.BF16) and sharding.is_replicated


def elementwise_bytes(configuration: Configuration, work: Work, adapters: Adapters) -> float:
    """Bytes that one token moves outside matrix products in one forward of all blocks."""
    if work.traced is not None:
        return per_token(configuration, work.traced, lambda part: part.moved)
    is_fused, width = has_fused_kernels(configuration), configuration.strategy.precision.compute_bytes / 2
    casts = is_autocast(configuration) and not configuration.method.freezes_base
    residual = configuration.policy.residual_bytes or (4 if casts else 2 * width)
    norm = 2 * residual if is_fused or work.has_layer_norm else 36 if residual == 2 else 28
    moved = norm * work.normed + (3 * residual + 5 * work.has_dropout) * work.added
    rotary = 4 if is_fused else 20
    moved += width * (
        rotary * work.rotated
        + 4 * work.moved
        + _activation_bytes(configuration, work, is_fused=is_fused) * work.activated
    )
    moved += width * reference_of(configuration.reference).routed_bytes * work.routed
    if casts:
        moved += 6 * work.linear_inputs
    per_input, per_output = _adapter_bytes(configuration)
    return moved + per_input * adapters.inputs + per_output * adapters.outputs


def _activation_bytes(configuration: Configuration, work: Work, *, is_fused: bool) -> int:
    if work.is_gated:
        return 6 if is_fused else 10
    return 0 if configuration.compile else 4


def _adapter_bytes(configuration: Configuration) -> tuple[float, float]:
    """Bytes of each input and output that an adapter moves in addition to its products."""
    if configuration.fused_adapters:
        return 4 / 3, 4 / 3
    reference, precision = reference_of(configuration.reference), configuration.strategy.precision
    own = configuration.policy.adapter_bytes or reference.adapter_bytes or precision.master_bytes
    is_fused = configuration.compile or (
        reference.fuses_adapters and configuration.method is Method.QLORA and configuration.loss is not LossHead.EAGER
    )
    in_one_type, is_dora = is_fused or own == precision.compute_bytes, configuration.lora.dora
    if reference is reference_of(SHARDWISE) and not is_dora and not configuration.lora.dropout:
        return 2 if in_one_type else 10, 5
    if in_one_type:
        return 2 * precision.compute_bytes, (12 if is_dora else 4) * precision.compute_bytes
    return 23, 48 if is_dora else 12


def weight_norm_bytes(configuration: Configuration, adapters: Adapters) -> float:
    """Bytes that DoRA moves in one forward for the lengths of its weights' rows."""
    if not configuration.lora.dora:
        return 0.0
    width, reference = configuration.strategy.precision.compute_bytes, reference_of(configuration.reference)
    own = configuration.policy.adapter_bytes or reference.adapter_bytes or configuration.strategy.precision.master_bytes
    if own == width:  # identity written and read; product, its multiple, sum and length
        return 2 * width * adapters.squares + 7 * width * adapters.weights
    return 12 * adapters.squares + 38 * adapters.weights


def _expert_operators(configuration: Configuration) -> int:
    """Operators of one expert by itself: three products and a gated activation, and of each adapter four more."""
    is_adapted = configuration.method.freezes_base and adapts_all(configuration)
    return 5 + 12 * is_adapted


def operators(configuration: Configuration, work: Work, adapters: Adapters) -> int:
    """Operators that the host starts in one forward of all blocks."""
    is_fused = has_fused_kernels(configuration)
    count = work.fused_operators if is_fused else work.plain_operators
    of_adapter = FUSED_OPERATORS if configuration.fused_adapters else 4 if configuration.compile else 10
    count += of_adapter * (3 if configuration.lora.dora else 1) * adapters.count
    if configuration.policy.loops_over_experts:
        count += work.expert_copies * _expert_operators(configuration)
    if work.traced is not None:
        run = traced_run(configuration, work.traced)
        count = sum(run.blocks[kind].operators for kind in work.traced.order)
    if configuration.method is Method.QLORA:
        count += (2 if configuration.compile else 8) * work.linear_operators
    if configuration.strategy.sharding.is_replicated:
        return count
    units = work.blocks
    if reference_of(configuration.reference).wraps_adapters:
        units += 2 * adapters.count
    return count + 20 * units
