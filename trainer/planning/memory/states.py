"""Model states: weights, gradients, masters and optimizer state, on one device, in host RAM and on NVMe.

A state belongs to the parameters, not to the batch: bytes an element times elements, divided by the ranks that share
it. P parameters, w bytes of a master weight, c of the computing type, N ranks (ZeRO, arXiv:1910.02054, section 5):

    none, ddp   w P weights, w P gradients, 2w P AdamW              16 B a parameter in mixed precision, 8 in pure bf16
    zero1       c P weights, c P gradients, (w + 2w) P / N          DeepSpeed keeps the whole 16-bit gradients
    zero2       c P weights, gradients / N, (w + 2w) P / N
    zero3       everything / N
    fsdp, hsdp  (w + w + 2w) P / N                                  no second copy: the shards are the masters
    qlora       0.5 B a base weight and its scales: 4/64 B, or 1/64 + 4/16384 B doubly quantised (QLoRA,
                arXiv:2305.14314); embeddings, head and norms stay in the computing type

Under offload the masters and the optimizer state move to pinned host RAM together with an fp32 gradient; the device
keeps the 16-bit weights (and not even those with `optimizer+params`). With NVMe host RAM has a window of buffers.
DeepSpeed and FSDP2 pin host RAM; FSDP2's optimizer state is created by torch and stays pageable.

Host RAM and NVMe of a node. An engine that shards weights loads shard by shard, one GPU or DDP copies each tensor to
the GPU as it is read, and QLoRA quantises it there: in addition to its own state a rank then holds at most one tensor
and one in transfer. Under `embedding_on_host` the frozen table of input embeddings stays in pageable host RAM, and the
rows of one micro batch pass through a pinned buffer. ZeRO-1 and ZeRO-2 build the whole model in host memory in the type
of its master weights, and FP8 converts the layers of a whole model: a node needs that many copies once, at the start,
and the offloaded state for the rest of the run. On a CPU device the model itself is the device's memory and is not
counted twice.

Optimizer state, per element: w = bytes of a master weight: AdamW two moments (2w); paged AdamW two in fp32; Lion one
(w); SGD without momentum none; 8-bit Adam two bytes and one fp32 scale per 256 elements and moment (bitsandbytes
`blocksize=256`; fp32 for small tensors); Adafactor and AdaLomo a row and a column per matrix; Muon one momentum for the
matrices of the blocks and AdamW for the rest; LOMO none. GaLore (arXiv:2403.03507) keeps the moments of an m x n
matrix, m >= n, as 2 r m and a projector r n; Adafactor looks for its projector in an fp32 gradient and keeps it so.

Temporaries of the step: `adamw` (foreach) computes the square root of every second moment at once (w an element);
`adamw_fused` none; the others work tensor by tensor, and need so many copies of the largest: Adafactor two, and two
more in 16 bit; Lion two; Muon three of a matrix, with foreach AdamW for other parameters; GaLore two of the embedding,
which is not projected, and a third for an untied head, and for a new projector it decomposes one fp32 gradient at a
time (torch.linalg.svd of galore_torch). DeepSpeed passes one flat partition to its optimizer, which is the largest
tensor then. bitsandbytes updates 8-bit state in one kernel, on a CPU in plain torch; LAMB also needs a scratch tensor.
torchao works on fp32 copies of one tensor's weight and state. Paged state is always that of bitsandbytes: torchao pages
none. transformers' Trainer keeps the embedding's state in fp32.

bitsandbytes and torchao keep the state of a tensor below 4,096 elements in fp32 at any bit width, and bitsandbytes
pages state from 100,000 elements on (`Optimizer8bit.get_state_buffer`): neither changes norms and the small sides of
adapters.
"""

from collections.abc import Iterator

from shardwise.trainer.planning.configuration import Configuration, same_for_all
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.engines import engine_of
from shardwise.trainer.planning.engines.engine import States
from shardwise.trainer.planning.engines.parts import share
from shardwise.trainer.planning.policy.precision_policy import (
    Dims,
    PrecisionPolicy,
    adapted_linears,
    adapter_elements,
    adapts_all,
    policy_of,
    traced_adapters,
)
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.optimizers import Optimizer, OptimizerFacts, Pieces, StateKind
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision, Quant
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value

NF4_WEIGHT_BYTES = 0.5
NF4_SCALE_BYTES = {Quant.NF4: 4 / 64, Quant.NF4_DQ: 1 / 64 + 4 / 16384}


@same_for_all(
    micro_batch=1,
    accumulation=1,
    checkpointing=Checkpointing.NONE,
    checkpoint_every_n=None,
    loss_chunk_tokens=None,
    compile=False,
    fused_kernels=False,
    activation_offload=False,
    buckets=None,
)
def states_of(configuration: Configuration, device: Device, dims: Dims) -> States:
    """The states of one rank of a device."""
    return model_states(configuration, policy_of(configuration, device, dims), dims)


def model_states(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> States:
    """The states of one rank in the setting."""
    sharding = configuration.strategy.sharding
    engine, is_flat = engine_of(sharding), policy.pieces is Pieces.FLAT
    degree, width = policy.shard_degree, policy.trained_bytes
    trained_degree = 1 if policy.replicates_adapters else degree
    trained = adapter_elements(configuration, dims) if policy.is_frozen else dims.parameters
    shards_weights = sharding.shards_weights
    weight_degree = degree if shards_weights else 1
    weights, quant_state = _base_weights(configuration, policy, dims, weight_degree)
    host_table = table_on_host(configuration, policy, dims)
    adapters = 0
    if policy.is_frozen:
        adapter_width = policy.compute_bytes if is_flat else width
        adapters = share(adapter_width * trained, 1 if policy.replicates_adapters else weight_degree)
    masters = share(width * trained, degree) if is_flat else 0
    optimizer = optimizer_bytes(configuration, policy, dims, num_trained=trained)
    state, temporaries = share(optimizer.state, trained_degree), share(optimizer.temporaries, trained_degree)
    if is_flat and trained:
        at_once = engine.updated_at_once(configuration, policy, dims, num_trained=trained)
        temporaries = -(-temporaries * at_once // share(trained, degree))
    saved = width * trained + optimizer.state
    managed = share(optimizer.paged, trained_degree) if policy.is_cuda else 0  # a CPU's "managed" memory is its own
    state -= managed
    gradient_bytes = policy.compute_bytes if is_flat else width
    gradients = share(gradient_bytes * trained, trained_degree if sharding.shards_gradients else 1)
    held = engine.uneven_share(policy, dims)
    if held is not None:
        weights, gradients = policy.weight_bytes * held, width * held
        whole = (optimizer.state, optimizer.temporaries, optimizer.paged if policy.is_cuda else 0)
        state, temporaries, managed = (-(-num_bytes * held // trained) for num_bytes in whole)
        state -= managed
    on_device = States(
        num_trained=trained,
        saved=saved,
        weights=weights - host_table,
        quant_state=quant_state,
        adapters=adapters,
        master_weights=masters,
        gradients=gradients,
        optimizer_state=state,
        optimizer_temporaries=temporaries,
        table_temporaries=share(optimizer.table_temporaries, degree),
        managed=managed,
        host_table=host_table,
    )
    return (
        on_device
        if configuration.strategy.offload is Offload.NONE
        else engine.offloaded(on_device, configuration.strategy, policy)
    )


def table_on_host(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of the frozen table of input embeddings that stays in host RAM, in 16 bit also of a base in 4 bit."""
    return policy.weight_bytes * dims.embedding if configuration.embedding_on_host and policy.is_cuda else 0


def looked_up_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of the rows that one forward looks up in host RAM and sends to the device."""
    return policy.weight_bytes * dims.hidden * policy.tokens if configuration.embedding_on_host else 0


def _base_weights(configuration: Configuration, policy: PrecisionPolicy, dims: Dims, degree: int) -> tuple[int, int]:
    """(weights, quantisation scales) of the base model on one rank."""
    if configuration.method is not Method.QLORA:
        return share(policy.weight_bytes * dims.parameters, degree), 0
    quantised = dims.packed_linears
    packed = round(NF4_WEIGHT_BYTES * quantised)
    scales = round(
        NF4_SCALE_BYTES[dims.quant or policy.reference.quant or configuration.quant] * quantised
    )  # replicated: they are not parameters
    return share(packed + policy.compute_bytes * (dims.parameters - quantised), degree), scales


PROCESS_BYTES = 2048 * MIB  # a rank that drives a GPU: interpreter, libraries and CUDA's host side


class HostMemory(Value, frozen=True, kw_only=True):
    """Bytes of one node."""

    pinned: int
    pageable: int
    nvme: int

    @property
    def ram(self) -> int:
        return self.pinned + self.pageable


def host_memory(
    configuration: Configuration, policy: PrecisionPolicy, dims: Dims, states: States, *, activations: int
) -> HostMemory:
    """Bytes of RAM and NVMe that the ranks of one node need."""
    num_ranks = min(configuration.ranks_per_node, configuration.num_ranks)
    pinned = states.pinned + activations + looked_up_bytes(configuration, policy, dims)
    if not policy.is_cuda:
        return HostMemory(pinned=0, pageable=num_ranks * (pinned + states.pageable), nvme=num_ranks * states.nvme)
    building = loading_bytes(configuration, policy, dims)
    # The built model is freed as it is sharded, before the offloaded state is complete.
    pageable = PROCESS_BYTES + states.managed + states.host_table + max(building, states.pageable)
    return HostMemory(pinned=num_ranks * pinned, pageable=num_ranks * pageable, nvme=num_ranks * states.nvme)


def loading_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of host RAM that a rank needs while it loads the model, in addition to its own state."""
    width = policy.compute_bytes if policy.is_frozen else policy.master_bytes
    engine, is_fp8 = engine_of(configuration.strategy.sharding), configuration.strategy.precision is Precision.FP8
    builds_whole = is_fp8 or engine.builds_whole_model(configuration)
    if configuration.method is Method.QLORA or not builds_whole:
        return 2 * width * dims.largest_tensor
    return width * dims.parameters


LEAST_8BIT_ELEMENTS = 4096
LEAST_PAGED_ELEMENTS = 100_000
EIGHT_BIT_BYTES = 1 + 4 / 256  # one 8-bit state of one element with its share of the scale


class StateTensors(Value, frozen=True, kw_only=True):
    """(elements, how many of that size) of everything that is trained, before sharding."""

    groups: tuple[tuple[int, int], ...]
    least_8bit: int = LEAST_8BIT_ELEMENTS  # of a tensor whose state is 8 bit; of FSDP2's, a shard has as many as others

    def num_elements(self, least: int = 0) -> int:
        """Elements of the tensors that have at least so many."""
        return sum(size * count for size, count in self.groups if size >= least)

    @property
    def largest_8bit(self) -> int:
        """Elements of the largest tensor whose state is 8 bit; 0 where none is."""
        return max((size for size, _ in self.groups if size >= self.least_8bit), default=0)

    def state_bytes(self, *, is_8bit: bool, num_moments: int = 2, least: int = 0) -> int:
        """Bytes of the moments of tensors of at least `least` elements, fp32 or 8 bit with their scales."""
        if not is_8bit:
            return 4 * num_moments * self.num_elements(least)
        compact = self.num_elements(max(least, self.least_8bit))
        return num_moments * (4 * (self.num_elements(least) - compact) + round(EIGHT_BIT_BYTES * compact))


def state_tensors(
    configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, num_trained: int
) -> StateTensors:
    """The tensors that are trained, `num_trained` elements together."""
    if policy.pieces is Pieces.FLAT:
        return StateTensors(groups=((num_trained // policy.shard_degree, policy.shard_degree),))
    groups = tuple(_adapters(configuration, dims) if policy.is_frozen else _weights(dims))
    is_cut = policy.pieces is Pieces.SHARDS
    return StateTensors(groups=groups, least_8bit=LEAST_8BIT_ELEMENTS * (policy.shard_degree if is_cut else 1))


def _adapters(configuration: Configuration, dims: Dims) -> Iterator[tuple[int, int]]:
    rank = configuration.lora.rank
    if dims.traced is not None:
        of_kinds = zip(dims.kinds, traced_adapters(dims.traced, configuration.method), strict=True)
        for (num_blocks, _), adapters in of_kinds:
            for each in adapters:
                yield each.num_elements // each.num_tensors, num_blocks * each.num_tensors
        return
    for _, num_inputs, num_outputs in adapted_linears(configuration, dims):
        yield rank * num_inputs, dims.layers
        yield rank * num_outputs, dims.layers
        if configuration.lora.dora:
            yield num_outputs, dims.layers
    if adapts_all(configuration) and dims.bare_adapter_elements:
        yield rank * dims.bare_adapter_elements, dims.layers


def _weights(dims: Dims) -> Iterator[tuple[int, int]]:
    """Matrices and tables as they are; what remains, norms and biases, is taken to have the width of the model."""
    for num_inputs, num_outputs, copies in dims.matrices_of_all():
        yield num_inputs * num_outputs, copies
    yield dims.embedding, 1
    if dims.head:
        yield dims.head, 1
    rest = dims.parameters - dims.block_linears - dims.embedding - dims.head
    yield dims.hidden, rest // dims.hidden
    if rest % dims.hidden:
        yield rest % dims.hidden, 1


class OptimizerBytes(Value, frozen=True, kw_only=True):
    """Whole-model bytes, before sharding."""

    state: int
    temporaries: int
    table_temporaries: int  # of the update of the embedding alone, where every gradient is used as it comes
    paged: int = 0  # of the state, what lives in CUDA managed memory, outside torch's counters


def optimizer_bytes(
    configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, num_trained: int
) -> OptimizerBytes:
    """State and step temporaries of the optimizer over `num_trained` elements."""
    optimizer, width = configuration.strategy.optimizer, policy.trained_bytes
    if configuration.method is Method.GALORE:
        at_table = 0 if optimizer.facts.is_8bit else 2 * width * dims.embedding
        if optimizer.facts.state is StateKind.FACTORED:
            at_table, width = _temporaries(optimizer, policy, dims.embedding, dims.embedding), 4
        # galore_torch frees them after the next tensor's are made: the head's and the embedding's are alive together.
        at_both = at_table + (width * dims.head if at_table else 0)
        return OptimizerBytes(
            state=_galore_bytes(configuration, policy, dims),
            temporaries=max(_projection_bytes(dims), at_both),
            table_temporaries=at_table,
        )
    facts = optimizer.facts
    tensors = state_tensors(configuration, policy, dims, num_trained=num_trained)
    table = 0 if policy.is_frozen else dims.embedding
    if facts.matrix_scratch is None:
        largest = _largest(facts, policy, dims, tensors, num_trained=num_trained)
        temporaries = _temporaries(optimizer, policy, num_trained, largest)
    else:
        largest = max(each.num_inputs * each.num_outputs * each.num_copies for _, kind in dims.kinds for each in kind)
        others = 0 if policy.is_frozen else num_trained - dims.block_linears
        of_matrices = facts.matrix_scratch.num_bytes(width=width, num_elements=largest, largest=largest)
        temporaries = max(of_matrices, _temporaries(optimizer, policy, others, others))
    return OptimizerBytes(
        state=_state_bytes(facts, policy, dims, tensors),
        temporaries=temporaries,
        table_temporaries=_temporaries(optimizer, policy, table, table),
        paged=tensors.state_bytes(is_8bit=facts.is_8bit, num_moments=facts.num_moments, least=LEAST_PAGED_ELEMENTS)
        if facts.is_paged
        else 0,
    )


def _largest(
    facts: OptimizerFacts, policy: PrecisionPolicy, dims: Dims, tensors: StateTensors, *, num_trained: int
) -> int:
    """Elements of what is updated at once, over all ranks; of a flat partition all, where the memory bears it."""
    if policy.pieces is Pieces.FLAT:
        return num_trained
    return tensors.largest_8bit if facts.is_8bit else min(num_trained, dims.largest_tensor)


def _state_bytes(facts: OptimizerFacts, policy: PrecisionPolicy, dims: Dims, tensors: StateTensors) -> int:
    width, num_trained, num_moments = policy.trained_bytes, tensors.num_elements(), facts.num_moments
    match facts.state:
        case StateKind.BLOCKWISE_8BIT:
            table = 0 if policy.is_frozen or not policy.reference.keeps_table_state else dims.embedding
            in_fp32 = round(num_moments * (4 - EIGHT_BIT_BYTES) * table)
            return in_fp32 + tensors.state_bytes(is_8bit=True, num_moments=num_moments)
        case StateKind.FP32:
            return tensors.state_bytes(is_8bit=False, num_moments=num_moments)
        case StateKind.FACTORED:
            return min(4 * _rows_and_columns(dims), width * num_trained)
        case StateKind.MASTER:
            if facts.num_matrix_moments is None:
                return num_moments * width * num_trained
            matrices = min(num_trained, dims.block_linears)
            return width * (facts.num_matrix_moments * matrices + num_moments * (num_trained - matrices))


def _temporaries(optimizer: Optimizer, policy: PrecisionPolicy, num_elements: int, largest: int) -> int:
    """Of the update of `num_elements`, the largest of whose tensors has `largest`."""
    width, facts = policy.trained_bytes, optimizer.facts
    if policy.reference.fuses_adamw and facts.fused_form is not None:
        facts = facts.fused_form.facts
    if policy.reference.dequantises_states and facts.is_8bit and not facts.is_paged:
        return 3 * 4 * largest + facts.scratch.num_bytes(width=width, num_elements=num_elements, largest=largest)
    scratch = facts.scratch if policy.is_cuda or facts.scratch_on_cpu is None else facts.scratch_on_cpu
    return scratch.num_bytes(width=width, num_elements=num_elements, largest=largest)


def _projection_bytes(dims: Dims) -> int:
    """Bytes of a new projector: the gradient in fp32, on which the decomposition works, and two sets of vectors."""
    return max(4 * (2 * i * o + min(i, o) * (min(i, o) + max(i, o))) for i, o, _ in dims.matrices_of_all())


def _rows_and_columns(dims: Dims) -> int:
    in_blocks = sum(copies * (i + o) for i, o, copies in dims.matrices_of_all()) + dims.layers * 2 * dims.hidden
    tables = (2 if dims.head else 1) * (dims.vocab + dims.hidden)
    return in_blocks + tables + dims.hidden


def _galore_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Low-rank moments with their projectors; inside Adafactor rows and columns of what is projected."""
    optimizer, width = configuration.strategy.optimizer, policy.trained_bytes
    moments, projectors = _galore_elements(configuration, dims)
    if optimizer.facts.state is StateKind.FACTORED:
        projected = 0
        for num_inputs, num_outputs, copies in dims.matrices_of_all():
            rank = min(configuration.galore.rank, num_inputs, num_outputs)
            projected += copies * (rank + max(num_inputs, num_outputs))
        projected += dims.layers * 2 * dims.hidden  # the norms, unfactored
        tables = (2 if dims.head else 1) * (dims.vocab + dims.hidden)
        return 4 * (projected + tables + dims.hidden) + 4 * projectors
    return round(moments * (1.0 if optimizer.facts.is_8bit else float(width))) + projectors * width


def _galore_elements(configuration: Configuration, dims: Dims) -> tuple[int, int]:
    """(elements of all moments, elements of all projectors): low rank in the blocks' matrices, full elsewhere."""
    moments = projectors = 0
    for num_inputs, num_outputs, copies in dims.matrices_of_all():
        long, short = max(num_inputs, num_outputs), min(num_inputs, num_outputs)
        rank = min(configuration.galore.rank, short)
        moments += copies * 2 * rank * long
        projectors += copies * rank * short
    outside = dims.parameters - dims.block_linears
    return moments + 2 * outside, projectors
