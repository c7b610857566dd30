"""The folder that others load: weights as safetensors, config, generation settings, tokenizer, model card.

    full, galore, merged   weights as safetensors, config, generation settings, tokenizer
    lora, qlora            adapter_config.json, adapter_model.safetensors in the type they were trained in, tokenizer;
                           the base is named as the job names it, for `PeftModel.from_pretrained(base, folder)`

A folder gets its name in one rename, when all of it is written (and, by `shardwise export`, was compared); one that
fails is removed, as its checkpoint is still there.

The files of the tokenizer are those that the data was prepared with. That alone is not enough: with the config.json of
some model types, transformers reads only the vocabulary from tokenizer.json and applies its own rules of splitting
(docs/workarounds.md, W9). So the folder is loaded as its user will load it, and the ids are compared.

Three places name a token that ends an answer: the base model's generation settings, the tokenizer (its end of text),
and the chat template, which closes the assistant's turn with a token of its own (`<|eot_id|>` of Llama 3, `<|im_end|>`
of ChatML). Generation needs all of them; without the last one a model answers, and then continues as the user.

Adapters are merged into the weights of their layers, layer by layer and in fp32, so that a plain model remains:

    W' = W + s B A                                   LoRA; s = alpha / rank, or alpha / sqrt(rank) for rsLoRA
    W' = m (W + s B A) / |W + s B A|_row             DoRA (arXiv:2402.09353); m: the trained length of each row

W is the base's own weight for LoRA. For QLoRA it is the 4-bit weight dequantised: the adapters were trained with that
weight, not with the original one. Layers of a 4-bit base without an adapter are dequantised as well. Experts that a
model holds in one tensor get their adapters by PEFT's own product. The sum is computed in fp32 and rounded once, to the
requested type.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, cast
from unicodedata import normalize

import torch
from accelerate import Accelerator
from jinja2 import TemplateError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, modeling_utils
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.checkpoint import canonical_name
from shardwise.trainer.runtime.data.chat.template import load_chat_template, write_chat_template
from shardwise.trainer.runtime.data.tokenizer import TextTokenizer, copy_tokenizer, load_tokenizer
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.export.model_card import Export, base_of, model_card
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.runtime.models.meta_model import causal_model
from shardwise.trainer.runtime.models.methods import (
    ADAPTER,
    TRANSPOSED,
    adapted_layers,
    adapter_config,
    is_adapted,
    peft_config,
    peft_key,
    quantised_layers,
)
from shardwise.trainer.runtime.models.model_code import load_model_code, write_model_code
from shardwise.trainer.runtime.models.outer import OF_EXPERTS, outer_of
from shardwise.trainer.runtime.models.weight_files import check_model_written, check_written
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.plan import Plan


def write_model_folder(
    model: PreTrainedModel, plan: Plan, out: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> str | None:
    """Writes the folder of a run's model as it is now, in place of an older one.

    Returns the defect of the exported tokenizer, in one line, or None. EnvironmentFaultError if the disk returns
    other tensors than were written; nothing is replaced then.
    """
    with staged(out) as folder:
        save_model(model, folder, state_dict=state_dict)
        check_model_written(folder, model, model.state_dict() if state_dict is None else state_dict)
        write_model_code(plan.model_code, folder)
        incident = add_tokenizer(plan, folder)
        write_card(Export(plan=plan), folder)
    return incident


def write_adapter_folder(weights: Mapping[str, torch.Tensor], plan: Plan, out: Path) -> str | None:
    """As `write_model_folder`, for the adapters of a plan: `weights` by their names in the model."""
    with staged(out) as folder:
        saved = save_adapters(weights, plan, folder)
        check_written(folder, saved)
        incident = add_tokenizer(plan, folder)
        write_card(Export(plan=plan, adapters=tuple(weights)), folder)
    return incident


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder next to `out` that is renamed to it at the end, and removed if anything fails."""
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        _set_usual_modes(staging)
        if out.exists():
            shutil.rmtree(out)
        staging.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvironmentFaultError(f"{out}: the export cannot be written: {reason}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _set_usual_modes(folder: Path) -> None:
    """The modes that the umask leaves, as the folder has them: safetensors writes files for their owner alone."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(folder.stat().st_mode & 0o666)


def save_model(model: PreTrainedModel, folder: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
    """Weights, config and generation settings, as transformers writes them."""
    use_cache, model.config.use_cache = model.config.use_cache, True
    model.config.__dict__.pop("auto_map", None)  # of code that is not in the folder; see `write_model_code`
    with _without_unwrapping():
        model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))
    model.config.use_cache = use_cache


@contextmanager
def _without_unwrapping() -> Iterator[None]:
    """Keeps `save_pretrained` from loading DeepSpeed to find out if the model is its engine (W58)."""
    unwrap = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = cast(Any, lambda model: model)  # it is overloaded
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap


def save_adapters(
    weights: Mapping[str, torch.Tensor], plan: Plan, folder: Path, *, hides_paths: bool = False
) -> dict[str, torch.Tensor]:
    """PEFT's two files, and the tensors in them by their names there.

    With `hides_paths`, a base that is a folder here is recorded by the folder's name alone.
    """
    job, base = plan.job, base_of(plan)
    has_experts, outer = any(OF_EXPERTS in name for name in weights), outer_of(plan, weights)
    layers = adapted_layers(job.train.lora, weights)
    exact = _exact_targets(plan) if outer is None and (has_experts or not _are_unique(plan, layers)) else None
    config = peft_config(
        job.train.lora,
        targets=layers if outer is None else outer.targets(layers),
        is_transposed=plan.model_config["model_type"] in TRANSPOSED,
        base=base.name if hides_paths or base.folder is None else str(base.folder),
        revision=base.revision,
    )
    if exact is not None:
        for field in ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern"):
            setattr(config, field, getattr(exact, field))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    named = {name: name if outer is None else outer.name_of(name) for name in weights}
    tensors = {peft_key(named[name]): weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return tensors


def _are_unique(plan: Plan, layers: Sequence[str]) -> bool:
    """True if these names are those of adapted layers only."""
    shape = plan.model_shape
    linears = [*shape.linears, *shape.dense_linears]
    linears += [each for kind in (shape.traced.kinds if shape.traced is not None else ()) for each in kind.linears]
    return not {each.name for each in linears if not each.adapter_rank_factor} & {*layers}


def _exact_targets(plan: Plan) -> Any:  # noqa: ANN401  # PEFT's LoraConfig
    """PEFT's description of the adapters by the model itself, built without memory."""
    load_model_code(plan.model_code)
    with torch.device("meta"), no_init_weights():
        model = causal_model(config_of(plan.model_config), attn_implementation="eager")
    return adapter_config(model, plan.job.train.lora)


def add_tokenizer(plan: Plan, folder: Path) -> str | None:
    """Writes the tokenizer with its chat template, and into generation_config.json the ids that end an answer.

    Returns the defect of the tokenizer, in one line, or None.
    """
    if plan.tokenizer_path is None:
        return None
    incident = export_tokenizer(Path(plan.tokenizer_path), folder)
    problem = _write_template(plan, folder)
    tokenizer = read_tokenizer(folder)
    if tokenizer is not None and (folder / "config.json").is_file():
        write_generation_ids(folder, end_token_ids(plan, tokenizer), tokenizer, is_new=plan.model_path is None)
    return "; ".join(each for each in (incident, problem) if each is not None) or None


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, None where transformers cannot load it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError):
        return None
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def write_card(export: Export, folder: Path) -> None:
    """The model card, README.md."""
    (folder / "README.md").write_text(model_card(export), encoding="utf-8")


def _write_template(plan: Plan, folder: Path) -> str | None:
    """Writes the template that the run was trained with; returns why it is missing, in one line, or None."""
    assert plan.tokenizer_path is not None
    try:
        template = load_chat_template(plan.job.data.chat_template, Path(plan.tokenizer_path))
    except (InputError, EnvironmentFaultError) as error:
        return f"the exported tokenizer has no chat template: {' '.join(str(error).split())}"
    if template is not None:
        write_chat_template(template, folder)
    return None


_TEXTS = (
    "The 2 quick foxes don't jump over 1,234,567 lazy dogs.",
    "def f(x):\n\n    \treturn  x + 1  # why?\r\n\r\n",
    "  two before, two after  ",
    "na\u00efve caf\u00e9 and cafe\u0301, \u65e5\u672c\u8a9e",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628\u0649 \U0001f600\u200d",
)
_NUM_TOKENS = 4096  # of the vocabulary, each tried as a text; more find nothing new and cost seconds


def export_tokenizer(source: Path, folder: Path) -> str | None:
    """Writes the tokenizer of `source` next to the config.json in `folder`; returns the difference of ids, or None."""
    trained_with = load_tokenizer(source)
    copy_tokenizer(trained_with, source, folder)
    difference = _first_difference(trained_with, folder, _texts(trained_with))
    if difference is None:
        return None
    return f"the exported tokenizer does not give the same ids as the one trained with: {difference}"


def tokenizer_difference(folder: Path, *, gguf_file: str) -> str | None:
    """The difference of ids between the folder's tokenizer and that in its GGUF file, in one line, or None.

    Only of text in NFC: GGUF has no field for a normalizer.
    """
    trained_with = load_tokenizer(folder)
    texts = [normalize("NFC", text) for text in _texts(trained_with)]
    return _first_difference(trained_with, folder, texts, gguf_file=gguf_file)


def _texts(tokenizer: TextTokenizer) -> list[str]:
    """Some sentences, and tokens from all over the vocabulary, with all its spaces, line ends and scripts."""
    vocab_size = tokenizer.vocab_size
    some = range(0, vocab_size, -(-vocab_size // _NUM_TOKENS))
    return [*_TEXTS, *(f"a{token} {token}1" for token in tokenizer.tokenizer.decode_batch([[id_] for id_ in some]))]


def _first_difference(
    trained_with: TextTokenizer,
    folder: Path,
    texts: Sequence[str],
    **settings: str,
) -> str | None:
    """The difference for the first text that becomes other ids in `folder`; None if all are equal."""
    try:
        exported = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        return f"transformers cannot load it: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
    assert isinstance(exported, PreTrainedTokenizerBase)
    found = exported(list(texts), add_special_tokens=False)["input_ids"]
    for text, ours, theirs in zip(texts, trained_with.encode(texts), found, strict=True):
        if list(theirs) != ours:
            pairs = enumerate(zip(ours, theirs, strict=False))  # one may end before they differ
            same = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
            shown = [str(list(ids)[same : same + 3]) for ids in (ours, theirs)]
            return f"{text!r}, token {same}: {shown[0]} was trained with, {type(exported).__name__} gives {shown[1]}"
    return None


_ANSWER = "An answer."  # stands for the assistant's text in a template
_TALK = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER}]


def end_token_ids(plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that end an answer of a plan's model, the base's own first; nothing if none is known."""
    is_own = plan.model_path is not None and plan.job.model.tokenizer is None  # another tokenizer has other ids
    ids = [*_base_ids(Path(plan.model_path))] if is_own and plan.model_path is not None else []
    if tokenizer is not None:
        ids += [each for each in (tokenizer.eos_token_id, end_of_turn_id(tokenizer)) if isinstance(each, int)]
    return tuple(dict.fromkeys(ids))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token after an answer in the chat template; None if it is plain text, or the template refuses the sample."""
    if not tokenizer.chat_template:
        return None
    try:
        text = tokenizer.apply_chat_template(_TALK, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return None
    _, _, tail = str(text).rpartition(_ANSWER)
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def write_generation_ids(
    folder: Path, end_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase, *, is_new: bool
) -> None:
    """Puts the ids into the generation_config.json that transformers wrote; other settings do not change.

    Of a new model into config.json too, which has the defaults of its class. By hand, because transformers refuses to
    save settings that contradict each other (a temperature and greedy decoding), as those of some bases do.
    """
    own: dict[str, Any] = {
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else list(end_ids),
        "pad_token_id": tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    for name in ("generation_config.json", *(("config.json",) if is_new else ())):
        path = folder / name
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        stays = () if is_new else ("pad_token_id", "bos_token_id")
        retained: dict[str, Any] = {key: settings[key] for key in stays if key in settings}
        settings = {**{key: each for key, each in settings.items() if key not in own}, **own, **retained}
        known = {key: each for key, each in settings.items() if key not in own or each not in (None, [])}
        path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _base_ids(folder: Path) -> list[int]:
    """Ids that the base's files name, generation settings before its config; not the default of its class."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        settings = json.loads(path.read_text(encoding="utf-8"))
        found = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
        if found is not None:
            return [int(each) for each in (found if isinstance(found, list) else [found])]
    return []


def merge_adapters(model: PreTrainedModel, dtype: torch.dtype, *, plain: PreTrainedModel) -> None:
    """Makes a model with adapters or 4-bit layers the plain one that it is, in `dtype`, in place.

    `plain` is the same model without weights (on `meta`): it shows which layers store their weights transposed.
    Memory: the model in `dtype` and one layer in fp32.
    """
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    for name in adapted:
        if "base_layer" in name.split("."):
            continue  # merged with what stands around it
        layer: Any = model.get_submodule(name)
        if _wraps_tensor(layer):
            whole = _merged_tensors(layer, dtype)
        else:
            base = layer.base_layer
            whole = _layer(merged_weight(_weight(base), layer), base.bias, plain.get_submodule(name), dtype)
        model.set_submodule(name, whole)
    packed = quantised_layers(model)
    for name, module in list[tuple[str, Any]](model.named_modules()):
        if any(module is layer for layer in packed):
            model.set_submodule(name, _layer(_weight(module), module.bias, plain.get_submodule(name), dtype))
    round_weights(model, dtype)
    model.requires_grad_(requires_grad=True)
    seam: Any = model
    for mark in ("peft_config", "is_loaded_in_4bit"):
        if hasattr(seam, mark):
            delattr(seam, mark)


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Rounds every parameter to `dtype`, one at a time; not buffers, of which rotary frequencies would be others."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    seam: Any = model.config
    seam.dtype = dtype


def merged_weight(base: Tensor, layer: Any) -> Tensor:  # noqa: ANN401  # PEFT's layer
    """The weight [out, in] in fp32 of a base weight [out, in] with a layer's adapter in it."""
    a, b = (getattr(layer, name)[ADAPTER].weight.detach() for name in ("lora_A", "lora_B"))
    vectors = getattr(layer, "lora_magnitude_vector", None)
    magnitudes = vectors[ADAPTER].weight.detach() if vectors is not None and ADAPTER in vectors else None
    return sum_of_lora(base, a, b, scaling=layer.scaling[ADAPTER], magnitudes=magnitudes)


def sum_of_lora(base: Tensor, a: Tensor, b: Tensor, *, scaling: float, magnitudes: Tensor | None) -> Tensor:
    """W' of LoRA, or of DoRA with `magnitudes` [out], in fp32: base [out, in], a [rank, in], b [out, rank]."""
    total = torch.addmm(base.float(), b.float(), a.float(), alpha=scaling)
    if magnitudes is not None:
        total *= (magnitudes.float() / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
    return total


def _wraps_tensor(layer: nn.Module) -> bool:
    """True if an adapter belongs to a tensor of a module that is not a linear layer: experts, a router."""
    return hasattr(layer, "parameter_name")


def _merged_tensors(layer: Any, dtype: torch.dtype) -> nn.Module:  # noqa: ANN401  # PEFT's wrapper, or one around another
    """The module inside of PEFT's wrappers, each adapter added to its tensor [experts, in, out]."""
    while _wraps_tensor(layer):
        for each in (layer.lora_A, layer.lora_B):
            each.float()
        parameter = layer.get_param()
        parameter.data = parameter.data.float()
        parameter.data = (parameter.data + layer.get_delta_weight(ADAPTER)).to(dtype)
        layer = layer.base_layer
    assert isinstance(layer, nn.Module)
    return layer


def _weight(layer: Any) -> Tensor:  # noqa: ANN401  # a linear layer of any kind
    """The weight of a layer as [out, in]; of a 4-bit one decoded to fp32."""
    if isinstance(layer, Conv1D):
        return layer.weight.detach().t()
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        weight: Tensor = layer.weight.detach()
        return weight
    from bitsandbytes.functional import dequantize_4bit  # takes seconds

    values = layer.weight.data.view(torch.uint8).reshape(-1, 1)[: math.ceil(state.shape.numel() / 2)]
    decoded = copy(state)
    decoded.dtype = torch.float32  # else of the computing type, rounded
    made: Tensor = dequantize_4bit(values, quant_state=decoded)
    return made.reshape(state.shape)


def _layer(weight: Tensor, bias: Tensor | None, plain: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A layer of the plain model's kind with this weight [out, in]."""
    outputs, inputs = weight.shape
    with torch.device("meta"):
        made = Conv1D(outputs, inputs) if isinstance(plain, Conv1D) else nn.Linear(inputs, outputs, bias is not None)
    whole = weight.t() if isinstance(plain, Conv1D) else weight
    made.weight = nn.Parameter(whole.to(dtype).contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().to(dtype))
    return made


def gathered_weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Weights that a run exports, at least on rank 0: adapters if there are any, else the whole model.

    Collective under a sharding engine, which gathers no more than is returned.
    """
    plain, engine = plain_model(model), running_engine(model)
    trained = [(name, parameter) for name, parameter in plain.named_parameters() if parameter.requires_grad]
    if is_adapted(name for name, _ in trained):
        with torch.no_grad():
            return {canonical_name(name): engine.gathered(parameter) for name, parameter in trained}
    return engine.whole_weights(accelerator, model)
