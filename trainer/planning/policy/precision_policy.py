"""Precision policy: the dtype of every kind of tensor, the attention kernel and the casts, all of which decide bytes.

Ours, unless the configuration names a reference trainer (`reference_trainers`) or sets a value itself:

    none, ddp    a Hugging Face model in the type of its master weights; torch.autocast in mixed precision, which casts
                 every weight once (cached until the forward ends) and the input of every linear layer;
                 the residual stream stays fp32
    zero*        DeepSpeed's 16-bit engine: the whole model is 16 bit, masters are the engine's partition
    fsdp*, hsdp  FSDP2: shards in the type of the master weights, gathered in the computing type, gradients reduced in
                 the type of the master weights; the model sees 16 bit only
    lora, qlora  frozen base in the computing type, adapters in fp32 (16 bit where the whole precision is)

`Dims` holds the sizes of a model, summed once for thousands of estimates: its matrices, and the numbers of tensors that
a block makes (norms and their readers, fused projections, tensors saved by the activation function). Differences of
transformers' modelling files are listed by model type only if no field of a config determines them.

Everything here is a function of model, configuration and device alone.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration, once, same_for_all
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.policy.reference_trainers import AdapterInputs, ReferenceTrainer, reference_of
from shardwise.trainer.spec.fp8 import FP8_RECIPES, Fp8Package, Shape
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.blocks import Adapter, Component, TracedBlocks
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm, Positions
from shardwise.trainer.spec.optimizers import Pieces
from shardwise.trainer.spec.plan import Coverage
from shardwise.trainer.spec.strategy import (
    Attention,
    AttentionKernel,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Precision,
    Quant,
    sdpa_kernel,
)
from shardwise.trainer.spec.value import Value


class Dims(Value, frozen=True, kw_only=True, cache_hash=True):
    """The sizes of a model in elements, summed once for thousands of estimates."""

    vocab: int
    hidden: int
    ffn: int  # of one expert, where there are experts
    layers: int
    heads: int
    kv_heads: int
    query: int
    kv: int
    is_tied: bool
    linear: int  # weights of the linear layers of a block
    block: int
    attention: int  # of those, weights of attention
    block_linears: int  # weights of the linear layers of all blocks
    quant: Quant | None  # of a base that is stored in 4 bit
    embedding: int
    head: int  # 0 where tied
    parameters: int
    mask_buffer: int  # bytes of a causal mask that the model itself owns
    root: int  # parameters outside the blocks
    largest_tensor: int
    linears: tuple[tuple[str, int, int], ...]  # name, inputs, outputs
    products: tuple[tuple[str, int], ...]  # name, and outputs of a token: of experts, of those it goes to
    modules: tuple[tuple[str, int, int], ...]  # of those, what an adapter can be put on
    bare_adapter_elements: int  # of a block and a rank of 1: adapters on parameters that are no modules, experts
    bare_adapted_weights: int  # the weights that those change
    matrices: tuple[tuple[int, int, int], ...]  # inputs, outputs, copies; of a block
    # How the block is built:
    norm: Norm
    num_norms: int
    num_norm_inputs: int  # different tensors that norms read
    num_norm_outputs: int  # different tensors that linear layers read from norms
    num_normed_linears: int  # linear layers that read them
    has_fp32_norms: bool  # weights applied in fp32: the normalised input is saved in fp32; a LayerNorm copies its input
    has_centred_norms: bool  # LayerNorms written out in Python: they save their input less its mean twice
    begins_with_norm: bool
    ends_with_norm: bool  # the output of the feed-forward half is normalised
    has_qk_norm: bool
    has_rotary: bool
    rotary_dim: int  # elements of a head that are rotated
    is_rotary_joined: bool  # rotated part and rest concatenated: attention's output is copied for its product
    is_qkv_fused: bool  # one tensor, which its views keep alive
    window: int | None  # of `windowed_layers` blocks
    windowed_layers: int
    is_gated: bool
    is_gate_up_fused: bool
    activation: str
    shared_ffn: int  # of the expert that every token passes; 0 where there is none
    experts: int
    experts_per_token: int  # 0 where there are no experts
    broadcasts_heads: bool  # attention receives fewer key than query heads, which no fused kernel supports
    masks_documents: bool  # documents of packed rows are separated by a mask of row x row
    caps_scores: bool
    caps_logits: bool
    has_hidden_dropout: bool
    kinds: tuple[tuple[int, tuple[Linear, ...]], ...]  # number of blocks and linear layers of each kind of block
    packed_linears: (
        int  # of block_linears, what a 4-bit base packs: those of linear modules, or what its files have packed
    )
    traced: TracedBlocks | None = None

    def matrices_of_all(self) -> Iterator[tuple[int, int, int]]:
        """(inputs, outputs, copies) of the linear layers of all blocks."""
        for num_blocks, linears in self.kinds:
            for linear in linears:
                yield linear.num_inputs, linear.num_outputs, num_blocks * linear.num_copies

    @property
    def head_group(self) -> int:
        """Elements of a head with the last norm, which may have no weights."""
        return self.head + min(self.hidden, self.root - self.embedding - self.head)


@lru_cache(maxsize=64)
def dims_of(shape: ModelShape, *, uses_traces: bool = True) -> Dims:
    """The sizes that the formulas use."""
    dims = _dims(shape)
    if shape.traced is not None and uses_traces:
        dims = _of_kinds(dims, shape.traced)
    return dims if shape.packed_linears is None else replace(dims, packed_linears=shape.packed_linears)


def dims_for(shape: ModelShape, configuration: Configuration) -> Dims:
    """The sizes for a configuration: blocks are traced in plain torch, so that a closed form, if any, counts others."""
    is_plain = not (configuration.compile or configuration.fused_kernels or configuration.fused_adapters)
    is_as_traced = is_plain and configuration.checkpointing in TRACED_CHECKPOINTING
    return dims_of(shape, uses_traces=shape.is_described or is_as_traced)


_ALL_LINEAR = ("all-linear",)
TRACED_CHECKPOINTING = (Checkpointing.NONE, Checkpointing.FULL, Checkpointing.EVERY_N)


def _of_kinds(dims: Dims, traced: TracedBlocks) -> Dims:
    """The sizes of a model whose blocks are of the traced kinds; those of one block are of the largest kind."""
    kinds = tuple((traced.order.count(number), kind) for number, kind in enumerate(traced.kinds))
    largest = max(traced.kinds, key=lambda kind: kind.num_parameters)
    in_blocks = sum(count * kind.num_parameters for count, kind in kinds)
    return replace(
        dims,
        linear=sum(each.num_copies * each.num_inputs * each.num_outputs for each in largest.linears),
        block=largest.num_parameters,
        block_linears=sum(
            count * each.num_copies * each.num_inputs * each.num_outputs
            for count, kind in kinds
            for each in kind.linears
        ),
        root=dims.parameters - in_blocks,
        largest_tensor=max(
            dims.embedding, *(rows * elements for _, kind in kinds for rows, elements, _ in kind.tensors)
        ),
        kinds=tuple((count, kind.linears) for count, kind in kinds),
        packed_linears=_packed((count, kind.linears) for count, kind in kinds),
        traced=traced,
    )


def _packed(kinds: Iterable[tuple[int, tuple[Linear, ...]]]) -> int:
    return sum(
        count * each.num_copies * each.num_inputs * each.num_outputs
        for count, linears in kinds
        for each in linears
        if is_packed(each)
    )


def is_packed(linear: Linear) -> bool:
    """True if a 4-bit base stores this layer so: bitsandbytes packs modules, and no tensor of experts."""
    return linear.is_linear_module


def is_adapted(linear: Linear, targets: tuple[str, ...]) -> bool:
    """True if a layer, or all experts of one, get an adapter."""
    return linear.adapter_rank_factor > 0 if targets == _ALL_LINEAR else linear.name in targets


def coverage_of(configuration: Configuration, dims: Dims) -> tuple[Coverage, ...]:
    """What adapters and 4-bit storage cover of each part of the blocks; nothing for methods without adapters."""
    if not configuration.method.freezes_base:
        return ()
    counts: dict[Component, list[int]] = {}
    for num_blocks, linears in dims.kinds:
        for each in linears:
            found = counts.setdefault(each.component, [0, 0, 0])
            num_weights = num_blocks * each.num_weights
            for place, counts_it in enumerate((True, is_adapted(each, configuration.lora.targets), is_packed(each))):
                found[place] += num_weights * counts_it
    shows_packed = configuration.method is Method.QLORA and dims.quant is None
    return tuple(
        Coverage(
            component=component,
            num_weights=num_weights,
            num_adapted=num_adapted,
            num_packed=num_packed if shows_packed else None,
        )
        for component in Component
        for num_weights, num_adapted, num_packed in (counts.get(component, (0, 0, 0)),)
        if num_weights
    )


def _dims(shape: ModelShape) -> Dims:
    linears = shape.linears
    kinds = ((shape.num_layers - shape.num_dense_layers, linears), (shape.num_dense_layers, shape.dense_linears))
    return Dims(
        vocab=shape.vocab_size,
        hidden=shape.hidden_size,
        ffn=shape.ffn_size,
        layers=shape.num_layers,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        query=shape.query_size,
        kv=shape.kv_size,
        is_tied=shape.is_tied,
        linear=shape.linear_parameters_per_block,
        block=shape.parameters_per_block,
        attention=sum(linear.num_inputs * linear.num_outputs for linear in _attention_linears(shape)),
        block_linears=shape.linear_parameters,
        quant=shape.quant,
        embedding=shape.embedding_parameters,
        head=shape.head_parameters,
        parameters=shape.num_parameters,
        mask_buffer=(shape.max_positions or 0) ** 2 if shape.model_type in _MASK_OWNERS else 0,
        root=shape.num_parameters - shape.block_parameters,
        largest_tensor=max(
            shape.embedding_parameters,
            *(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in linears),
        ),
        linears=tuple((linear.name, linear.num_inputs, linear.num_outputs) for linear in linears),
        products=tuple((linear.name, linear.num_used * linear.num_outputs) for linear in linears),
        modules=tuple(
            (linear.name, linear.num_inputs, linear.num_outputs)
            for linear in linears
            if linear.is_linear_module and is_adapted(linear, _ALL_LINEAR)
        ),
        **_bare_adapters(shape),
        matrices=tuple((linear.num_inputs, linear.num_outputs, linear.num_copies) for linear in linears),
        kinds=kinds,
        packed_linears=_packed(kinds),
        **_structure(shape),
    )


_FUSED_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
_FUSED_GATE_UP = "gate_up_proj"
_MASK_OWNERS = ("gpt_bigcode",)
MASKED_DOCUMENTS = ("falcon", "mpt", "opt")  # as `runtime/attention/packed.py` has it
_JOINED_ROTARY = ("phi3", "gpt_neox", "stablelm", "phi", "glm", "glm4")
_FP32_NORMS = ("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "cohere")
_POST_NORMS = ("olmo2", "olmo3")  # which normalise the output of each half, and not its input


def _attention_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """They come first: one fused product or three, and the output."""
    return shape.linears[: 2 if shape.linears[0].name in _FUSED_QKV else 4]


def _bare_adapters(shape: ModelShape) -> dict[str, Any]:
    bare = [each for each in shape.linears if not each.is_linear_module and is_adapted(each, _ALL_LINEAR)]
    return {
        "bare_adapter_elements": sum(
            linear.adapter_rank_factor * linear.num_copies * (linear.num_inputs + linear.num_outputs) for linear in bare
        ),
        "bare_adapted_weights": sum(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in bare),
    }


def _structure(shape: ModelShape) -> dict[str, Any]:
    """How many tensors of a kind one block makes."""
    names = [linear.name for linear in shape.linears]
    is_qkv_fused = names[0] in _FUSED_QKV
    has_experts = shape.num_experts > 1
    shared = [linear for linear in shape.linears if linear.name == "gate_proj"] if has_experts else []
    num_mlp_inputs = 1 if _FUSED_GATE_UP in names or not shape.is_gated else 2
    if has_experts:
        num_mlp_inputs = 3 if shared else 0  # gate, up and the gate of the shared expert
    num_inputs = shape.num_norms if not shape.is_parallel else 1
    return {
        "norm": shape.norm,
        "num_norms": shape.num_norms,
        "num_norm_inputs": num_inputs,
        "num_norm_outputs": min(2, shape.num_norms),
        "num_normed_linears": (1 if is_qkv_fused else 3) + num_mlp_inputs,
        "has_fp32_norms": shape.model_type in _FP32_NORMS,
        "has_centred_norms": shape.model_type == "cohere",
        "begins_with_norm": shape.model_type not in _POST_NORMS,
        "ends_with_norm": shape.model_type in _POST_NORMS or shape.num_norms == 4,
        "has_qk_norm": shape.has_qk_norm,
        "has_rotary": shape.positions is Positions.ROTARY,
        "rotary_dim": (shape.rotary_dim or shape.head_dim) if shape.positions is Positions.ROTARY else 0,
        "is_qkv_fused": is_qkv_fused,
        "is_gated": shape.is_gated,
        "is_gate_up_fused": _FUSED_GATE_UP in names,
        "activation": shape.activation,
        "window": shape.sliding_window,
        "windowed_layers": shape.num_sliding_layers,
        "is_rotary_joined": shape.rotary_dim is not None or shape.model_type in _JOINED_ROTARY,
        "shared_ffn": shared[0].num_outputs if shared else 0,
        "experts": shape.num_experts,
        "experts_per_token": shape.experts_per_token if has_experts else 0,
        "broadcasts_heads": shape.model_type == "falcon" and shape.num_kv_heads == 1 < shape.num_heads,
        "masks_documents": shape.model_type in MASKED_DOCUMENTS,
        "caps_scores": shape.attention_softcap is not None,
        "caps_logits": shape.logit_softcap is not None,
        "has_hidden_dropout": shape.hidden_dropout > 0,
    }


def adapter_parameters(configuration: Configuration, dims: Dims) -> int:
    """Elements of the adapters of one block, the largest, with magnitudes of DoRA; 0 where the method has none."""
    if configuration.method not in (Method.LORA, Method.QLORA):
        return 0
    if dims.traced is not None:
        return max(
            sum(each.num_elements for each in kind) for kind in traced_adapters(dims.traced, configuration.method)
        )
    adapted = adapted_linears(configuration, dims)
    elements = sum(i + o for _, i, o in adapted) + (dims.bare_adapter_elements if adapts_all(configuration) else 0)
    return configuration.lora.rank * elements + (sum(o for _, _, o in adapted) if configuration.lora.dora else 0)


def adapter_elements(configuration: Configuration, dims: Dims) -> int:
    """Elements of the adapters of all blocks, magnitudes of DoRA included."""
    if dims.traced is None:
        return dims.layers * adapter_parameters(configuration, dims)
    of_kinds = traced_adapters(dims.traced, configuration.method)
    counts = (count for count, _ in dims.kinds)
    return sum(count * sum(each.num_elements for each in kind) for count, kind in zip(counts, of_kinds, strict=True))


def traced_adapters(traced: TracedBlocks, method: Method) -> tuple[tuple[Adapter, ...], ...]:
    """The adapters of each kind of block; none for methods without."""
    runs = [run for run in traced.modes if run.adapters] if method.freezes_base else []
    same = next((run for run in runs if run.mode.method is method), runs[0] if runs else None)
    return ((),) * len(traced.kinds) if same is None else same.adapters


def adapts_all(configuration: Configuration) -> bool:
    return configuration.lora.targets == _ALL_LINEAR


def adapted_linears(configuration: Configuration, dims: Dims) -> tuple[tuple[str, int, int], ...]:
    """The linear layers of a block that carry an adapter."""
    if adapts_all(configuration):
        return dims.modules
    _, linears = dims.kinds[0]
    named = (each for each in linears if is_adapted(each, configuration.lora.targets))
    return tuple((each.name, each.num_inputs, each.num_outputs) for each in named)


__all__ = [
    "Dims",
    "PrecisionPolicy",
    "adapted_linears",
    "adapter_elements",
    "adapter_parameters",
    "adapts_all",
    "attention_kernel",
    "coverage_of",
    "dims_of",
    "is_adapted",
    "is_packed",
    "policy_of",
    "policy_of_one",
    "shard_degree",
    "traced_adapters",
]


class PrecisionPolicy(Value, frozen=True, kw_only=True, cache_hash=True):
    """Bytes of an element of each kind of tensor, and the degrees of sharding, of a configuration."""

    reference: ReferenceTrainer
    tokens: int  # of a micro batch on a rank
    seq_len: int  # of its longest row, which the others are padded to
    is_packed: bool  # rows of several documents, with positions of their own
    master_bytes: int  # of a model weight, as the optimizer would see it
    trained_bytes: int  # of a weight that is trained: an adapter, or any
    reduce_bytes: int  # of a gradient while ranks add it up
    weight_bytes: int  # as the parameter is stored on the device
    compute_bytes: int  # input of a matrix product
    residual_bytes: int  # residual stream
    sum_bytes: int  # an element of a matrix product's result, in addition to the result until that is complete
    adapter_inputs: AdapterInputs
    replicates_adapters: bool
    is_autocast: bool
    has_fp32_products: bool  # of 4-bit layers, in the type of their input: after autocast's LayerNorm, or DoRA
    is_fused: bool  # norms keep their input only: fused kernels, or torch.compile
    recomputes_gate: bool  # the backward of a gated activation makes the activated gate again
    is_checkpointed: bool
    updates_in_backward: bool  # each weight as soon as its gradient exists, which is then freed
    is_fp8: bool
    multiplies_by_te: bool  # Transformer Engine's layers, which save their inputs in FP8
    fp8_shapes: frozenset[Shape]  # of the linear layers that run in FP8
    is_frozen: bool  # base weights are not trained
    pieces: Pieces  # FLAT: the model in the computing type, and a partition in that of the masters
    shard_degree: int  # ranks that share what is sharded
    kernel: AttentionKernel
    repeats_kv: bool  # attention receives as many key and value heads as query heads
    is_cuda: bool
    is_hopper_or_later: bool


def policy_of(configuration: Configuration, device: Device, dims: Dims) -> PrecisionPolicy:
    """The precision policy of a configuration: that of its reference trainer, unless the configuration overrides it."""
    of_one = policy_of_one(configuration, device, dims)
    return replace(of_one, tokens=configuration.micro_batch * of_one.tokens)


@same_for_all(
    "strategy.sharding",
    "strategy.precision",
    "updates_in_backward",
    micro_batch=1,
    accumulation=1,
    checkpoint_every_n=None,
    loss_chunk_tokens=None,
    activation_offload=False,
    tf32=False,
    flash_kernel=None,
    buckets=None,
)
def policy_of_one(configuration: Configuration, device: Device, dims: Dims) -> PrecisionPolicy:
    """The same of a micro batch of one."""
    reference, choices = reference_of(configuration.reference), configuration.policy
    sharding, precision = configuration.strategy.sharding, configuration.strategy.precision
    compute, master = precision.compute_bytes, precision.master_bytes
    is_frozen = configuration.method.freezes_base
    pieces = sharding.facts.pieces
    is_mixed = precision not in (Precision.FP32, Precision.BF16)
    is_autocast = is_mixed and pieces is Pieces.WHOLE
    has_fp32_products = is_autocast and configuration.method is Method.QLORA
    has_fp32_products = has_fp32_products and (dims.norm is Norm.LAYER or configuration.lora.dora)
    fuses_adapters = (
        reference.fuses_adapters and configuration.method is Method.QLORA and configuration.loss is not LossHead.EAGER
    )
    replicates_adapters = fuses_adapters and pieces is Pieces.SHARDS
    trained = master
    if is_frozen:
        trained = choices.adapter_bytes or (compute if replicates_adapters else reference.adapter_bytes or master)
    seq_len = choices.longest_seq or configuration.seq_len
    kernel = attention_kernel(configuration, device, dims)
    fuses_blocks = configuration.compile or configuration.fused_kernels
    recipe = configuration.fp8_recipe
    return PrecisionPolicy(
        reference=reference,
        tokens=choices.rows_per_example * seq_len,
        seq_len=seq_len,
        is_packed=choices.document_tokens is not None,
        master_bytes=master,
        trained_bytes=trained,
        reduce_bytes=choices.reduce_bytes or reference.reduce_bytes or (2 if configuration.bf16_reduction else trained),
        weight_bytes=(reference.frozen_bytes or compute) if is_frozen else compute if pieces is Pieces.FLAT else master,
        compute_bytes=compute,
        residual_bytes=choices.residual_bytes
        or (4 if is_autocast and (not is_frozen or has_fp32_products) else compute),
        sum_bytes=4 if device.sums_bf16_apart and precision in (Precision.BF16_MIXED, Precision.BF16) else 0,
        has_fp32_products=has_fp32_products,
        adapter_inputs=AdapterInputs.FUSED
        if fuses_adapters
        else _adapter_inputs(
            reference,
            configuration,
            is_autocast=is_autocast
            and _casts_adapter_inputs(configuration, device, dims, has_fp32_products=has_fp32_products),
        ),
        replicates_adapters=replicates_adapters,
        is_autocast=is_autocast,
        is_fused=fuses_blocks or (reference.has_fused_kernels and configuration.loss is not LossHead.EAGER),
        recomputes_gate=fuses_blocks,
        is_checkpointed=configuration.checkpointing is not Checkpointing.NONE,
        updates_in_backward=configuration.updates_in_backward,
        is_fp8=precision is Precision.FP8,
        multiplies_by_te=recipe is not None and FP8_RECIPES[recipe].package is Fp8Package.TRANSFORMER_ENGINE,
        fp8_shapes=frozenset() if recipe is None else _converted(recipe, dims),
        is_frozen=is_frozen,
        pieces=pieces,
        shard_degree=shard_degree(configuration),
        kernel=kernel,
        repeats_kv=_repeats_kv(configuration, reference, kernel),
        is_cuda=device.kind is DeviceKind.CUDA,
        is_hopper_or_later=(device.compute_capability or (0, 0)) >= (9, 0),
    )


def _converted(recipe: Fp8Recipe, dims: Dims) -> frozenset[Shape]:
    return FP8_RECIPES[recipe].converts((i, o) for i, o, copies in dims.matrices if copies == 1)


def _casts_adapter_inputs(configuration: Configuration, device: Device, dims: Dims, *, has_fp32_products: bool) -> bool:
    """True if PEFT casts the input of an adapter to the adapter's dtype, so that autocast makes a copy for each.

    A 4-bit layer does so unless it sees autocast, and it looks for that of CUDA alone. A layer fused with its adapter
    saves a 16-bit input as it is; after a LayerNorm, which autocast runs in fp32, each one casts (an upper bound: the
    inputs of attention's output and of the last layer of the MLP are 16 bit).
    """
    if configuration.fused_adapters and dims.norm is not Norm.LAYER:
        return False
    return configuration.method is Method.LORA or has_fp32_products or device.kind is DeviceKind.CPU


def _adapter_inputs(reference: ReferenceTrainer, configuration: Configuration, *, is_autocast: bool) -> AdapterInputs:
    strategy = configuration.strategy
    is_cut = strategy.sharding.facts.pieces is Pieces.SHARDS
    if is_cut and strategy.precision is Precision.BF16 and reference.adapter_inputs_pure_fsdp:
        return reference.adapter_inputs_pure_fsdp
    # A 4-bit layer does not cast its adapter's input, which is 16 bit already unless a LayerNorm made it fp32.
    return reference.adapter_inputs or (AdapterInputs.AUTOCAST if is_autocast else AdapterInputs.SHARED)


def shard_degree(configuration: Configuration) -> int:
    """Number of ranks that state is sharded over; those of a group under hsdp."""
    sharding = configuration.strategy.sharding
    if sharding.facts.shards_within_group:
        return configuration.shard_group or max(1, min(configuration.ranks_per_node, configuration.num_ranks))
    return configuration.num_ranks if sharding.shards_optimizer else 1


def attention_kernel(configuration: Configuration, device: Device, dims: Dims) -> AttentionKernel:
    """The kernel that runs, without an attention mask: rows are padded on the right and attention is causal.

    flash-attn 1.x supports 16 bit from compute capability 7.5. For PyTorch's memory-efficient kernel our runtime
    repeats grouped key and value heads; a program that does not uses the sequence x sequence path.
    """
    is_16_bit = configuration.strategy.precision is not Precision.FP32
    repeats = configuration.reference == SHARDWISE or reference_of(configuration.reference).repeats_kv
    return _kernel(configuration.attention, device, dims, is_16_bit=is_16_bit, repeats_kv=repeats)


@once
def _kernel(attention: Attention, device: Device, dims: Dims, *, is_16_bit: bool, repeats_kv: bool) -> AttentionKernel:
    if attention is Attention.EAGER:
        return AttentionKernel.EAGER
    if device.kind is DeviceKind.CPU:
        return AttentionKernel.FLASH
    if dims.broadcasts_heads and attention is Attention.SDPA:
        return AttentionKernel.MATH
    capability = device.compute_capability
    if attention is Attention.FLASH and is_16_bit and (capability or (7, 5)) >= (7, 5):
        return AttentionKernel.FLASH
    kernel = sdpa_kernel(device.kind, capability, is_16_bit=is_16_bit, head_dim=dims.query // dims.heads)
    is_grouped = dims.kv_heads != dims.heads and not repeats_kv
    return AttentionKernel.MATH if is_grouped and kernel is not AttentionKernel.FLASH else kernel


def _repeats_kv(configuration: Configuration, reference: ReferenceTrainer, kernel: AttentionKernel) -> bool:
    return configuration.attention is Attention.SDPA and (reference.repeats_kv or kernel is AttentionKernel.EFFICIENT)
