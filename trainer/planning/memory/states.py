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
keeps the 16-bit weights (and not even those with `optimizer+params`). On NVMe they leave a window of buffers in host
RAM. DeepSpeed and FSDP2 pin host RAM; FSDP2's optimizer state is created by torch and stays pageable.

Host RAM and NVMe of one node.

Where every rank computes with the whole model, it builds it in host memory in the type of its master weights: a node
needs that many copies once, at the start, and the offloaded state for the rest of the run. An engine that shards
weights is filled shard by shard, and QLoRA quantises each tensor as it is read: a rank then never holds more than one
tensor and one on its way, beside what it keeps. FP8 converts the layers of a whole model. On a CPU device the model
itself is the device's memory and is not counted twice.
"""

from shardwise.trainer.planning.memory.optimizer_state import optimizer_bytes
from shardwise.trainer.planning.memory.recipe import Dims, Recipe, adapter_parameters
from shardwise.trainer.planning.memory.sharding import largest_shard
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.spec.strategy import Method, Offload, Precision, Quant, Sharding
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value

NF4_WEIGHT_BYTES = 0.5
NF4_SCALE_BYTES = {Quant.NF4: 4 / 64, Quant.NF4_DQ: 1 / 64 + 4 / 16384}
NVME_WINDOW_BYTES = 5 * 400 * MIB  # DeepSpeed's swap buffers of a rank: buffer_count x buffer_size of its examples


class States(Value, frozen=True, kw_only=True):
    """Bytes of one rank; `num_trained` is elements and `saved` bytes over all ranks."""

    num_trained: int
    saved: int  # over all ranks: masters and optimizer state, which a checkpoint holds
    weights: int
    quant_state: int
    adapters: int
    master_weights: int
    gradients: int  # complete, at the end of the last backward
    optimizer_state: int
    optimizer_temporaries: int
    table_temporaries: int  # of the embedding's update, under optimizer_in_backward
    managed: int  # paged optimizer state: CUDA managed memory
    pinned: int
    pageable: int
    nvme: int


def model_states(setting: Setting, recipe: Recipe, dims: Dims) -> States:
    """The states of one rank in the setting."""
    sharding, offload = setting.strategy.sharding, setting.strategy.offload
    degree, width = recipe.shard_degree, recipe.trained_bytes
    trained_degree = 1 if recipe.replicates_adapters else degree
    adapter_elements = dims.layers * adapter_parameters(setting, dims)
    trained = adapter_elements if recipe.is_frozen else dims.parameters
    shards_weights = sharding.shards_weights
    weight_degree = degree if shards_weights else 1
    weights, quant_state = _base_weights(setting, recipe, dims, weight_degree)
    adapters = 0
    if recipe.is_frozen:
        adapter_width = recipe.compute_bytes if recipe.uses_deepspeed else width
        adapters = _share(adapter_width * trained, 1 if recipe.replicates_adapters else weight_degree)
    masters = _share(width * trained, degree) if recipe.uses_deepspeed else 0
    optimizer = optimizer_bytes(setting, recipe, dims, num_trained=trained)
    state, temporaries = _share(optimizer.state, trained_degree), _share(optimizer.temporaries, trained_degree)
    saved = width * trained + optimizer.state
    managed = _share(optimizer.paged, trained_degree) if recipe.is_cuda else 0  # a CPU's "managed" memory is its own
    state -= managed
    gradients = _gradients(sharding, recipe, trained, trained_degree)
    if recipe.uses_fsdp and not recipe.is_frozen and not recipe.stack.uses_fsdp1:
        held = largest_shard(dims, degree)
        weights, gradients = recipe.weight_bytes * held, width * held
        whole = (optimizer.state, optimizer.temporaries, optimizer.paged if recipe.is_cuda else 0)
        state, temporaries, managed = (-(-num_bytes * held // trained) for num_bytes in whole)
        state -= managed
    if offload is Offload.NONE:
        return States(
            num_trained=trained,
            saved=saved,
            weights=weights,
            quant_state=quant_state,
            adapters=adapters,
            master_weights=masters,
            gradients=gradients,
            optimizer_state=state,
            optimizer_temporaries=temporaries,
            table_temporaries=_share(optimizer.table_temporaries, degree),
            managed=managed,
            pinned=0,
            pageable=0,
            nvme=0,
        )
    partition = width * trained // degree
    moved = adapters + weights if offload.moves_parameters else 0
    pinned, pageable, nvme = 0, 0, 0
    if recipe.uses_fsdp:
        pinned, pageable = moved + partition, state + temporaries
    else:
        pinned = masters + state + partition + moved + recipe.compute_bytes * trained // degree
        if offload.uses_nvme:
            nvme = masters + state + partition + (moved if offload is Offload.NVME_ALL else 0)
            pinned = min(pinned, NVME_WINDOW_BYTES + partition)
    return States(
        num_trained=trained,
        saved=saved,
        weights=0 if offload.moves_parameters else weights,
        quant_state=0 if offload.moves_parameters else quant_state,
        adapters=0 if offload.moves_parameters else adapters,
        master_weights=0,
        gradients=gradients if sharding.facts.deepspeed_stage == 1 else 0,
        optimizer_state=0,
        optimizer_temporaries=0,
        table_temporaries=0,
        managed=0,
        pinned=pinned,
        pageable=pageable,
        nvme=nvme,
    )


def _share(num_bytes: int, degree: int) -> int:
    """The largest share of a rank."""
    return -(-num_bytes // degree)


def _base_weights(setting: Setting, recipe: Recipe, dims: Dims, degree: int) -> tuple[int, int]:
    """(weights, quantisation scales) of the base model on one rank."""
    if setting.method is not Method.QLORA:
        return _share(recipe.weight_bytes * dims.parameters, degree), 0
    quantised = dims.block_linears
    packed = round(NF4_WEIGHT_BYTES * quantised)
    scales = round(
        NF4_SCALE_BYTES[recipe.stack.quant or setting.quant] * quantised
    )  # replicated: they are not parameters
    return _share(packed + recipe.compute_bytes * (dims.parameters - quantised), degree), scales


def _gradients(sharding: Sharding, recipe: Recipe, trained: int, degree: int) -> int:
    """Gradients at the end of the last backward, as the optimizer step finds them."""
    if sharding.facts.deepspeed_stage == 1:
        return recipe.compute_bytes * trained
    if recipe.uses_deepspeed:
        return _share(recipe.compute_bytes * trained, degree)
    return _share(recipe.trained_bytes * trained, degree)


PROCESS_BYTES = 2048 * MIB  # a rank that drives a GPU: interpreter, libraries and CUDA's host side


class HostMemory(Value, frozen=True, kw_only=True):
    """Bytes of one node."""

    pinned: int
    pageable: int
    nvme: int


def host_memory(setting: Setting, recipe: Recipe, dims: Dims, states: States, *, activations: int) -> HostMemory:
    """Bytes of RAM and NVMe that the ranks of one node need."""
    num_ranks = min(setting.ranks_per_node, setting.num_ranks)
    pinned = states.pinned + activations
    if not recipe.is_cuda:
        return HostMemory(pinned=0, pageable=num_ranks * (pinned + states.pageable), nvme=num_ranks * states.nvme)
    building = loading_bytes(setting, recipe, dims)
    # The built model is given back as it is sharded, before the offloaded state is complete.
    pageable = PROCESS_BYTES + states.managed + max(building, states.pageable)
    return HostMemory(pinned=num_ranks * pinned, pageable=num_ranks * pageable, nvme=num_ranks * states.nvme)


def loading_bytes(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    """Bytes of host RAM that a rank takes while it loads the model, beside what it keeps."""
    width = recipe.compute_bytes if recipe.is_frozen else recipe.master_bytes
    loads_sharded = setting.strategy.sharding.shards_weights and setting.strategy.precision is not Precision.FP8
    if setting.method is Method.QLORA or loads_sharded:
        return 2 * width * dims.largest_tensor
    return width * dims.parameters
