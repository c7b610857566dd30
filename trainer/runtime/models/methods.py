"""Training methods: all weights, low-rank adapters on a frozen base (LoRA, QLoRA), noise on the embeddings (NEFTune).

LoRA (arXiv:2106.09685) by PEFT: the base is frozen, in the computing type of the precision; the adapters are trained in
fp32, or in the precision's own type if that has no fp32 copy (bf16). PEFT's layers are put into the model in place: it
stays the transformers model that it was, so the loss head, the engines and checkpoints find it unchanged. `rslora`
divides alpha by the root of the rank (arXiv:2312.03732), `dora` trains the length of each row of a weight and its
direction (arXiv:2402.09353). A target is the end of a layer's name, as PEFT reads it: `q_proj`, or
`layers.3.mlp.up_proj`. Every target must name a linear layer of the model, its experts or a router. None may be its
head, whose weight the loss reads by itself, or another layer whose weight is read past its forward (`targets`), where
an adapter has no effect. `all-linear` leaves those and routers out.

GaLore changes the optimizer, not the model. QLoRA's base is quantised while it is read (`quantisation`), so here it is
LoRA. Nothing is upcast afterwards: PEFT's preparation for k-bit training would turn norms, embeddings and head to fp32
and switch checkpointing to the reentrant kind; non-reentrant checkpointing needs no input that requires grad.

NEFTune (arXiv:2310.05914): each element of a row's embeddings gets uniform noise from [-1, 1] times alpha / sqrt(L d)
in training, L the tokens of the row and d the hidden size. Padding gets none, and in a packed row each document has
its own L. transformers has a hook of its own (`integrations.neftune`), which counts padding into L and disturbs it as
well. The noise comes from torch's generator, which is seeded anew for each micro batch (`step.seed_dropout`): a
step can be repeated exactly, under any engine. Lengths are read from labels and positions as the model is called, the
noise is added to the embedding's output: both are hooks of the plain modules, which every engine calls through.
"""

import hashlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.models.targets import (
    default_layers,
    experts_in,
    is_inside,
    is_linear,
    routers_of,
    without_effect,
)
from shardwise.trainer.runtime.run.types import compute_type, weight_type
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # PEFT's name for the only one
TRANSPOSED = frozenset({"gpt2", "openai-gpt"})  # model types whose linear layers keep their weights so (Conv1D)
_ADAPTER_PART = ".lora_"
_SHOWN = 8  # names in a message


def base_type(method: Method, precision: Precision) -> torch.dtype:
    """The type in which a method holds the weights of the model itself."""
    return compute_type(precision) if method.freezes_base else weight_type(precision)


def add_adapters(model: PreTrainedModel, lora: LoraJob, precision: Precision) -> None:
    """Freezes the model and adds trainable adapters to the linear layers that `lora` names.

    InputError where a target names no linear layer, or one on which an adapter has no effect.
    """
    from peft import inject_adapter_in_model  # takes seconds

    config = adapter_config(model, lora)
    try:
        with warnings.catch_warnings():
            # PEFT warns of each Conv1D or linear layer for which fan_in_fan_out is the other way round, and sets it.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            # It looks for the rank of experts among the modules alone, and uses it none the less.
            warnings.filterwarnings("ignore", "The following .*_pattern keys did not match", RuntimeWarning)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise _refused(lora, error) from error
    for parameter in trained_parameters(model):
        parameter.data = parameter.data.to(weight_type(precision))


def adapter_config(model: PreTrainedModel, lora: LoraJob) -> Any:  # noqa: ANN401  # PEFT's LoraConfig
    """PEFT's description of the adapters of a model: its layers by the shortest names that only they have.

    InputError as in `add_adapters`.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if ALL_LINEAR in lora.targets and len(lora.targets) > 1:
        raise InputError(f"lora.targets: {ALL_LINEAR} includes all others; remove the other names")
    is_all, is_transposed = lora.targets == (ALL_LINEAR,), any(isinstance(each, Conv1D) for each in layers.values())
    config = peft_config(lora, targets=ALL_LINEAR if is_all else lora.targets, is_transposed=is_transposed)
    try:
        convert_peft_config_for_transformers(config, model, None)  # experts by the names that their layers once had
    except ValueError as error:
        raise _refused(lora, error) from error
    parameters, routers = {*(config.target_parameters or ())}, routers_of(model)
    if is_all:
        names = default_layers(model)
        if config.target_modules != ALL_LINEAR:  # PEFT treats the other names as experts
            names = [name for name in names if name.rpartition(".")[2] in config.target_modules]
        parameters = {each for each in parameters if _has_one_outside(model, each, routers)}
    else:
        bare = {each for each in config.target_modules if _is_bare_router(model, each, routers)}
        parameters |= {f"{each}.weight" for each in bare}
        targets = [each for each in config.target_modules if each not in bare]
        _check_named(model, targets, layers)
        names = [name for name in layers if any(_is_named(name, target) for target in targets)]
    config.target_modules = shortest_names(names, [name for name, _ in model.named_modules()])
    config.target_parameters = sorted(parameters) or None
    return config


def rank_factors(model: PreTrainedModel) -> dict[str, int]:
    """How many times the rank `all-linear` gives the adapter of each layer, and of each tensor of experts, by path."""
    if not experts_in(model):  # PEFT, which takes seconds to import, changes nothing
        return dict.fromkeys(default_layers(model), 1)
    config = adapter_config(model, LoraJob(rank=1))
    found = {
        name: 1
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and any(_is_named(name, each) for each in config.target_modules)
    }
    for name, _ in model.named_parameters():
        if any(_is_named(name, each) for each in config.target_parameters or ()):
            own = (rank for pattern, rank in config.rank_pattern.items() if re.fullmatch(rf"(.*\.)?({pattern})", name))
            found[name] = next(own, 1)
    return found


def shortest_names(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """The shortest ends of these names that no other of `all_names` has, sorted."""
    chosen = set(names)
    others = [name.split(".") for name in all_names if name not in chosen]
    taken = {tuple(parts[-length:]) for parts in others for length in range(1, len(parts) + 1)}
    found = set()
    for name in chosen:
        parts = name.split(".")
        length = next(n for n in range(1, len(parts) + 1) if tuple(parts[-n:]) not in taken)
        found.add(".".join(parts[-length:]))
    return sorted(found)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _has_one_outside(model: nn.Module, target: str, routers: set[str]) -> bool:
    """True if a parameter of this name is in the model, and in no router."""
    named = [name for name, _ in model.named_parameters() if _is_named(name, target)]
    return any(not is_inside(name.rpartition(".")[0], routers) for name in named)


def _is_bare_router(model: nn.Module, target: str, routers: set[str]) -> bool:
    """True if a target names routers that keep their weight in a module of their own kind."""
    named = [model.get_submodule(name) for name in routers if _is_named(name, target)]
    return bool(named) and all(not is_linear(each) and "weight" in each._parameters for each in named)


def _refused(lora: LoraJob, error: ValueError) -> InputError:
    return InputError(f"lora.targets: {', '.join(lora.targets)}: {str(error).splitlines()[0]}")


def peft_config(
    lora: LoraJob,
    *,
    targets: str | Iterable[str],
    is_transposed: bool = False,
    base: str | None = None,
    revision: str | None = None,
) -> Any:  # noqa: ANN401  # PEFT's LoraConfig, whose import takes seconds
    """PEFT's description of the adapters; `base` is the name that it records of the model they belong to."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
    )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before adapters were put into it, for the block; for a forward without gradients.

    PEFT's own switch would also turn the gradients of the adapters off and on, which engines have recorded.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def seed_adapters(seed: int) -> None:
    """Seeds torch's generators for new adapters: they do not depend on how the base came to be."""
    digest = hashlib.sha256(f"{seed}/adapters".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates, a tied one once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def is_adapted(names: Iterable[str]) -> bool:
    """True if parameters of these names belong to a model with adapters."""
    return any(_ADAPTER_PART in name for name in names)


def adapted_layers(lora: LoraJob, names: Iterable[str]) -> list[str]:
    """Target modules for PEFT, from the names of the adapters' parameters."""
    if lora.targets != (ALL_LINEAR,):
        return list(lora.targets)
    layers = (name.partition(_ADAPTER_PART)[0] for name in names)
    return sorted({layer.rsplit(".", 1)[-1] for layer in layers})


def peft_key(name: str) -> str:
    """The key in PEFT's file of a parameter: without the adapter's name, and of DoRA's lengths without `weight`."""
    key = name.replace(f".{ADAPTER}", "")
    return f"base_model.model.{key.removesuffix('.weight') if 'lora_magnitude_vector' in key else key}"


def _check_named(model: PreTrainedModel, targets: list[str], layers: Mapping[str, nn.Module]) -> None:
    head, idle = model.get_output_embeddings(), without_effect(model)
    for target in targets:
        named = [name for name in layers if _is_named(name, target)]
        if not named:
            kinds = dict.fromkeys(name.rsplit(".", 1)[-1] for name, module in layers.items() if module is not head)
            known = ", ".join([*kinds][:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
            raise InputError(
                f"lora.targets: {target}: {type(model).__name__} has no linear layer of that name; it has {known}"
            )
        if any(layers[name] is head for name in named):
            raise InputError(f"lora.targets: {target}: is the head, which has no adapter here; remove it")
        for name in named:
            if name in idle:
                left = shortest_names([each for each in named if each not in idle], layers)
                instead = f"name {', '.join(left)} instead" if left else "remove it"
                raise InputError(f"lora.targets: {target}: an adapter has no effect on {name}: {idle[name]}; {instead}")


IGNORED = -100  # label of padding


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Makes every training forward of the model disturb its embeddings."""
    embedding: Any = model.get_input_embeddings()
    embedding.neftune_alpha = alpha
    embedding.neftune_lengths = None
    embedding.neftune_forwards = 0

    def note_lengths(_model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        embedding.neftune_lengths = None
        if embedding.training and labels is not None:
            embedding.neftune_lengths = lengths(labels, kwargs.get("position_ids"))

    model.register_forward_pre_hook(note_lengths, with_kwargs=True)
    embedding.register_forward_hook(_disturb)


def lengths(labels: Tensor, position_ids: Tensor | None) -> Tensor:
    """Tokens of the document that each position belongs to, [B, S]; 0 on padding.

    A row reaches to its last label. `position_ids` start anew with each document of a packed row.
    """
    places = torch.arange(labels.shape[1], device=labels.device)
    row_lengths = torch.where(labels != IGNORED, places + 1, 0).amax(dim=1, keepdim=True)
    is_token = places < row_lengths
    if position_ids is None:
        return row_lengths * is_token
    document = (position_ids == 0).cumsum(dim=1) - 1
    document = document.clamp(min=0)
    counts = torch.zeros_like(labels).scatter_add_(1, document, is_token.to(labels.dtype))
    return counts.gather(1, document) * is_token


def noise_facts(model: PreTrainedModel) -> dict[str, str]:
    """Text of how often noise was added; empty without NEFTune."""
    embedding: Any = model.get_input_embeddings()
    alpha = getattr(embedding, "neftune_alpha", None)
    if alpha is None:
        return {}
    return {"embedding noise": f"NEFTune, alpha {alpha:g}, added in {embedding.neftune_forwards} forwards"}


def _disturb(module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Hook of the embedding: its output [B, S, H] with noise, while a training batch is on its way."""
    embedding: Any = module
    tokens: Tensor | None = embedding.neftune_lengths
    embedding.neftune_lengths = None  # once for each call of the model
    if tokens is None:
        return output
    embedding.neftune_forwards += 1
    bound = embedding.neftune_alpha / (tokens.clamp(min=1) * output.shape[-1]).sqrt() * (tokens > 0)
    noise = torch.empty_like(output).uniform_(-1, 1).mul_(bound.unsqueeze(-1))
    return output + noise


def apply_method(model: PreTrainedModel, plan: Plan) -> None:
    """Freezes, adapts and hooks the model by the plan's method and job; before loss head and checkpointing."""
    train = plan.job.train
    if plan.chosen.method.freezes_base:
        seed_adapters(train.seed)
        add_adapters(model, train.lora, plan.chosen.strategy.precision)
    if train.neftune_alpha is not None:
        add_noise(model, train.neftune_alpha)


def method_facts(model: nn.Module) -> dict[str, str]:
    """Text of the observed method: trained share, adapters, types of the base."""
    assert isinstance(model, PreTrainedModel)
    layers = quantised_layers(model)
    packed = {id(layer.weight) for layer in layers}
    plain = [parameter for parameter in model.parameters() if id(parameter) not in packed]
    trained, frozen = ([p for p in plain if p.requires_grad is is_trained] for is_trained in (True, False))
    num_trained = sum(map(num_elements, trained))
    num_all = sum(map(num_elements, plain)) + sum(math.prod(layer.quant_state.shape) for layer in layers)
    share = f"{num_trained:,} of {num_all:,} ({100 * num_trained / num_all:.3g} %)"
    facts = {"trained parameters": share, **noise_facts(model)}
    if frozen or layers:
        num_adapted = sum(hasattr(module, "lora_A") for module in model.modules())
        facts["adapters"] = f"{_types(trained)}, on {num_adapted} layers"
        facts["base"] = _types(frozen)
    if layers:
        facts["4-bit layers"] = _quantisation(layers)
    return facts


def quantised_layers(model: nn.Module) -> list[Any]:
    """bitsandbytes' layers in the model; known by their module, as the library takes seconds to import."""
    return [module for module in model.modules() if type(module).__module__.startswith("bitsandbytes.")]


def num_elements(parameter: nn.Parameter) -> int:
    """Elements over all ranks, also of one that ZeRO-3 has cut."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _types(parameters: Iterable[torch.Tensor]) -> str:
    """`fp32`, or both where there are two."""
    return " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))


def _quantisation(layers: list[Any]) -> str:
    """`14 of nf4, scales quantised too, stored as uint8, computed in bfloat16`."""
    kinds = {
        (
            layer.quant_state.quant_type,
            "scales quantised too" if layer.quant_state.nested else "scales in fp32",
            f"stored as {str(layer.weight.dtype).removeprefix('torch.')}",
            f"computed in {str(layer.compute_dtype).removeprefix('torch.')}",
        )
        for layer in layers
    }
    return f"{len(layers)} of " + " and ".join(", ".join(kind) for kind in sorted(kinds))
