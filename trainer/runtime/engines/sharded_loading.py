"""Weights straight to their place in an engine: no rank holds the whole model in host RAM to begin with.

    FSDP2     the model is sharded without memory, as Accelerate shards it; then every rank reads its own rows of each
              tensor, or keeps them of what it draws
    ZeRO-3    one tensor after the other is made whole where the engine computes, sent from the first rank to all, and
              cut by DeepSpeed's own `zero.Init`, which keeps a rank's piece in host RAM or on NVMe under offload
    GPU, DDP  one tensor after the other is copied to the GPU

So a rank holds its shard and one tensor; of new weights, those that transformers initializes together. The
result is bitwise that of a whole build (`trainer.runtime.models.build.build_model`). Of QLoRA's base a rank keeps its
rows of each packed weight, and the scales of all. Built whole are what FP8 converts, the models of ZeRO-1 and ZeRO-2,
QLoRA's base where it is initialized, and DoRA on a 4-bit base: PEFT needs that base when it puts the adapters in.
Without sharding `quantisation` reads QLoRA's base tensor by tensor.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from shardwise.trainer.runtime.memory.host_embedding import tensors_on_host
from shardwise.trainer.runtime.models.meta_model import MetaModel, Readable, Values, Whole, is_placeholder
from shardwise.trainer.runtime.models.methods import ADAPTER
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision


def loads_by_tensor(plan: Plan) -> bool:
    """True if ranks load no more than their own shards, or on a GPU one tensor after the other."""
    chosen = plan.chosen
    if chosen.strategy.precision is Precision.FP8:
        return False
    if plan.extension is not None and Hook.BUILD_MODEL in plan.extension.hooks:
        return False
    if not chosen.strategy.sharding.shards_weights:
        is_on_gpu = plan.device_kind is DeviceKind.CUDA  # on a CPU a model that is built is in its place
        return is_on_gpu and not chosen.strategy.sharding.uses_deepspeed and chosen.method is not Method.QLORA
    is_read = plan.model_path is not None
    return chosen.method is not Method.QLORA or (is_read and not plan.job.train.lora.dora)


def load_onto(device: torch.device, meta_model: MetaModel) -> None:
    """Gives every parameter its memory on the device, or in host RAM if it stays there, and fills one after another."""
    model, wanted = meta_model.model, dict(meta_model.wanted)
    on_host = tensors_on_host(model)
    parameters = dict(model.named_parameters())
    paths = {parameter: path for path, parameter in parameters.items()}
    ready = {path: parameter.detach() for path, parameter in parameters.items() if not is_placeholder(parameter)}
    lengths = _Lengths(model)

    def put(name: str, values: Values) -> None:
        tensor = wanted.pop(name, None)
        if isinstance(tensor, nn.Parameter):
            path = paths[tensor]
            if path in lengths.of:
                values = Whole(values.whole().to(tensor.dtype))
                parameters[lengths.of[path]].data.copy_(lengths.of_weight(path, values.tensor, ready))
            home = torch.device("cpu") if tensor in on_host else device
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=home).copy_(values.whole())
        elif tensor is not None:
            tensor.copy_(values.whole())

    meta_model.source.deliver(put)
    assert not wanted, f"{len(wanted)} tensors were not delivered"


def load_into_fsdp(meta_model: MetaModel, accelerator: Accelerator) -> None:
    """Shards the model and fills each rank's rows; before the optimizer is built on the shards."""
    model = meta_model.model
    paths = {tensor: path for path, tensor in reversed([*model.named_parameters(), *_persistent_buffers(model)])}
    wanted = {name: paths[tensor] for name, tensor in meta_model.wanted.items()}
    ready = {path: p.detach() for path, p in model.named_parameters() if not is_placeholder(p)}
    lengths = _Lengths(model)
    shard_without_memory(model, accelerator)
    shards = {**dict(_persistent_buffers(model)), **dict(model.named_parameters())}

    def put(name: str, values: Values) -> None:
        path = wanted.pop(name, None)
        if path is None:
            return
        if path in lengths.of:
            weight = values.whole().to(meta_model.wanted[name].dtype)
            _fill(shards[lengths.of[path]], Whole(lengths.of_weight(path, weight, ready)))
            values = Whole(weight)
        if name in meta_model.packed:
            values = Whole(_packed(meta_model, name, values, accelerator.device))
        _fill(shards[path], values)

    for path, tensor in ready.items():
        _fill(shards[path], Whole(tensor))
    meta_model.source.deliver(put)
    assert not wanted, f"{len(wanted)} tensors were not delivered"


def shard_without_memory(model: nn.Module, accelerator: Accelerator) -> None:
    """Cuts a model for FSDP2 as Accelerate does, and allocates this rank's shards alone, to be filled."""
    _drop_memory(model)
    fsdp2_prepare_model(accelerator, model)
    _allocate(model, accelerator)


def load_into_zero3(meta_model: MetaModel, accelerator: Accelerator, precision: Precision) -> None:
    """Fills and cuts every parameter, in the type the engine computes in; after the optimizer has grouped them."""
    from deepspeed.runtime.zero.partition_parameters import Init

    model, wanted = meta_model.model, dict(meta_model.wanted)
    plugin: Any = accelerator.state.deepspeed_plugin
    dtype = compute_type(precision)
    cutter = Init(module=nn.Module(), config_dict_or_path=plugin.deepspeed_config, dtype=dtype)
    paths = {tensor: path for path, tensor in model.named_parameters()}
    ready = {path: p.detach() for path, p in model.named_parameters() if not is_placeholder(p)}
    lengths = _Lengths(model)
    is_first = dist.get_rank() == 0
    largest = max(parameter.numel() for parameter in model.parameters())
    memory = torch.empty(largest, dtype=dtype, device=accelerator.device)  # of one parameter after the other

    def cut(parameter: nn.Parameter, values: Values) -> None:
        whole = memory[: parameter.numel()].view(parameter.shape)
        if is_first:  # the others receive it as it is cut
            whole.copy_(values.whole())
        parameter.data = whole
        cutter._convert_to_zero_parameters([parameter])

    def put(name: str, values: Values) -> None:
        tensor = wanted.pop(name, None)
        if isinstance(tensor, nn.Parameter):
            path = paths[tensor]
            if path in lengths.of:
                values = Whole(values.whole().to(tensor.dtype))
                ready[lengths.of[path]] = lengths.of_weight(path, values.tensor, ready)
            cut(tensor, values)
        elif tensor is not None:
            tensor.copy_(values.whole())

    meta_model.source.deliver(put)
    assert not wanted, f"{len(wanted)} tensors were not delivered"
    parameters = dict(model.named_parameters())
    for path, tensor in ready.items():
        cut(parameters[path], Whole(tensor))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(accelerator.device)


class _Lengths:
    """DoRA's lengths of the rows of a weight, which are known when the weight is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers: dict[str, Any] = {}
        self.of: dict[str, str] = {}
        """The path of the lengths by that of the weight."""
        for path, layer in model.named_modules():
            if ADAPTER in getattr(layer, "lora_magnitude_vector", {}):
                weight = f"{path}.base_layer.weight"
                self._layers[weight] = layer
                self.of[weight] = f"{path}.lora_magnitude_vector.{ADAPTER}.weight"

    def of_weight(self, path: str, weight: Tensor, ready: dict[str, Tensor]) -> Tensor:
        """The lengths of a whole weight, as PEFT computes them."""
        layer, adapted = self._layers[path], path.removesuffix("base_layer.weight")
        factors = {name: ready[f"{adapted}lora_{name}.{ADAPTER}.weight"].to(weight.dtype) for name in ("A", "B")}
        base = nn.Linear(1, 1, bias=False)
        base.weight = nn.Parameter(weight, requires_grad=False)
        dora = layer.lora_magnitude_vector[ADAPTER]
        fresh = type(dora)(fan_in_fan_out=dora.fan_in_fan_out)
        fresh.update_layer(base_layer=base, lora_A=factors["A"], lora_B=factors["B"], scaling=layer.scaling[ADAPTER])
        assert isinstance(fresh.weight, Tensor)
        return fresh.weight.detach()


def _packed(meta_model: MetaModel, name: str, values: Values, device: torch.device) -> Tensor:
    """The 4-bit values of a weight, whose scales come to its layer, where the engine computes."""
    layer, packing = meta_model.packed[name], meta_model.packing
    assert packing is not None and isinstance(values, Readable)
    parameter = values.packed(layer, packing)
    layer.quant_state.to(device)
    assert isinstance(parameter, Tensor)
    return parameter.detach()


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters]


def _drop_memory(model: nn.Module) -> None:
    """Puts parameters without memory in the place of all; tied ones stay tied."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]


def _allocate(model: nn.Module, accelerator: Accelerator) -> None:
    """Gives the shards of this rank memory, in host RAM where FSDP2 keeps them there."""
    plugin: Any = accelerator.state.fsdp_plugin
    home = torch.device("cpu") if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy" else accelerator.device
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            sharded: Any = parameter
            if isinstance(sharded, DTensor) and sharded not in made:
                # `DTensor.from_local` would move the shard to the devices of the mesh.
                shard = torch.empty_like(sharded, device=home)
                made[sharded] = nn.Parameter(shard, requires_grad=sharded.requires_grad)
            if sharded is not None:
                module._parameters[name] = made[sharded]


def _fill(tensor: Tensor, values: Values) -> None:
    """Copies values into a tensor, or this rank's rows into its shard."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            tensor.copy_(values.whole())
            return
        local = tensor.to_local()
        if local.numel():
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            local.copy_(values.rows(offset[0], offset[0] + local.shape[0]))
