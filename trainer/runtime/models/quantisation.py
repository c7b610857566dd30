"""Base weights in 4 bit (QLoRA, arXiv:2305.14314): quantised to NF4 while they are read, or as a folder has them.

bitsandbytes keeps a weight two to a byte, with one scale for 64 of them; double quantisation keeps the scales in 8 bit,
with one scale for 256 of them. A product makes its weight whole in the computing type. Embeddings, head, norms and
biases stay in the computing type.

A tensor is quantised as it is read:

    on a GPU     each tensor goes there to be quantised and stays; under FSDP2 it comes back to the host, whence
                 `fully_shard` moves one group at a time
    on a CPU     a tensor is quantised in slices: bitsandbytes' kernel holds some twenty bytes a weight

A model without weights to start from is initialized and quantised block by block. A folder that bitsandbytes' 4-bit
weights are stored in keeps them, with its own blocks and scales; what it holds in 16 bit stays in 16 bit. The loaded
model is a plain one with 4-bit layers in it: transformers' mark of a quantised model forbids engines to cast and to
move it.

Storage is uint8. FSDP2 shards floating point only, so there it is 16 bit of the computing type (which its policy
gathers without a cast), else bf16: the bits are the same, and nothing ever computes with them.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.models.targets import is_4bit, is_linear, read_past_forward
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.optimizers import Pieces
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision, Quant

BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale, scales that share one
SLICE_ELEMENTS = 1 << 20  # of a tensor that is quantised on a CPU; a multiple of BLOCK


class Packing(NamedTuple):
    """Format of quantised base weights, and the devices of quantisation and storage."""

    quant: Quant
    compute: torch.dtype
    storage: torch.dtype
    works_on: torch.device  # where a tensor is quantised
    lives_on: torch.device  # where it is until the engine moves it
    table_on_host: bool = False  # the input embeddings stay in host RAM

    def home_of(self, tensor: Tensor, model: PreTrainedModel) -> torch.device:
        """The device of a tensor of the model that stays in 16 bit."""
        is_table = self.table_on_host and tensor is model.get_input_embeddings().weight
        return torch.device("cpu") if is_table else self.lives_on


def packing_of(plan: Plan) -> Packing:
    """The packing of a plan's base on this rank; InputError where the engine cannot hold one."""
    strategy, cpu = plan.chosen.strategy, torch.device("cpu")
    is_sharded = strategy.sharding.facts.pieces is Pieces.SHARDS
    if strategy.sharding.shards_weights and not is_sharded:
        raise InputError("qlora: ZeRO-3 cuts weights anywhere, and 4-bit ones have blocks; use fsdp or zero2")
    compute = compute_type(strategy.precision)
    is_cuda = plan.device_kind is DeviceKind.CUDA
    works_on = torch.device("cuda", torch.cuda.current_device()) if is_cuda else cpu
    return Packing(
        quant=plan.model_shape.quant or Quant.NF4_DQ,
        compute=compute,
        storage=storage_type(strategy.precision) if is_sharded else torch.uint8,
        works_on=works_on,
        lives_on=cpu if is_sharded else works_on,
        table_on_host=plan.chosen.embedding_on_host,
    )


def storage_type(precision: Precision) -> torch.dtype:
    """The floating-point type that FSDP2 moves packed weights in, without ever casting it."""
    return torch.float16 if precision is Precision.FP16_MIXED else torch.bfloat16


def as_plain_model(model: PreTrainedModel) -> None:
    """Removes transformers' marks of a quantised model, but for the one by which PEFT knows 4-bit layers."""
    seam: Any = model
    for owner, name in ((seam, "hf_quantizer"), (seam, "quantization_method"), (seam, "hf_device_map")):
        if hasattr(owner, name):
            delattr(owner, name)
    for config in {id(each): each for each in (seam.config, seam.config.get_text_config())}.values():
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config._is_quantized = False
    seam.is_quantized = False
    seam.is_loaded_in_4bit = True


def initialize_quantised(build: Callable[[], PreTrainedModel], packing: Packing) -> PreTrainedModel:
    """A model with new weights, initialized as by transformers, of which only one block is whole at a time.

    `build` makes it without weights, on the device that is torch's default when it is called.
    """
    with torch.device("meta"), no_init_weights():
        model = build()
        model.tie_weights()
    made: dict[Tensor, Tensor] = {}

    def draw(module: nn.Module, owner: PreTrainedModel) -> None:
        for child in module.children():
            draw(child, child if isinstance(child, PreTrainedModel) else owner)
            if isinstance(module, nn.ModuleList):  # a block, whose linear layers some models draw again as a whole
                _quantise_within(child, model, packing)
        if _materialise(module, made):  # else all of it is another's, as a tied head's weight is
            with torch.no_grad():
                owner._init_weights(module)

    draw(model, model)
    _quantise_within(model, model, packing)
    as_plain_model(model)
    return model


def _quantise_within(part: nn.Module, model: PreTrainedModel, packing: Packing) -> None:
    """Quantises the linear layers inside a part of a model and puts the rest of it in the computing type."""
    retained = _read_whole(model)
    for module in list(part.modules()):
        for name, child in list(module.named_children()):
            if is_quantisable(child) and id(child) not in retained:
                setattr(module, name, quantised(child, packing))
    for parameter in part.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.to(device=packing.home_of(parameter, model), dtype=packing.compute)


def quantised(layer: nn.Module, packing: Packing) -> nn.Module:
    """A 4-bit layer with the weight of a linear one; its bias stays as it is."""
    assert isinstance(layer, nn.Linear | Conv1D)
    weight = layer.weight.detach()
    packed: Any = _empty_layer(layer, packing)
    if isinstance(layer, Conv1D):
        weight = weight.t()
    packed.weight = pack(weight.to(packing.compute), packed, packing)
    bias = layer.bias
    packed.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    assert isinstance(packed, nn.Module)
    return packed


def pack(weight: Tensor, layer: Any, packing: Packing) -> Any:  # noqa: ANN401  # bitsandbytes' layer and parameter, untyped
    """The NF4 parameter of a weight [out, in] for `layer`, which gets its scales."""
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise

    flat = weight.to(packing.works_on).reshape(-1)
    slices = flat.split(SLICE_ELEMENTS if flat.device.type == "cpu" else max(flat.numel(), 1))
    parts = [quantize_4bit(part, blocksize=BLOCK, quant_type="nf4") for part in slices]
    values = torch.cat([values for values, _ in parts])
    scales = torch.cat([state.absmax for _, state in parts])
    offset = nested = None
    if packing.quant is Quant.NF4_DQ:
        offset = scales.mean()
        scales, nested = quantize_blockwise(scales - offset, blocksize=SCALE_BLOCK)
    state = QuantState(
        absmax=scales,
        shape=weight.shape,
        dtype=weight.dtype,
        blocksize=BLOCK,
        code=get_4bit_type("nf4", device=flat.device),
        quant_type="nf4",
        offset=offset,
        state2=nested,
    )
    return _parameter(values, state, layer, packing)


def as_stored(values: Tensor, parts: dict[str, Tensor], layer: Any, packing: Packing) -> Any:  # noqa: ANN401  # as above
    """The parameter of a weight that a file has in 4 bit, with the scales, type and blocks that it has there."""
    from bitsandbytes.functional import QuantState

    state = QuantState.from_dict(parts, device=packing.works_on)
    state.dtype = packing.compute
    return _parameter(values.to(packing.works_on).reshape(-1).view(torch.uint8), state, layer, packing)


def _parameter(values: Tensor, state: Any, layer: Any, packing: Packing) -> Any:  # noqa: ANN401  # as above
    """Packed values in the type they are stored in, with their scales, which `layer` gets too."""
    from bitsandbytes.nn import Params4bit

    values = values.reshape(-1, 1)
    if packing.storage != torch.uint8:
        width = packing.storage.itemsize
        if values.numel() % width:
            raise InputError(
                f"qlora: a weight of shape {tuple(state.shape)} is no whole number of {packing.storage} when packed; "
                "FSDP2 cannot shard it; use ddp or zero2"
            )
        values = values.view(-1).view(packing.storage).unsqueeze(1)
    parameter = Params4bit(
        values,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=packing.storage,
        module=layer,
        bnb_quantized=True,
    )
    if parameter.device != packing.lives_on:
        parameter = parameter.to(packing.lives_on)
        parameter.module = layer
    layer.quant_state = parameter.quant_state
    return parameter


def put_empty_layers(model: PreTrainedModel, packing: Packing, *, only: Collection[str] = ()) -> dict[str, Any]:
    """Puts a 4-bit layer without memory in the place of each linear one but the head; the layers by their names.

    With `only` in the place of those that it names, and no others. `is_transposed` of a layer is True if the weight to
    be packed into it is stored transposed.
    """
    retained, placed = _read_whole(model), dict[str, Any]()
    for name, module in list(model.named_modules()):
        if name in only if only else is_quantisable(module) and id(module) not in retained:
            assert isinstance(module, nn.Linear | Conv1D)
            layer = _empty_layer(module, packing)
            layer.is_transposed = isinstance(module, Conv1D)
            model.set_submodule(name, layer)
            placed[name] = layer
    return placed


def packed_shape(layer: Any, packing: Packing) -> tuple[int, int]:  # noqa: ANN401  # bitsandbytes' layer, untyped
    """The shape that the packed weight of a 4-bit layer has in its storage type."""
    return (layer.in_features * layer.out_features // (2 * packing.storage.itemsize), 1)


def _empty_layer(layer: nn.Linear | Conv1D, packing: Packing) -> Any:  # noqa: ANN401  # bitsandbytes' layer, untyped
    from bitsandbytes.nn import Linear4bit

    outputs, inputs = (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    empty = Linear4bit(
        inputs,
        outputs,
        bias=layer.bias is not None,
        compute_dtype=packing.compute,
        compress_statistics=packing.quant is Quant.NF4_DQ,
        quant_type="nf4",
        quant_storage=packing.storage,
        device="meta",
    )
    empty.requires_grad_(requires_grad=False)
    empty.support_avx512bf16_for_cpu = False  # else one evaluation ends the training of what lies below it (W17)
    return empty


def _read_whole(model: PreTrainedModel) -> set[int]:
    """Ids of the modules that stay in 16 bit though they are linear: the head, and those read past their forward."""
    past = (model.get_submodule(name) for name in read_past_forward(model))
    return {id(model.get_output_embeddings()), *map(id, past)}


def is_quantisable(module: nn.Module) -> bool:
    """True for a linear layer in 16 bit; not for a subclass that returns something else, as some routers do."""
    return is_linear(module) and not is_4bit(module)


def _materialise(module: nn.Module, made: dict[Tensor, Tensor]) -> bool:
    """Gives a module's own tensors memory on the CPU; False where all of them had it, as they are shared."""
    own = [
        (tensors, name, tensor)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]
    fresh = [tensor for _, _, tensor in own if tensor not in made]
    for tensor in fresh:
        empty = torch.empty_like(tensor, device="cpu")
        made[tensor] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    for tensors, name, tensor in own:
        tensors[name] = made[tensor]  # type: ignore[assignment]  # a parameter for a parameter
    return bool(fresh) or not own
