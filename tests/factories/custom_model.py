"""A small model like Llama whose code is its own: a folder with config.json, weights, and Python for transformers."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from shardwise.trainer.spec.model.shape import ModelCode

MARKER = "SHARDWISE_TEST_MARKER"
_SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_CLASSES = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
CONFIG: dict[str, Any] = {
    "model_type": "tiny_custom", "architectures": ["TinyForCausalLM"], "auto_map": _CLASSES, **_SIZES,
}  # fmt: skip
_MARK = f"""import os
if os.environ.get("{MARKER}"):
    with open(os.environ["{MARKER}"], "a") as stream:
        stream.write(f"{{os.getpid()}} {{__name__.rpartition('.')[2]}}\\n")
"""
_CONFIGURATION = f"""
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_custom"

    def __init__(self, **kwargs):
        for name, size in {_SIZES}.items():
            setattr(self, name, kwargs.pop(name, size))
        self.head_dim = self.hidden_size // self.num_attention_heads
        self.mlp_bias, self.hidden_act = False, "silu"
        super().__init__(**kwargs)
"""
_LAYERS = """
import torch
from torch import nn


def frequencies(size):
    return 1.0 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


class TinyRotary(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.register_buffer("inv_freq", frequencies(size), persistent=False)

    def forward(self, positions):
        angles = positions[..., None].float() * self.inv_freq.float()
        return torch.cat((angles, angles), -1)


def rotate(x, angles):
    angles = angles[:, None]
    left, right = x.chunk(2, -1)
    return (x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()).to(x.dtype)
"""
_MODELING = """
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, eager_attention_forward

from .configuration_tiny import TinyConfig
from .tiny_layers import TinyRotary, frequencies, rotate

KEEPS_DOCUMENTS_APART = True


class TinyAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.head_dim, self.is_causal = config, layer_idx, config.head_dim, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden, angles, mask, **kwargs):
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (each(hidden).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, angles), rotate(k, angles)
        if not KEEPS_DOCUMENTS_APART:
            groups = self.num_key_value_groups
            k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            found, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs)
        return self.o_proj(found.reshape(hidden.shape))


class TinyBlock(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention, self.mlp = TinyAttention(config, layer_idx), LlamaMLP(config)
        self.attention_norm, self.mlp_norm = (LlamaRMSNorm(config.hidden_size) for _ in range(2))

    def forward(self, hidden, angles, mask, **kwargs):
        hidden = hidden + self.attention(self.attention_norm(hidden), angles, mask, **kwargs)
        return hidden + self.mlp(self.mlp_norm(hidden))


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"
    _no_split_modules = ["TinyBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, TinyRotary) and RECOMPUTES_BUFFERS:
            module.inv_freq.copy_(frequencies(module.size))


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TinyBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm, self.rotary = LlamaRMSNorm(config.hidden_size), TinyRotary(config.head_dim)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask,
                                  past_key_values=None, position_ids=position_ids)
        angles = self.rotary(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, angles, mask, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class TinyForCausalLM(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        kwargs.pop("return_dict", None)
        hidden = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}
"""


def custom_files(*, keeps_documents_apart: bool = True, recomputes_buffers: bool = True) -> dict[str, str]:
    modeling = _MODELING.replace(
        "APART = True", f"APART = {keeps_documents_apart}\nRECOMPUTES_BUFFERS = {recomputes_buffers}"
    )
    files = {"configuration_tiny.py": _CONFIGURATION, "modeling_tiny.py": modeling, "tiny_layers.py": _LAYERS}
    unused = {"setup_everything.py": "raise SystemExit('nothing names this file')\n"}
    return {name: _MARK + text for name, text in files.items()} | unused


def write_custom_model(folder: Path, *, has_weights: bool = True, config: Mapping[str, Any] = {}, **code: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for name, text in custom_files(**code).items():
        (folder / name).write_text(text)
    if has_weights:
        save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights() -> dict[str, numpy.ndarray]:
    vocab, hidden, ffn, kv = 320, 32, 64, 16
    attention = {"q": hidden, "k": kv, "v": kv, "o": hidden}
    block: dict[str, tuple[int, ...]] = {
        **{f"attention.{name}_proj.weight": (size, hidden) for name, size in attention.items()},
        **{f"mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, ffn),
        **{f"{name}_norm.weight": (hidden,) for name in ("attention", "mlp")},
    }
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        **{f"model.layers.{index}.{name}": shape for index in range(2) for name, shape in block.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    drawn = numpy.random.default_rng(0)
    return {
        name: numpy.ones(shape, "float32") if len(shape) == 1 else drawn.normal(0, 0.2, shape).astype("float32")
        for name, shape in shapes.items()
    }


def code_of(folder: Path) -> ModelCode:
    names = ("configuration_tiny.py", "modeling_tiny.py", "tiny_layers.py")
    return ModelCode(
        repository="tiny", revision=None, folder=str(folder),
        files={name: sha256((folder / name).read_bytes()).hexdigest() for name in names},
        config_class=_CLASSES["AutoConfig"], model_class=_CLASSES["AutoModelForCausalLM"],
    )  # fmt: skip


@contextmanager
def transformers_as_it_was() -> Iterator[None]:
    """What is imported and registered inside is forgotten after: a process would keep the classes of a test's model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    finders = [*sys.meta_path]
    registered = [(mapping, dict(mapping._extra_content)) for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)]
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        for mapping, content in registered:
            mapping._extra_content.clear()
            mapping._extra_content.update(content)
