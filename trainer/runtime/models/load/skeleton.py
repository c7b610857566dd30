"""A model without weights, and where its weights come from, so that an engine takes each one as it comes.

Every parameter is a placeholder: a tensor of the right shape and type on the CPU that keeps a single element. What is
put into a model (adapters, loss head, checkpointing) and an optimizer's groups see an ordinary model; adapters are real
from the start. Buffers are real, made as transformers makes them after it has loaded weights.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.initialization import no_tie_weights

from trainer.runtime.models.load.weight_drawing import Build, draw, plan_drawing
from trainer.runtime.models.load.weight_reader import WeightReader
from trainer.runtime.models.model_code import compute_buffers
from trainer.runtime.models.quantisation import Packing, as_plain_model, packed_shape, put_empty_layers
from trainer.spec.errors import InputError


class Values(Protocol):
    """What one tensor is to be filled with; may be asked once."""

    def whole(self) -> Tensor:
        """All of it, on the CPU; to be copied, as its memory is another's."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the first dimension."""


Put = Callable[[str, Values], None]


class Source(Protocol):
    """Where weights come from, by the model's names."""

    @property
    def names(self) -> Collection[str]:
        """Every parameter and persistent buffer that there is."""

    def deliver(self, put: Put) -> None:
        """Hands all of them over, one after the other; only rows that are asked for are read or copied."""


class Skeleton(NamedTuple):
    """A model of placeholders, and what each of them is to become."""

    model: PreTrainedModel
    source: Source
    wanted: dict[str, Tensor]
    """Placeholders, and persistent buffers, by the name that the source has for them; a tied one once."""
    packed: dict[str, Any]
    """The 4-bit layers by the names of their weights, which the source has whole."""
    packing: Packing | None


def is_placeholder(tensor: Tensor) -> bool:
    """Whether a parameter has no memory of its own yet."""
    return tensor.dim() > 0 and not any(tensor.stride())


def skeleton_from_config(build: Build, *, dtype: torch.dtype, seed: int) -> Skeleton:
    """A model whose weights are drawn; `build` makes it in fp32 on torch's default device."""
    with torch.device("meta"):
        model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    _make_buffers(model)
    compute_buffers(model, torch.float32, with_persistent=True)
    _put_placeholders(model, {name: tensor.dtype for name, tensor in model.named_parameters()})
    source = _DrawnWeights(build, seed, [name for name, _ in model.named_parameters()])
    return Skeleton(model, source, dict(model.named_parameters()), {}, None)


def skeleton_from_folder(
    folder: str,
    config: Any,  # noqa: ANN401  # transformers' config, of whatever class
    *,
    dtype: torch.dtype,
    attention: str,
    key_mapping: dict[str, str] | None,
    packing: Packing | None = None,
) -> Skeleton:
    """A model whose weights are read, and with `packing` quantised; InputError where the folder lacks one, or has
    another shape for it."""
    with torch.device("meta"), no_tie_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    types = _planned_types(model, dtype)
    reader = WeightReader(model, folder, types=types, key_mapping=key_mapping)
    reader.keep_conversions()
    _make_buffers(model)
    compute_buffers(model, dtype, with_persistent=False)
    _put_placeholders(model, types)
    _tie(model, reader)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    packed = {} if packing is None else _put_packed(model, packing)
    return Skeleton(model, _ReadWeights(reader), _wanted(model, reader, folder), packed, packing)


def blank(skeleton: Skeleton) -> Skeleton:
    """The same model with zeros to be filled with, which cost no memory: its weights come into the prepared engine."""
    return skeleton._replace(source=_Zeros({name: tensor.shape for name, tensor in skeleton.wanted.items()}))


class _Zeros:
    """Weights that another hand fills in."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self._shapes = shapes

    @property
    def names(self) -> Collection[str]:
        return self._shapes

    def deliver(self, put: Put) -> None:
        for name, shape in self._shapes.items():
            put(name, Whole(torch.zeros(()).expand(shape)))


class _ReadWeights:
    """Weights of a folder."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    @property
    def names(self) -> Collection[str]:
        return self._reader.names

    def deliver(self, put: Put) -> None:
        for name in self.names:
            put(name, _Readable(self._reader, name))


class _DrawnWeights:
    """Weights that a config and a seed make; those of a model that cannot be drawn by tensors, from a whole build."""

    def __init__(self, build: Build, seed: int, names: Collection[str]) -> None:
        self._build, self._seed, self.names = build, seed, names

    def deliver(self, put: Put) -> None:
        drawing = plan_drawing(self._build)
        torch.manual_seed(self._seed)
        if drawing is None:
            for name, tensor in self._build().named_parameters():
                put(name, Whole(tensor.detach()))
            return
        draw(self._build, drawing, lambda name, tensor: put(name, Whole(tensor)) if name in self.names else None)


class Whole(NamedTuple):
    """Values that are all there."""

    tensor: Tensor

    def whole(self) -> Tensor:
        return self.tensor

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


class _Readable(NamedTuple):
    """Values that are read when they are asked for."""

    reader: WeightReader
    name: str

    def whole(self) -> Tensor:
        return self.reader.read(self.name)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.reader.read_rows(self.name, start, stop)


def _planned_types(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of each parameter and persistent buffer; some models keep some of theirs in fp32 under 16 bit."""
    types = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, globs, _ = build_glob_alternation(list(plan))
        for name in types:
            found = pattern.search(name)
            if found is not None and found.lastgroup is not None:
                types[name] = plan[globs[found.lastgroup]]
    return types


def _make_buffers(model: PreTrainedModel) -> None:
    """Gives buffers memory and their values, as `from_pretrained` does after loading, and leaves the parameters."""
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # as if it were loaded
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made.setdefault(buffer, torch.empty_like(buffer, device="cpu"))
    initialisable: Any = model
    initialisable.initialize_weights()
    for parameter in parameters:
        del parameter._is_hf_initialized


def _put_placeholders(model: PreTrainedModel, types: dict[str, torch.dtype]) -> None:
    made: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in made:
                dtype = types[f"{path}.{name}" if path else name]
                empty = torch.zeros((), dtype=dtype).expand(parameter.shape)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = made[parameter]


def _put_packed(model: PreTrainedModel, packing: Packing) -> dict[str, Any]:
    """Puts 4-bit layers, their weights placeholders too, in the place of linear ones; by the names of their weights."""
    from bitsandbytes.nn import Params4bit

    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    layers = put_empty_layers(model, packing)
    for name, layer in layers.items():
        weight: Any = layer.weight
        layer.bias = biases[name]
        layer.weight = Params4bit(
            torch.zeros((), dtype=packing.storage).expand(packed_shape(layer, packing)),
            requires_grad=False,
            blocksize=weight.blocksize,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=packing.storage,
            module=layer,
            bnb_quantized=True,
        )
    as_plain_model(model)
    return {f"{name}.weight": layer for name, layer in layers.items()}


def _tie(model: PreTrainedModel, reader: WeightReader) -> None:
    """Ties what `from_pretrained` ties: not two weights that are both in the folder and differ."""
    tied: Any = model.all_tied_weights_keys
    for target, source in list(tied.items()):
        if {target, source} <= set(reader.names) and not torch.equal(reader.read(target), reader.read(source)):
            del tied[target]
    model.tie_weights(missing_keys=set(model.state_dict(keep_vars=True)) - set(reader.names), recompute_mapping=False)


def _wanted(model: PreTrainedModel, reader: WeightReader, folder: str) -> dict[str, Tensor]:
    there, wanted = set(reader.names), dict[str, Tensor]()
    tensors = model.state_dict(keep_vars=True)
    found = {tensor: name for name, tensor in reversed(tensors.items()) if name in there}
    missing = [name for name, tensor in tensors.items() if tensor not in found]
    if missing:
        raise InputError(
            f"{folder}: its weights lack {len(missing)} tensors of {type(model).__name__}, the first "
            f"{sorted(missing)[0]}; they would start as random numbers"
        )
    for tensor, name in found.items():
        wanted[name] = tensor
    return wanted
