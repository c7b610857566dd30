"""FP8 matrix products: selection of layers, conversion by one of two libraries, and the proof that they ran in FP8.

Accelerate's own FP8 is silently off or partial under FSDP2 and DeepSpeed (docs/workarounds.md, W22), so Accelerate is
set to bf16. The layers are converted in the plain model before `prepare`, and the model's own forward opens the FP8
region, under every engine. Everything else computes as under bf16-mixed.

The tokens of a micro batch are a dimension of the products: a padded batch is padded further to the next multiple
(labels ignored, invisible to causal attention). Without labels (generation, one token at a time) products are 16 bit.

Converted is every plain `nn.Linear` inside the decoder blocks that is large enough to gain (`spec.fp8`). Excluded are
the head and the embeddings (their errors reach the loss undamped), adapters (too small to gain), routers (a rounded
score sends a token to another expert), experts (the number of their tokens is not known beforehand), layers of another
class (4-bit bases), and layers with a dimension that is no multiple of the tile of FP8 units. NVFP4 also excludes the
first two and the last blocks, about 15 % of them (arXiv:2509.25149, section 4.1).

Transformer Engine (2.10 to 2.20): the parameters stay in high precision under their names and are quantised in every
product. The layer's own state (`_extra_state`: scales and their history) is in no state dict, so checkpoints and
exports are those of the plain model; scales are computed again after a resume. Products are FP8 only while
`transformer_engine.pytorch.autocast` is open. A block that is recomputed in the backward pass runs outside of the
forward that opened it, so each layer opens it again if it is closed while gradients are recorded.

Its CUDA graphs (2.20, `make_graphed_callables`) replay the sizes and the addresses of their capture, and refuse
autocast that caches its casts. Here a padded micro batch has a width of its own, FSDP2 and ZeRO-3 gather a weight to
another address each time, and autocast caches. So its layers run eagerly, with a millisecond of Python each.

torchao: the layer has no state besides its parameters; scales come from the tensors of each product. Speed needs
torch.compile, which fuses the casts. A product is counted if `aten::_scaled_mm` was called; a compiled block shows no
such calls, so there the class of the layers is the proof. Its gather of weights in FP8
(`enable_fsdp_float8_all_gather`) stays off: parameters would be of a class of its own, which neither checkpoints nor
sharded loading know. So does `pad_inner_dim`: layers whose sizes do not divide stay in 16 bit.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardwise.trainer.runtime.loss import IGNORED
from shardwise.trainer.runtime.models.build import Fp8
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.fp8 import FP8_RECIPES, Fp8Package, Shape
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, Precision

Region: TypeAlias = "TransformerEngineRegion | TorchaoRegion"


class Fp8Layers(NamedTuple):
    """The layers to convert by name, and the names of the others by the reason."""

    chosen: dict[str, nn.Linear]
    skipped: dict[str, tuple[str, ...]]

    @property
    def skipped_text(self) -> str:
        """`2 outside the blocks (lm_head, ...)`, one such phrase a reason; `none` where there is none."""
        return "; ".join(f"{len(names)} {reason} ({_first(names)})" for reason, names in self.skipped.items()) or "none"


def check_precision(precision: Precision) -> None:
    """InputError for a precision whose library is not here, before a model is loaded for it."""
    if precision is Precision.FP8:
        check_some_backend()


def check_some_backend() -> None:
    """InputError where neither library is installed."""
    if not any(find_spec(package.module) for package in Fp8Package):
        raise InputError(
            "pin.precision: fp8 needs torchao or Transformer Engine, and neither is installed; use bf16-mixed, or\n"
            f"{_line_of(Fp8Package.TORCHAO)}\n{_line_of(Fp8Package.TRANSFORMER_ENGINE)}"
        )


def install_fp8(model: PreTrainedModel, chosen: Candidate) -> Fp8:
    """Makes the model's blocks multiply in FP8; InputError if this model, recipe or device cannot."""
    recipe = chosen.fp8_recipe or Fp8Recipe.CURRENT
    if recipe is Fp8Recipe.DELAYED and chosen.checkpointing is not Checkpointing.NONE:
        raise InputError(
            "pin.fp8_recipe: delayed finds its scales in earlier forwards, and a recomputed block would find newer "
            "ones; use current, or pin.checkpointing: none"
        )
    region = fp8_region(recipe)
    layers = fp8_layers(model, recipe)
    if not layers.chosen:
        raise InputError(
            f"pin.precision: fp8 finds no layer of {type(model).__name__} that it could run: {layers.skipped_text}; "
            "use bf16-mixed"
        )
    made = _convert(model, layers, region)
    replaceable: Any = model
    replaceable.forward = _forward_in(region, model.forward, FP8_RECIPES[recipe].token_multiple)
    return Fp8(recipe, FP8_RECIPES[recipe].package, type(region.recipe).__name__, made, layers.skipped_text)


def fp8_region(recipe: Fp8Recipe) -> Region:
    """The region that converts layers and opens FP8 for a recipe; InputError if its library is missing or refuses."""
    package = FP8_RECIPES[recipe].package
    if find_spec(package.module) is None:
        raise InputError(
            f"pin.fp8_recipe: {recipe} needs {package}, which is not installed; use bf16-mixed, or\n{_line_of(package)}"
        )
    return TorchaoRegion(recipe) if package is Fp8Package.TORCHAO else TransformerEngineRegion(recipe)


def _line_of(package: Fp8Package) -> str:
    """The line that installs a library, with a comment that a shell passes over."""
    if package is Fp8Package.TORCHAO:
        return f"{extra_line(package.extra)} # for pin.fp8_recipe: torchao_tensorwise or torchao_rowwise"
    why = "compiles for minutes with nvcc; for CUDA 12: transformer-engine[core_cu12,pytorch]"
    return f"{extra_line(package.extra)} # {why}"


def check_fp8_ran(fp8: Fp8 | None, model: nn.Module) -> None:
    """EnvironmentFaultError if, after a step, the model has lost FP8 layers, or they have multiplied nothing in FP8."""
    if fp8 is None:
        return
    present = set(map(id, model.modules()))
    lost = [name for name, layer in fp8.layers.items() if id(layer) not in present]
    if lost:
        raise EnvironmentFaultError(
            f"fp8: {len(lost)} of {len(fp8.layers)} layers that {fp8.package} converted are no longer in the model "
            f"({_first(tuple(lost))}); set pin.precision: bf16-mixed"
        )
    is_compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    if fp8.num_products == 0 and not is_compiled:
        raise EnvironmentFaultError(
            f"fp8: {len(fp8.layers)} layers were converted by {fp8.package}, and no product of the first step was FP8; "
            "set pin.precision: bf16-mixed"
        )


def library_of(recipe: Fp8Recipe) -> str:
    """The distribution that a recipe computes with, and its version."""
    package = FP8_RECIPES[recipe].package
    return f"{package} {_version(package)}"


def fp8_facts(fp8: Fp8 | None) -> dict[str, str]:
    """Text of what was observed of FP8 after a step; empty without FP8."""
    if fp8 is None:
        return {}
    mark = " (experimental)" if FP8_RECIPES[fp8.recipe].is_experimental else ""
    return {
        "fp8 recipe": f"{fp8.recipe}{mark}: {fp8.recipe_class}",
        "fp8 library": library_of(fp8.recipe),
        "fp8 layers": str(len(fp8.layers)),
        "fp8 layer class": ", ".join(sorted({type(layer).__name__ for layer in fp8.layers.values()})),
        "fp8 products": f"{fp8.num_products} in forwards" if fp8.num_products else "not counted in compiled blocks",
        "fp8 layers left in 16 bit": fp8.skipped,
    }


def timed_facts(plan: Plan) -> dict[str, str]:
    """Text of the gain of FP8 as timed before a run in FP8; empty if it was not timed, or in another precision."""
    gain = plan.fp8_gain
    is_timed = gain is not None and plan.chosen.strategy.precision is Precision.FP8
    return {"fp8 gain": gain.text} if gain is not None and is_timed else {}


def _convert(model: nn.Module, layers: Fp8Layers, region: Region) -> dict[str, nn.Module]:
    made = {name: region.converted(linear) for name, linear in layers.chosen.items()}
    for name, layer in made.items():
        replace_layer(model, name, layer)
    return made


def _forward_in(region: Region, forward: Any, multiple: int) -> Any:  # noqa: ANN401  # the signature of any model
    """`forward` with its products in FP8 where it computes a loss."""

    @wraps(forward)
    def fp8_forward(*inputs: Any, **named: Any) -> Any:  # noqa: ANN401  # as above
        if named.get("labels") is None:
            return forward(*inputs, **named)
        with region.opened():
            return forward(*inputs, **padded_to_multiple(named, multiple))

    return fp8_forward


def padded_to_multiple(inputs: dict[str, Any], multiple: int) -> dict[str, Any]:
    """The inputs with columns added on the right until their tokens are a multiple; what is added is not learned.

    InputError where rows hold several documents: their width is fixed, and has to fit as it is.
    """
    ids: Tensor = inputs["input_ids"]
    rows, width = ids.shape
    if rows * width % multiple == 0:
        return inputs
    if inputs.get("position_ids") is not None:
        raise InputError(
            f"pin.precision: fp8 needs a multiple of {multiple} tokens in a micro batch, this one has {rows} packed "
            f"rows of {width}; set a train.seq_len that is a multiple of {multiple}"
        )
    extra = next(extra for extra in range(1, multiple) if rows * (width + extra) % multiple == 0)
    fill = {"input_ids": 0, "labels": IGNORED}
    return {**inputs, **{name: functional.pad(inputs[name], (0, extra), value=value) for name, value in fill.items()}}


def _version(package: Fp8Package) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(no version)"


_FIRST_BLOCKS, _LAST_SHARE = 2, 8 / 62  # of NVFP4: 2 and 8 of 62 blocks
_SHOWN = 3

OUTSIDE, ADAPTER, ROUTER, EXPERT, EDGE = "outside the blocks", "adapters", "routers", "experts", "first or last blocks"
SMALL = "too small to gain"
_PARTS = ((ADAPTER, re.compile(r"^lora_")), (ROUTER, re.compile(r"^(router|gate|shared_expert_gate)$")),
          (EXPERT, re.compile(r"^experts?$")))  # fmt: skip


def fp8_layers(model: nn.Module, recipe: Fp8Recipe) -> Fp8Layers:
    """Sorts the linear layers of a model that no engine has wrapped yet."""
    blocks = _blocks(model)
    edges = _edges(list(blocks)) if recipe is Fp8Recipe.NVFP4 else ()
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        reason = _obstacle(name, layer, blocks, edges, recipe)
        if reason is None:
            chosen[name] = layer
        else:
            skipped.setdefault(reason, []).append(name)
    converted = FP8_RECIPES[recipe].converts(map(_shape, chosen.values()))
    for name in [name for name, layer in chosen.items() if _shape(layer) not in converted]:
        skipped.setdefault(SMALL, []).append(name)
        del chosen[name]
    return Fp8Layers(chosen, {reason: tuple(names) for reason, names in skipped.items()})


def _shape(layer: nn.Linear) -> Shape:
    return layer.in_features, layer.out_features


def _obstacle(
    name: str, layer: nn.Linear, blocks: dict[str, nn.Module], edges: tuple[str, ...], recipe: Fp8Recipe
) -> str | None:
    parts = name.split(".")
    if not any(name.startswith(f"{block}.") for block in blocks):
        return OUTSIDE
    for reason, pattern in _PARTS:
        if any(pattern.match(part) for part in parts):
            return reason
    if type(layer) is not nn.Linear:
        return f"of class {type(layer).__name__}"
    if not FP8_RECIPES[recipe].fits(_shape(layer)):
        return f"with a dimension that is no multiple of {FP8_RECIPES[recipe].tile}"
    return EDGE if any(name.startswith(f"{block}.") for block in edges) else None


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def _edges(blocks: list[str]) -> tuple[str, ...]:
    last = round(len(blocks) * _LAST_SHARE)
    first = min(_FIRST_BLOCKS, last)  # a model of few blocks has no edges to spare
    return (*blocks[:first], *blocks[len(blocks) - last :])


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def replace_layer(model: nn.Module, name: str, made: nn.Module) -> None:
    """Puts a module in the place of another, by its dotted name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, made)


_CLASSES = {
    Fp8Recipe.DELAYED: "DelayedScaling",
    Fp8Recipe.CURRENT: "Float8CurrentScaling",
    Fp8Recipe.BLOCK: "Float8BlockScaling",
    Fp8Recipe.MXFP8: "MXFP8BlockScaling",
    Fp8Recipe.NVFP4: "NVFP4BlockScaling",
}
_QUESTIONS = {
    Fp8Recipe.DELAYED: "is_fp8_available",
    Fp8Recipe.CURRENT: "is_fp8_available",
    Fp8Recipe.BLOCK: "is_fp8_block_scaling_available",
    Fp8Recipe.MXFP8: "is_mxfp8_available",
    Fp8Recipe.NVFP4: "is_nvfp4_available",
}


class TransformerEngineRegion:
    """Where products are FP8: Transformer Engine's autocast under one recipe."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        can_run, reason = getattr(te, _QUESTIONS[recipe])(return_reason=True)
        if not can_run:
            raise InputError(f"pin.fp8_recipe: {recipe} does not run on this device: {reason}")
        self.recipe: Any = getattr(recipes, _CLASSES[recipe])()
        self.is_open = False
        self._autocast = te.autocast
        self._layer = _layer_class(te.Linear)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """FP8 inside the block; nothing changes where it is open already, so that scales are updated once a forward."""
        if self.is_open:
            yield
            return
        with self._autocast(enabled=True, recipe=self.recipe):
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False

    def converted(self, linear: nn.Linear) -> nn.Module:
        """A layer of Transformer Engine around the parameters of `linear`."""
        made: nn.Module = self._layer(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device="meta",  # nothing is allocated or initialized: the parameters are there
        )
        made._parameters.update(linear._parameters)
        made.region = self  # type: ignore[assignment]  # no module
        return made.train(linear.training)


def _layer_class(base: Any) -> type[nn.Module]:  # noqa: ANN401  # te.Linear, of an untyped library that may be absent
    """Transformer Engine's linear layer, counting its FP8 products and without a state of its own."""

    class Fp8Linear(base):  # type: ignore[misc]
        get_extra_state = nn.Module.get_extra_state  # so that nothing is put under `_extra_state`
        set_extra_state = nn.Module.set_extra_state
        region: TransformerEngineRegion
        num_products = 0  # of forwards; each has two more in its backward

        # As the library's own forward is: a compiled block is cut around it.
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
        def forward(self, inp: Tensor) -> Tensor:
            again: AbstractContextManager[None] = self.region.opened() if torch.is_grad_enabled() else nullcontext()
            with again:
                try:
                    out: Tensor = super().forward(inp)
                finally:  # a recomputation ends with an exception inside the last layer it needs
                    self.num_products += int(self.fp8)  # the layer's own reading of the autocast
            return out

    return Fp8Linear


_NAMES = {Fp8Recipe.TORCHAO_TENSORWISE: "tensorwise", Fp8Recipe.TORCHAO_ROWWISE: "rowwise"}


class TorchaoRegion:
    """Float8 layers need no surroundings: their products are FP8 wherever they run."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self._float8: Any = import_module("torchao.float8")
        self.recipe: Any = self._float8.Float8LinearConfig.from_recipe_name(_NAMES[recipe])

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Nothing to do."""
        yield

    def converted(self, linear: nn.Linear) -> nn.Module:
        """A float8 layer around the parameters of `linear`."""
        parent = nn.Sequential(linear)
        self._float8.convert_to_float8_training(parent, config=self.recipe)
        made: Any = parent[0].train(linear.training)
        made.num_products = 0
        made.forward = MethodType(_counted_forward, made)
        assert isinstance(made, nn.Module)
        return made


class _ScaledProducts(TorchDispatchMode):
    """Counts FP8 matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # torchao's tensor turns it into calls on plain ones, which come by here again
        self.count += func is torch.ops.aten._scaled_mm.default
        return func(*args, **(kwargs or {}))


def _counted_forward(self: Any, inp: Tensor) -> Tensor:  # noqa: ANN401  # Float8Linear, of a library that may be absent
    """The layer's own forward; the first one is observed, the others are assumed equal."""
    if torch.compiler.is_compiling():
        return _own_forward(self, inp)
    if self.num_products:
        self.num_products += 1
        return _own_forward(self, inp)
    with _ScaledProducts() as products:
        out = _own_forward(self, inp)
    self.num_products = products.count
    return out


def _own_forward(layer: Any, inp: Tensor) -> Tensor:  # noqa: ANN401  # as above
    out = type(layer).forward(layer, inp)
    assert isinstance(out, Tensor)
    return out
