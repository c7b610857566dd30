"""A model without weights, and the source of its weights, so that an engine shards each one as it is read.

Every parameter is a placeholder: a tensor of the right shape and type on the CPU that keeps a single element.
Everything that is put into a model (adapters, loss head, checkpointing) and an optimizer's groups see an ordinary
model; adapters are real from the start. Buffers are real, made as transformers makes them after it has loaded weights.

New weights are initialized tensor by tensor, bitwise equal to those of a model that is built as a whole. A whole build
draws twice: `nn.Linear` and its like when they are made, transformers' `_init_weights` once a model is complete, and
the second draws depend on how many numbers the first consumed. So the model is made on the meta device, and every
random number that a whole build would draw and discard goes into scratch memory; when `_init_weights` comes to a
module, just the tensors that it writes get memory, are handed over, and lose it again. Which tensors a call writes, and
which call is the last to write one, is found by making the model once on the meta device alone. A model whose tensors
are not all written whole by `_init_weights` (values that its constructor computes, or code that reads weights) cannot
be initialized so: it is built as a whole.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.initialization import no_tie_weights

from shardwise.trainer.runtime.models.model_code import compute_buffers
from shardwise.trainer.runtime.models.quantisation import (
    Packing,
    as_plain_model,
    as_stored,
    pack,
    packed_shape,
    put_empty_layers,
)
from shardwise.trainer.runtime.models.weight_files import WeightReader
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.stored import Treatment, WeightFormat

Build = Callable[[], PreTrainedModel]
"""Makes the model on torch's default device."""

_OVERWRITES = frozenset(
    f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy", "random", "exponential", "log_normal")
)


class Initialization(NamedTuple):
    """Tensors that the calls of `_init_weights` write, in their order."""

    writes: tuple[tuple[str, ...], ...]
    """Of each call, the tensors by their names relative to its module."""
    finals: tuple[dict[str, str], ...]
    """Of each call, those that no later call writes: the relative name, and the one in the model."""


def plan_initialization(build: Build) -> Initialization | None:
    """Plan that initializes a model tensor by tensor; None if only a whole build has its weights."""
    seen = _Writes()
    calls: list[_Call] = []

    def note(owner: PreTrainedModel, module: nn.Module) -> None:
        names = {_storage(tensor): name for name, tensor in _named_tensors(module)}
        with seen.noting() as written, torch.device("cpu"):
            owner._init_weights(module)
        if not written.keys() <= names.keys():
            raise _NotDrawableError
        calls.append(_Call(module, {names[key]: is_whole for key, is_whole in written.items()}))

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), _initialising(note), seen:
            model = build()
    except (_NotDrawableError, NotImplementedError, RuntimeError):
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    last: dict[str, tuple[int, bool]] = {}
    for number, call in enumerate(calls):
        for name, is_whole in call.written.items():
            last[_join(paths.get(id(call.module), "?"), name)] = (number, is_whole)
    if not all(last.get(name, (0, False))[1] for name, _ in _named_tensors(model)):
        return None
    finals = tuple(
        {name: full for name in call.written if last[full := _join(paths.get(id(call.module), "?"), name)][0] == number}
        for number, call in enumerate(calls)
    )
    return Initialization(writes=tuple(tuple(call.written) for call in calls), finals=finals)


def draw(build: Build, initialization: Initialization, put: Callable[[str, Tensor], None]) -> None:
    """Hands each tensor of the model over once, by its name, with the numbers that torch's generator stands at.

    It is to be copied: its memory is used again for the next. A tied tensor comes under each of its names; the one that
    `named_parameters` gives first is the one that counts.
    """
    number, scratch = 0, _Scratch()

    def make(owner: PreTrainedModel, module: nn.Module) -> None:
        nonlocal number
        made, finals = initialization.writes[number], initialization.finals[number]
        before = {name: _tensor(module, name) for name in made}
        for (name, tensor), memory in zip(before.items(), scratch.like(list(before.values())), strict=True):
            is_parameter = isinstance(tensor, nn.Parameter)
            _set_tensor(module, name, nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory)
        with torch.device("cpu"):
            owner._init_weights(module)
            with torch.random.fork_rng(devices=[]):
                for name, full in finals.items():
                    put(full, _tensor(module, name).detach())
        for name, tensor in before.items():
            _set_tensor(module, name, tensor)
        number += 1

    with torch.device("meta"), _initialising(make), _Discarding(scratch):
        build()


_ALIGNMENT = 64  # bytes


class _NotDrawableError(Exception):
    """A call writes what is no tensor of its module."""


class _Call(NamedTuple):
    module: nn.Module
    written: dict[str, bool]  # relative name to whether the call makes it anew as a whole


class _Writes(TorchDispatchMode):
    """Records which storages are written, and whether the first write replaces the whole content."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._written: dict[int, bool] | None = None

    @contextmanager
    def noting(self) -> Iterator[dict[int, bool]]:
        """Records writes inside the block by storage; temporary tensors on the CPU are not recorded."""
        self._written = {}
        yield self._written
        self._written = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        kwargs = kwargs or {}
        if self._written is not None:
            for tensor in _written_tensors(func, args, kwargs):
                is_whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
                overwrites = is_whole and func._schema.name in _OVERWRITES
                if tensor.is_meta:
                    self._written.setdefault(_storage(tensor), overwrites)
        return func(*args, **kwargs)


class _Scratch:
    """Memory that is used again and again: blocks that come and go would fragment the heap."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialized tensors on the CPU of the same shapes and types."""
        sizes = [-(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if sum(sizes) > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # first, so that there are not two
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = self._bytes[: sum(sizes)].split(sizes)
        return [
            part[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, parts, strict=True)
        ]


class _Discarding(TorchDispatchMode):
    """Random values for a tensor without memory go into scratch memory, so that the generator advances."""

    def __init__(self, scratch: _Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._scratch = scratch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and args and isinstance(args[0], Tensor) and args[0].is_meta:
            func(*self._scratch.like(args[:1]), *args[1:], **kwargs)
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def _initialising(visit: Callable[[PreTrainedModel, nn.Module], None]) -> Iterator[None]:
    """Calls `visit` where transformers would initialise a module, also on the meta device, where it would not."""
    classes: Any = PreTrainedModel
    originals = classes.init_weights, classes._initialize_weights

    def init_weights(model: Any) -> None:  # noqa: ANN401  # a PreTrainedModel
        model.initialize_weights()
        model.tie_weights(recompute_mapping=False)

    def initialise(owner: PreTrainedModel, module: Any, is_custom_code: bool = False) -> None:  # noqa: ANN401, FBT001, FBT002  # as transformers calls it
        if not getattr(module, "_is_hf_initialized", False):
            visit(owner, module)
            module._is_hf_initialized = True

    try:
        classes.init_weights, classes._initialize_weights = init_weights, initialise
        yield
    finally:
        classes.init_weights, classes._initialize_weights = originals


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:  # noqa: ANN401  # torch's operator
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                yield value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(module.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor)
    return tensor


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, tensor)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Values(Protocol):
    """Values of one tensor; may be read once."""

    def whole(self) -> Tensor:
        """All of it, on the CPU; to be copied, as its memory is another's."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the first dimension."""


Put = Callable[[str, Values], None]


class Source(Protocol):
    """Source of weights, by the model's names."""

    @property
    def names(self) -> Collection[str]:
        """Every parameter and persistent buffer that there is."""

    def deliver(self, put: Put) -> None:
        """Hands all of them over, one after the other; only requested rows are read or copied."""


class MetaModel(NamedTuple):
    """A model of placeholders, and what each of them is to become."""

    model: PreTrainedModel
    source: Source
    wanted: dict[str, Tensor]
    """Placeholders, and persistent buffers, by the name that the source has for them; a tied one once."""
    packed: dict[str, Any]
    """The 4-bit layers by the names of their weights, which the source has whole."""
    packing: Packing | None


def is_placeholder(tensor: Tensor) -> bool:
    """True if a parameter has no memory of its own yet."""
    return tensor.dim() > 0 and not any(tensor.stride())


def causal_model(config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:  # noqa: ANN401  # transformers'
    """The causal language model of a config, on torch's default device; InputError if transformers has none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"transformers {transformers.__version__} has no causal language model of type {config.model_type}; "
            "the text part of a model can be trained if its type has one"
        )
    model = AutoModelForCausalLM.from_config(config, **settings)
    assert isinstance(model, PreTrainedModel)
    return model


def meta_model_from_config(build: Build, *, dtype: torch.dtype, seed: int) -> MetaModel:
    """A model with new weights; `build` makes it in fp32 on torch's default device."""
    with torch.device("meta"):
        model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    _make_buffers(model)
    compute_buffers(model, torch.float32, with_persistent=True)
    _put_placeholders(model, {name: tensor.dtype for name, tensor in model.named_parameters()})
    source = _InitialWeights(build, seed, [name for name, _ in model.named_parameters()])
    return MetaModel(model, source, dict(model.named_parameters()), {}, None)


class StoredModel(NamedTuple):
    """A folder of weights, and the contents of its config.json."""

    folder: str
    config: PreTrainedConfig  # of the language model
    outer: PreTrainedConfig | None = None  # of the model with other parts that it is in
    settings: Mapping[str, Any] | None = None  # of the format of quantised weights
    weights: WeightFormat | None = None

    def reader(self, model: PreTrainedModel, types: Mapping[str, torch.dtype]) -> WeightReader:
        """The reader of its files; InputError where they are not those of the model."""
        decoder = None
        if self.weights is not None and self.weights.treatment is Treatment.DECODED:
            from shardwise.trainer.runtime.models.decoding import decoder_of  # few folders need it

            decoder = decoder_of(self.settings or {})
        reads_packed = self.weights is not None and self.weights.quant is not None
        return WeightReader(
            model, self.folder, types=types, outer=self.outer, decoder=decoder, reads_packed=reads_packed
        )

    def check(self) -> PreTrainedModel:
        """The model without memory; InputError where the folder lacks a tensor of it. No tensor is read."""
        model = self.empty_model(torch.float32, "eager")
        reader = self.reader(model, _planned_types(model, torch.float32))
        _tie(model, reader, compares=False)
        _wanted(model, reader)
        reader.check_made()
        return model

    def empty_model(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """The model without memory, its tied weights not yet tied."""
        with torch.device("meta"), no_tie_weights():
            return causal_model(self.config, dtype=dtype, attn_implementation=attention)


def meta_model_from_folder(
    stored: StoredModel, *, dtype: torch.dtype, attention: str, packing: Packing | None = None
) -> MetaModel:
    """A model whose weights are read, and with `packing` quantised; InputError where the folder lacks one, or has
    another shape for it."""
    folder, model = stored.folder, stored.empty_model(dtype, attention)
    types = _planned_types(model, dtype)
    reader = stored.reader(model, types)
    reader.keep_conversions()
    _make_buffers(model)
    compute_buffers(model, dtype, with_persistent=False)
    _put_placeholders(model, types)
    _tie(model, reader)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    packed = {} if packing is None else _put_packed(model, packing, reader.packed_names)
    return MetaModel(model, _ReadWeights(reader), _wanted(model, reader), packed, packing)


def fill(meta_model: MetaModel, device: torch.device) -> PreTrainedModel:
    """The model with all of its values on a device; at most one more tensor is in memory meanwhile."""
    model, wanted = meta_model.model, dict(meta_model.wanted)

    def put(name: str, values: Values) -> None:
        tensor = wanted.pop(name, None)
        if name in meta_model.packed and isinstance(values, Readable):
            assert meta_model.packing is not None
            layer = meta_model.packed[name]
            layer.weight = values.packed(layer, meta_model.packing)
        elif isinstance(tensor, nn.Parameter):
            home = device if meta_model.packing is None else meta_model.packing.home_of(tensor, model)
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=home).copy_(values.whole())
        elif tensor is not None:
            tensor.copy_(values.whole())

    meta_model.source.deliver(put)
    assert not wanted, f"{len(wanted)} tensors were not delivered"
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model


def blank(meta_model: MetaModel) -> MetaModel:
    """The same model with zeros to be filled with, which cost no memory: its weights come into the prepared engine."""
    return meta_model._replace(source=_Zeros({name: tensor.shape for name, tensor in meta_model.wanted.items()}))


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
            put(name, Readable(self._reader, name))


class _InitialWeights:
    """Weights that a config and a seed make; from a whole build if it cannot be done by tensors."""

    def __init__(self, build: Build, seed: int, names: Collection[str]) -> None:
        self._build, self._seed, self.names = build, seed, names

    def deliver(self, put: Put) -> None:
        initialization = plan_initialization(self._build)
        torch.manual_seed(self._seed)
        if initialization is None:
            for name, tensor in self._build().named_parameters():
                put(name, Whole(tensor.detach()))
            return
        draw(self._build, initialization, lambda name, tensor: put(name, Whole(tensor)) if name in self.names else None)


class Whole(NamedTuple):
    """Values that are all there."""

    tensor: Tensor

    def whole(self) -> Tensor:
        return self.tensor

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


class Readable(NamedTuple):
    """Values that are read on request."""

    reader: WeightReader
    name: str

    def packed(self, layer: Any, packing: Packing) -> Any:  # noqa: ANN401  # bitsandbytes' layer and parameter
        """The 4-bit parameter for a layer, as the files have it or quantised now."""
        if self.name in self.reader.packed_names:
            return as_stored(*self.reader.read_packed(self.name), layer, packing)
        whole = self.whole()
        return pack((whole.t() if layer.is_transposed else whole).to(packing.compute), layer, packing)

    def whole(self) -> Tensor:
        return self.reader.read(self.name)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.reader.read_rows(self.name, start, stop)


def _planned_types(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Types of each parameter and persistent buffer; some models keep some of theirs in fp32 under 16 bit."""
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
    """Gives buffers, not parameters, memory and their values, as `from_pretrained` does after loading."""
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


def _put_packed(model: PreTrainedModel, packing: Packing, stored: Collection[str]) -> dict[str, Any]:
    """Puts 4-bit layers, their weights placeholders too, in the place of linear ones; by the names of their weights.

    Of a base that is `stored` in 4 bit those alone that are.
    """
    from bitsandbytes.nn import Params4bit

    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    layers = put_empty_layers(model, packing, only={name.removesuffix(".weight") for name in stored})
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


def _tie(model: PreTrainedModel, reader: WeightReader, *, compares: bool = True) -> None:
    """Ties what `from_pretrained` ties: not two weights that are both in the folder and differ."""
    tied: Any = model.all_tied_weights_keys
    for target, source in list(tied.items()):
        are_both_there = {target, source} <= set(reader.names)
        if are_both_there and not (compares and torch.equal(reader.read(target), reader.read(source))):
            del tied[target]
    model.tie_weights(missing_keys=set(model.state_dict(keep_vars=True)) - set(reader.names), recompute_mapping=False)


def _wanted(model: PreTrainedModel, reader: WeightReader) -> dict[str, Tensor]:
    there, wanted = set(reader.names), dict[str, Tensor]()
    tensors = model.state_dict(keep_vars=True)
    found = {tensor: name for name, tensor in reversed(tensors.items()) if name in there}
    missing = [name for name, tensor in tensors.items() if tensor not in found]
    if missing:
        raise reader.missing(missing)
    for tensor, name in found.items():
        wanted[name] = tensor
    return wanted
