"""A model folder as one GGUF file for llama.cpp and Ollama, with a Modelfile, read back and compared.

GGUF holds named tensors and settings (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); names and blocks of
quantised weights are those of the `gguf` package, which llama.cpp publishes. Conventions beyond names, as in its
convert_hf_to_gguf.py:

    llama     rotates neighbouring rows of a head, Hugging Face rows half a head apart: Q and K are stored permuted
    gemma     norms are stored as 1 + w
    llama 3.1 scaled rotary frequencies are a tensor of divisors, rope_freqs.weight
    1-D       tensors are fp32; rows that are no multiple of a block of 32 are fp16
    q4_0      embeddings and the head are q8_0, whose error a small table of rows shows the most

A configuration is refused unless every setting of it is written, has no effect on the logits, or has the value that
llama.cpp assumes. Two comparisons follow, both with transformers' own GGUF loader:

    exactly   the file's logits are those of the folder's model with the same blocks decoded into its weights
    rounding  and their difference to those of the unrounded model is reported

The first finds a wrong name, permutation or setting at any precision of the weights. The second is what quantisation
costs; it depends on the model, so no bound is set.

Tokenizers are BPE over bytes, with a rule of splitting that llama.cpp knows by name, or BPE with SentencePiece's spaces
and byte fallback, whose merges become scores.
"""

import gc
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise.trainer.runtime.data.chat.template import (
    TEMPLATE_NAMES,
    ChatTemplate,
    TemplateRefusalError,
    load_chat_template,
)
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer, named_tokens
from shardwise.trainer.runtime.export.check import SAME, check_logits, logits_of, prompt_ids, relative_difference
from shardwise.trainer.runtime.export.folder import end_of_turn_id, read_tokenizer, tokenizer_difference
from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.worker_requests import GgufType
from shardwise.trainer.spec.packages import extra_line

MODELFILE = "Modelfile"
_BLOCK = 32
_ELSEWHERE = "export without --format gguf, and try convert_hf_to_gguf.py of llama.cpp on that folder"

_WRITTEN = {  # settings of config.json, and the methods of GGUFWriter that write them
    "vocab_size": ("add_vocab_size",),
    "max_position_embeddings": ("add_context_length",),
    "hidden_size": ("add_embedding_length",),
    "num_hidden_layers": ("add_block_count",),
    "intermediate_size": ("add_feed_forward_length",),
    "num_attention_heads": ("add_head_count",),
    "num_key_value_heads": ("add_head_count_kv",),
    "head_dim": ("add_key_length", "add_value_length", "add_rope_dimension_count"),
    "rms_norm_eps": ("add_layer_norm_rms_eps",),
}
_GEMMA = {"sliding_window": ("add_sliding_window",)}
_CAPS = {
    "attn_logit_softcapping": ("add_attn_logit_softcapping",),
    "final_logit_softcapping": ("add_final_logit_softcapping",),
}
_OF_TENSORS = {"tie_word_embeddings", "attention_bias", "mlp_bias"}  # readers see them by which tensors there are
_NO_EFFECT = {
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
    "initializer_range", "attention_dropout", "pretraining_tp", "max_window_layers", "bos_token_id", "eos_token_id",
    "pad_token_id", "rope_theta",
}  # fmt: skip


class _Architecture(NamedTuple):
    """The form of one model type in GGUF."""

    name: str
    written: Mapping[str, tuple[str, ...]]
    permutes: bool = False
    adds_to_norms: float = 0.0
    ropes: tuple[str, ...] = ("default", "linear")


_ARCHITECTURES = {
    "llama": _Architecture("llama", _WRITTEN, permutes=True, ropes=("default", "linear", "llama3")),
    "mistral": _Architecture("llama", _WRITTEN, permutes=True),
    "qwen2": _Architecture("qwen2", {key: names for key, names in _WRITTEN.items() if key != "head_dim"}),
    "qwen3": _Architecture("qwen3", _WRITTEN),
    "gemma2": _Architecture("gemma2", _WRITTEN | _GEMMA | _CAPS, adds_to_norms=1.0),
    "gemma3_text": _Architecture("gemma3", _WRITTEN | _GEMMA, adds_to_norms=1.0),
}
# By the pattern that tokenizer.json splits text with; the names are llama.cpp's (llama-vocab.cpp).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + r"\p{N}" + _REST: "qwen2"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece's


def check_gguf_request(config: Mapping[str, Any]) -> None:
    """EnvironmentFaultError where the package is missing; InputError for a model that GGUF has no form for here."""
    if importlib.util.find_spec("gguf") is None:
        raise EnvironmentFaultError(f"--format gguf: gguf is not installed\n{extra_line('gguf')}")
    if config["model_type"] not in _ARCHITECTURES:
        raise InputError(
            f"--format gguf: {config['model_type']} is not among the architectures that are written here "
            f"({', '.join(_ARCHITECTURES)});\n{_ELSEWHERE}"
        )
    _check_settings(config_of(config))


def write_gguf(folder: Path, quant: GgufType, *, name: str, compares: bool) -> tuple[tuple[str, ...], list[str]]:
    """Turns a model folder in fp32 into model-QUANT.gguf and a Modelfile; returns checks and notes, a line each.

    InputError for a tokenizer or a tensor without a form in GGUF; EnvironmentFaultError if the file's logits differ.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    path = folder / f"model-{quant}.gguf"
    vocabulary = _vocabulary(folder, config.vocab_size)
    types = _write(path, config, quant, vocabulary=vocabulary, name=name)
    checks = _compare(path, config, types, quant) if compares else ()
    notes = _tokenizer_notes(path, folder)
    text, note = modelfile(path.name, folder, adds_bos=bool(vocabulary.get("add_bos_token")))
    for each in list(folder.iterdir()):
        if each.is_file() and each != path:
            each.unlink()
    (folder / MODELFILE).write_text(text, encoding="utf-8")
    return checks, [*notes, *([] if note is None else [note])]


def _check_settings(config: PreTrainedConfig) -> None:
    """InputError for a setting that changes the logits and that llama.cpp would not see."""
    known = _ARCHITECTURES[config.model_type]
    default: Any = type(config)
    assumed = {**default(num_hidden_layers=config.num_hidden_layers).to_dict(), **_assumed(config)}
    read = {*known.written, *_OF_TENSORS, *_NO_EFFECT, "rope_parameters"}
    for name, value in config.to_dict().items():
        if name not in read and value != assumed.get(name, value):
            raise InputError(
                f"--format gguf: {config.model_type} with {name}: {value} has no form in GGUF, where it is "
                f"{assumed[name]};\n{_ELSEWHERE}"
            )
    rope = _rope(config)
    if rope.get("rope_type", "default") not in known.ropes:
        raise InputError(f"--format gguf: rope_type {rope['rope_type']} is not written here;\n{_ELSEWHERE}")


def _assumed(config: PreTrainedConfig) -> dict[str, object]:
    """Values that llama.cpp assumes and that are not the default of the model's class."""
    if config.model_type == "mistral":
        window = config.sliding_window
        reaches = window is not None and window >= config.max_position_embeddings
        return {"sliding_window": window if reaches else None}
    if config.model_type.startswith("gemma"):
        # llama-model.cpp uses the head's width, except in the largest models of a family, recognized by their layers
        is_largest = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}[config.model_type]
        width = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
        return {"query_pre_attn_scalar": width, "layer_types": _gemma_layers(config)}
    return {"layer_types": ["full_attention"] * config.num_hidden_layers}


def _gemma_layers(config: PreTrainedConfig) -> list[str]:
    period = 2 if config.model_type == "gemma2" else 6
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(config.num_hidden_layers)]


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Rotary settings of layers with full attention."""
    rope: dict[str, dict[str, Any]] = config.rope_parameters
    return rope.get("full_attention", rope)


def _write(
    path: Path, config: PreTrainedConfig, quant: GgufType, *, vocabulary: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Writes the file, one tensor in memory at a time; returns the type of each by its name in the model."""
    import gguf

    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config.model_type].name)
    _add_settings(writer, config, quant, name)
    for key, value in vocabulary.items():
        getattr(writer, f"add_{key}")(value)
    extra = _rope_divisors(config)
    if extra is not None:
        writer.add_tensor_info("rope_freqs.weight", extra.shape, extra.dtype, extra.nbytes)
    names = _tensor_names(config, path.parent)
    types = {}
    for key, (tensor, _, shape) in names.items():
        types[key] = stored = _type_of(tensor, shape, quant)
        plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}.get(stored)
        held = tuple(shape) if plain is not None else gguf.quant_shape_to_byte_shape(shape, stored)
        dtype = np.dtype(plain or np.uint8)
        writer.add_tensor_info(
            tensor, held, dtype, math.prod(held) * dtype.itemsize, raw_dtype=None if plain else stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if extra is not None:
        writer.write_tensor_data(extra)
    for key, (tensor, file, _) in names.items():
        with safe_open(file, framework="pt") as opened:
            weight = _in_gguf_order(tensor, opened.get_tensor(key).float().numpy(), config)
        writer.write_tensor_data(gguf.quantize(weight, types[key]))
    writer.close()
    return types


def _add_settings(
    writer: Any,  # noqa: ANN401  # GGUFWriter
    config: PreTrainedConfig,
    quant: GgufType,
    name: str,
) -> None:
    import gguf

    rope = _rope(config)
    writer.add_name(f"{name}-{quant}")  # of exactly "mistral", transformers would choose another class
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field, methods in _ARCHITECTURES[config.model_type].written.items():
        value = _setting(config, field)
        for method in methods if value is not None else ():
            getattr(writer, method)(value)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _setting(config: PreTrainedConfig, name: str) -> Any:  # noqa: ANN401  # a number
    if name == "head_dim":  # Mistral's files may have none
        return getattr(config, name, None) or config.hidden_size // config.num_attention_heads
    return getattr(config, name)


def _rope_divisors(config: PreTrainedConfig) -> np.ndarray | None:
    """Divisors [head_dim / 2] of the rotary frequencies of Llama 3.1; None of other scalings."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = _setting(config, "head_dim")
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    divisors: np.ndarray = (plain / scaled).numpy().astype(np.float32)
    return divisors


def _tensor_names(config: PreTrainedConfig, folder: Path) -> dict[str, tuple[str, Path, tuple[int, ...]]]:
    """By name in the model: the name in GGUF, the file that has it, its shape; InputError for one without a name."""
    import gguf

    wanted = _ARCHITECTURES[config.model_type].name
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
    mapped, names = gguf.get_tensor_name_map(arch, config.num_hidden_layers), {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                name = mapped.get_name(key, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise InputError(f"--format gguf: {wanted} has no tensor for {key};\n{_ELSEWHERE}")
                names[key] = (name, path, tuple(opened.get_slice(key).get_shape()))
    return names


def _type_of(name: str, shape: tuple[int, ...], quant: GgufType) -> Any:  # noqa: ANN401  # GGMLQuantizationType
    from gguf import GGMLQuantizationType

    if len(shape) == 1:
        return GGMLQuantizationType.F32
    if shape[-1] % _BLOCK:
        return GGMLQuantizationType.F16
    is_table = name in ("token_embd.weight", "output.weight")
    return GGMLQuantizationType[(GgufType.Q8_0 if is_table and quant is GgufType.Q4_0 else quant).upper()]


def _in_gguf_order(name: str, weight: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """The weight with the rows and the offset that llama.cpp expects."""
    known = _ARCHITECTURES[config.model_type]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if known.permutes and heads is not None:
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight + np.float32(known.adds_to_norms) if name.endswith("norm.weight") else weight


def _compare(path: Path, config: PreTrainedConfig, types: Mapping[str, Any], quant: GgufType) -> tuple[str, ...]:
    """Compares the file with the folder's model, before and after the rounding; one model in memory at a time."""
    import gguf

    def decoded(name: str, weight: Tensor) -> Tensor:
        blocks = gguf.quantize(weight.numpy(), types[name])
        return torch.from_numpy(gguf.dequantize(blocks, types[name]))

    ids, folder = prompt_ids(config.vocab_size), path.parent
    exact = _logits(folder, ids)
    expected = _logits(folder, ids, change=decoded)
    found = _logits(folder, ids, gguf_file=path.name, config=_config_read(path, config))
    same = check_logits(expected, found, tolerance=SAME, what=f"{path.name}: loaded by transformers")
    rounded = relative_difference(exact, found)
    return (
        f"loaded again by transformers: logits within {same:.2g} of the same blocks in the model ({SAME:g} allowed)",
        f"rounding to {quant}: logits within {rounded:.2g} of the model's",
    )


def _logits(
    folder: Path,
    ids: Tensor,
    *,
    change: Callable[[str, Tensor], Tensor] | None = None,
    **settings: Any,  # noqa: ANN401  # transformers'
) -> Tensor:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **settings)
    assert isinstance(loaded, nn.Module)
    if change is not None:
        for name, parameter in loaded.named_parameters():
            parameter.data = change(name, parameter.data)
    logits = logits_of(loaded, ids)
    del loaded
    gc.collect()
    return logits


def _config_read(path: Path, config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that transformers reads from the file, with settings that the file lacks added from ours.

    EnvironmentFaultError for a setting that it reads otherwise than it was written.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    read: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    known = _ARCHITECTURES[config.model_type]
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    loads = {*mapping[known.name].values()}
    for name in known.written:
        found, written = getattr(read, name, None), _setting(config, name)
        is_same = found == written or (isinstance(written, float) and np.float32(written) == np.float32(found))
        if name in loads and not is_same:
            raise EnvironmentFaultError(f"{path.name}: {name} was written as {written}, and is read as {found}")
        setattr(read, name, written)
    for name in ("rope_parameters", "layer_types", "query_pre_attn_scalar", "attention_bias", "mlp_bias"):
        if hasattr(config, name):
            setattr(read, name, getattr(config, name))
    if config.model_type == "gemma3_text":
        read.final_logit_softcapping = None
    read.tie_word_embeddings = config.tie_word_embeddings
    return read  # type: ignore[no-any-return]


def _vocabulary(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Values for the `add_` methods of GGUFWriter that describe the tokenizer."""
    source = folder / "tokenizer.json"
    if not source.is_file():
        return {"tokenizer_model": "no_vocab"}
    content = json.loads(source.read_text(encoding="utf-8"))
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise InputError(f"--format gguf: a tokenizer of type {model['type']} is not written here;\n{_ELSEWHERE}")
    split, from_spaces = _split_name(content), bool(model.get("byte_fallback"))
    if split is None and not from_spaces:
        raise InputError(
            f"--format gguf: the tokenizer splits text by a rule that llama.cpp has no name for;\n{_ELSEWHERE}"
        )
    added = {each["id"]: each for each in content["added_tokens"]}
    texts = {index: text for text, index in model["vocab"].items()} | {i: each["content"] for i, each in added.items()}
    kinds = [_token_type(texts, index, added, model, is_sentencepiece=from_spaces) for index in range(vocab_size)]
    tokens = [texts.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    found: dict[str, Any] = {"tokenizer_model": "llama" if from_spaces else "gpt2"}
    found["tokenizer_pre"] = "default" if from_spaces else split
    found["token_types"] = kinds
    if from_spaces:  # llama.cpp merges the pair whose token has the highest score
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(model["merges"]):
            ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
        found["token_scores"] = [float(-ranks.get(text, len(merges))) for text in tokens]
        found["add_space_prefix"] = '"Prepend"' in json.dumps(content) or _prepends(content.get("pre_tokenizer"))
        pairs = zip(tokens, kinds, strict=True)
        tokens = [text.replace(_SPACE, " ") if kind == _USER_DEFINED else text for text, kind in pairs]
    else:
        found["token_merges"] = merges
    found["token_list"] = tokens
    return found | _special_tokens(folder, {text: index for index, text in texts.items()})


def _token_type(
    texts: Mapping[int, str], index: int, added: Mapping[int, Any], model: Mapping[str, Any], *, is_sentencepiece: bool
) -> int:
    if index not in texts:
        return _UNUSED
    if is_sentencepiece and texts[index] == model.get("unk_token"):
        return _UNKNOWN
    if index in added:
        return _CONTROL if added[index]["special"] else _USER_DEFINED
    is_byte = is_sentencepiece and len(texts[index]) == len("<0x00>") and texts[index].startswith("<0x")
    return _BYTE if is_byte else _NORMAL


def _prepends(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return bool(pre_tokenizer) and (pre_tokenizer or {}).get("prepend_scheme", "never") != "never"


def _split_name(content: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of a byte-level tokenizer's rule of splitting; None for a rule that it does not know."""
    outer = content.get("pre_tokenizer") or {}
    rules = outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer]
    if (content.get("normalizer") or {"type": "NFC"})["type"] != "NFC" or rules[-1].get("type") != "ByteLevel":
        return None
    if len(rules) == 1:
        own = rules[0]
        return "gpt-2" if own.get("use_regex", True) and not own.get("add_prefix_space") else None
    first = rules[0]
    is_split = len(rules) == 2 and first["type"] == "Split" and first["behavior"] == "Isolated"
    return _SPLITS.get(first["pattern"].get("Regex", "")) if is_split else None


def _special_tokens(folder: Path, ids: Mapping[str, int]) -> dict[str, Any]:
    named = {name.removesuffix("_token"): ids.get(text) for name, text in named_tokens(folder).items()}
    found: dict[str, Any] = {
        f"{name}_token_id": named[name] for name in ("bos", "eos", "unk", "pad") if named.get(name) is not None
    }
    template = load_chat_template(None, folder)
    found["add_bos_token"] = bool(load_tokenizer(folder).document_prefix)
    if template is not None:
        found["chat_template"] = template.source
        text = _rendered(template, _CONVERSATIONS[0])
        bos = template.named_tokens.get("bos_token")
        if text is not None:  # in training, the template alone puts bos
            found["add_bos_token"] = bool(bos) and text.startswith(str(bos))
    tokenizer = read_tokenizer(folder)
    turn = end_of_turn_id(tokenizer) if tokenizer is not None else None
    return found if turn is None else {**found, "eot_token_id": turn}


def _tokenizer_notes(path: Path, folder: Path) -> list[str]:
    """Notes on the tokenizer of the file, which transformers rebuilds and compares."""
    if not (folder / "tokenizer.json").is_file():
        return [f"{path.name} holds no tokenizer: the run was trained on ids"]
    difference = tokenizer_difference(folder, gguf_file=path.name)
    return [] if difference is None else [f"{path.name}: its tokenizer gives other ids in transformers: {difference}"]


# Ollama's templates (https://docs.ollama.com/template), of the formats of shardwise's own chat templates: a list of
# messages, of which the last is the user's. bos is left out where the tokenizer puts it; {eos} is the tokenizer's text.
_SYSTEM, _USER = '{{ if eq .Role "system" }}', '{{ else if eq .Role "user" }}'
_EACH, _ELSE, _END, _TEXT = "{{ range .Messages }}", "{{ else }}", "{{ end }}", "{{ .Content }}"
_CHATML = f"{_EACH}<|im_start|>{{{{ .Role }}}}\n{_TEXT}<|im_end|>\n{_END}<|im_start|>assistant\n"
_ROLES = f"{_EACH}<|{{{{ .Role }}}}|>\n{_TEXT}%s\n{_END}<|assistant|>\n"
_MODEL = f"{_TEXT}<end_of_turn>\n<start_of_turn>model\n{_ELSE}{_TEXT}<end_of_turn>\n<start_of_turn>user\n{_END}{_END}"
GO_TEMPLATES = {
    "chatml": _CHATML,
    "qwen": "{{ if not .System }}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    f"assistant.<|im_end|>\n{_END}{_CHATML}",
    "llama3": f"{_EACH}<|start_header_id|>{{{{ .Role }}}}<|end_header_id|>\n\n{_TEXT}<|eot_id|>{_END}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama2": f"[INST] {_EACH}{_SYSTEM}<<SYS>>\n{_TEXT}\n<</SYS>>\n\n{_USER}{_TEXT} [/INST]"
    f"{_ELSE} {_TEXT} {{eos}}{{bos}}[INST] {_END}{_END}",
    "mistral": f"[INST] {_EACH}{_SYSTEM}{_TEXT}\n\n{_USER}{_TEXT}[/INST]{_ELSE} {_TEXT}{{eos}}[INST] {_END}{_END}",
    "mistral_v1": f" [INST] {_EACH}{_SYSTEM}{_TEXT}\n\n{_USER}{_TEXT} [/INST]"
    f"{_ELSE} {_TEXT}{{eos}} [INST] {_END}{_END}",
    "gemma": f'<start_of_turn>user\n{_EACH}{{{{ if eq .Role "user" }}}}{_MODEL}',
    "gemma3": f"<start_of_turn>user\n{_EACH}{_SYSTEM}{_TEXT}\n\n{_USER}{_MODEL}",
    "phi3": _ROLES % "<|end|>",
    "zephyr": _ROLES % "{eos}",
    "alpaca": "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{{ .Prompt }}\n\n### Response:\n",
    "plain": f"{_EACH}{_SYSTEM}{_TEXT}\n\n{_USER}User: {_TEXT}\n{_ELSE}Assistant: {_TEXT}{{eos}}\n{_END}{_END}"
    "Assistant:",
}
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = tuple(
    [{"role": role, "content": f"The {role}'s text {place}."} for place, role in enumerate(roles)]
    for roles in (("user",), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))
)


def modelfile(model: str, folder: Path, *, adds_bos: bool) -> tuple[str, str | None]:
    """Ollama's description of the model, and why it has no chat template, None where it has one."""
    template = load_chat_template(None, folder) if (folder / "tokenizer.json").is_file() else None
    lines, note = [f"FROM ./{model}"], None
    if template is None:
        return f"{lines[0]}\n", None
    name = template_name(template, folder)
    if name is None:
        note = (
            f"{MODELFILE}: the chat template is none of {', '.join(TEMPLATE_NAMES)} and is not translated for Ollama; "
            "add TEMPLATE by hand if `ollama show --template` is not right"
        )
    else:
        tokens = {key: template.named_tokens.get(f"{key}_token", "") for key in ("bos", "eos")}
        bos = "" if adds_bos or not _starts_with_bos(template) else tokens["bos"]
        text = bos + GO_TEMPLATES[name].replace("{eos}", tokens["eos"]).replace("{bos}", tokens["bos"])
        lines.append(f'TEMPLATE """{text}"""')
    tokenizer = read_tokenizer(folder)
    turn = end_of_turn_id(tokenizer) if tokenizer is not None else None
    if tokenizer is not None and turn is not None:
        lines.append(f"PARAMETER stop {json.dumps(tokenizer.decode([turn]))}")
    return "\n".join(lines) + "\n", note


def template_name(template: ChatTemplate, folder: Path) -> str | None:
    """The name of our template that renders conversations as this one; None if there is none."""
    wanted = [_rendered(template, each) for each in _CONVERSATIONS]
    for name in TEMPLATE_NAMES:
        ours = load_chat_template(name, folder)
        if ours is not None and wanted[0] is not None and [_rendered(ours, each) for each in _CONVERSATIONS] == wanted:
            return name
    return None


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str | None:
    try:
        return template.render(messages, add_generation_prompt=True).text
    except TemplateRefusalError:
        return None


def _starts_with_bos(template: ChatTemplate) -> bool:
    bos = template.named_tokens.get("bos_token")
    return bool(bos) and (_rendered(template, _CONVERSATIONS[0]) or "").startswith(str(bos))
