"""GGUF files: transformers' own loader reads the model's logits, settings and ids back from them."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_tokenizers import byte_level_folder, metaspace_folder, qwen_folder
from engine_plan_factory import TINY_LLAMA
from export_factory import EXPERTS, LORA, TINY_GPT2, export, run_of, save_run, write_base
from jinja2 import Environment
from msgspec.structs import replace
from pasted_pip import requirements_in
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.trainer.runtime.checkpoint import import_weights
from shardwise.trainer.runtime.data.chat.template import TEMPLATE_NAMES, TemplateRefusalError, load_chat_template
from shardwise.trainer.runtime.export import gguf as written
from shardwise.trainer.runtime.export.check import check_onnx_installed, logits_of, prompt_ids, relative_difference
from shardwise.trainer.runtime.export.run import plan_on, read_plan
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import ExportFormat, GgufType
from shardwise.trainer.spec.strategy import Attention, Method

VOCAB = 1024
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA = {**TINY_LLAMA, "vocab_size": VOCAB, "rope_parameters": LLAMA3_ROPE, "attention_bias": True}
QWEN2 = {**TINY_LLAMA, "vocab_size": VOCAB, "model_type": "qwen2", "tie_word_embeddings": True}
MISTRAL = {**TINY_LLAMA, "vocab_size": VOCAB, "model_type": "mistral", "sliding_window": None}
QWEN3 = {**TINY_LLAMA, "vocab_size": VOCAB, "model_type": "qwen3", "head_dim": 32}
GEMMA = {
    **TINY_LLAMA, "vocab_size": VOCAB, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
    "num_hidden_layers": 6,
}  # fmt: skip
GEMMA2, GEMMA3 = {**GEMMA, "model_type": "gemma2"}, {**GEMMA, "model_type": "gemma3_text"}


def run_dir_of(tmp_path: Path, config: dict, method: Method, tokenizer: Path | None, template: str | None) -> Path:
    plan = run_of(write_base(tmp_path / "base", config), method, lora=LORA, config=config, tokenizer=tokenizer)
    data = replace(plan.job.data, chat_template=template)
    attention = Attention.EAGER if config["model_type"] == "gemma2" else plan.chosen.attention
    plan = replace(plan, candidates=(replace(plan.chosen, attention=attention),))
    return save_run(tmp_path / "run", replace(plan, job=replace(plan.job, data=data)))


@pytest.mark.parametrize(
    ("config", "method", "quant", "template"),
    [
        pytest.param(LLAMA, Method.LORA, GgufType.Q8_0, "llama3", id="llama"),
        pytest.param(QWEN2, Method.FULL, GgufType.Q4_0, "qwen", id="qwen2"),
        pytest.param(GEMMA3, Method.FULL, GgufType.F16, "gemma3", id="gemma3"),
        pytest.param(QWEN3, Method.FULL, GgufType.Q8_0, "chatml", id="qwen3", marks=pytest.mark.long),
        pytest.param(GEMMA2, Method.LORA, GgufType.Q8_0, "gemma", id="gemma2", marks=pytest.mark.long),
        pytest.param(MISTRAL, Method.FULL, GgufType.F16, "mistral", id="mistral", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_gguf_file_gives_the_logits_of_the_model(config, method, quant, template, tmp_path):
    make = {"q": qwen_folder, "g": metaspace_folder, "m": metaspace_folder}.get(
        config["model_type"][0], lambda folder: byte_level_folder(folder, bos="<|begin_of_text|>", eos="<|endoftext|>")
    )
    run_dir = run_dir_of(tmp_path, config, method, make(tmp_path / "tokenizer"), template)
    done = export(run_dir, tmp_path / "out", format=ExportFormat.GGUF, quant=quant)
    name = f"model-{quant}.gguf"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, "Modelfile", "README.md"}
    assert done.notes == ()  # the ids are the same, and the template is translated
    assert "gguf" in (tmp_path / "out" / "README.md").read_text()

    ids = prompt_ids(VOCAB, batch=2)
    model = build_model(plan_on(read_plan(run_dir), DeviceKind.CPU))
    import_weights(model, done.checkpoint)
    read = AutoConfig.from_pretrained(tmp_path / "out", gguf_file=name)
    for field in ("rope_parameters", "attention_bias", "head_dim", "layer_types", "query_pre_attn_scalar"):
        if hasattr(model.config, field):  # of these, the loader reads some, and of some architectures
            setattr(read, field, getattr(model.config, field))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=name, config=read, dtype=torch.float32)
    difference = relative_difference(logits_of(model, ids), logits_of(found, ids))
    assert 0 < difference < {GgufType.F16: 2e-3, GgufType.Q8_0: 4e-2, GgufType.Q4_0: 0.3}[quant]


def test_the_settings_of_a_file_are_those_of_the_configuration(tmp_path):
    from gguf import GGUFReader

    tokenizer = byte_level_folder(tmp_path / "tokenizer", bos="<|begin_of_text|>", eos="<|endoftext|>")
    run_dir = run_dir_of(tmp_path, LLAMA, Method.FULL, tokenizer, "llama3")
    export(run_dir, tmp_path / "out", format=ExportFormat.GGUF, quant=GgufType.F16, checks=False)
    reader = GGUFReader(tmp_path / "out" / "model-f16.gguf")
    settings = {name: field.contents() for name, field in reader.fields.items()}
    assert settings["general.architecture"] == "llama"
    assert settings["tokenizer.ggml.pre"] == "gpt-2"
    assert settings["tokenizer.ggml.add_bos_token"] is True  # the template begins with it
    tokens = settings["tokenizer.ggml.tokens"]
    assert tokens[settings["tokenizer.ggml.eot_token_id"]] == "<|eot_id|>"
    assert tokens[settings["tokenizer.ggml.eos_token_id"]] == "<|endoftext|>"
    assert (len(tokens), tokens[-1]) == (VOCAB, f"[PAD{VOCAB - 1}]")
    expected = {
        "context_length": 48, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0, "vocab_size": VOCAB,
        "rope.dimension_count": 16,
    }  # fmt: skip
    assert {name: settings[f"llama.{name}"] for name in expected} == expected
    tensors = {each.name: each for each in reader.tensors}
    divisors = tensors["rope_freqs.weight"].data
    assert divisors[0] < divisors[-1] == pytest.approx(8.0, rel=1e-6), "the slowest is divided by the factor"
    types = {"output_norm.weight": "F32", "blk.1.attn_q.bias": "F32", "blk.1.attn_q.weight": "F16"}
    assert {name: tensors[name].tensor_type.name for name in types} == types
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./model-f16.gguf\nTEMPLATE ") and 'PARAMETER stop "<|eot_id|>"' in modelfile


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_a_template_of_ollama_renders_as_ours_does(name, tmp_path):
    tokenizer = metaspace_folder(tmp_path / "tokenizer")
    template = load_chat_template(name, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(template.source)
    text, note = written.modelfile("m.gguf", tokenizer, adds_bos=True)
    assert note is None
    translated = Environment().from_string(as_jinja(re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]))
    num_rendered = 0
    for messages in written._CONVERSATIONS:
        try:
            ours = template.render(messages, add_generation_prompt=True).text
        except TemplateRefusalError:
            continue
        num_rendered += 1
        values = {"messages": messages, "prompt": messages[-1]["content"], "system": messages[0]["role"] == "system"}
        assert translated.render(values) == ours.removeprefix("<s>")
    assert num_rendered
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    text, note = written.modelfile("m.gguf", tokenizer, adds_bos=True)
    assert "TEMPLATE" not in text and "TEMPLATE" in note, "one that is none of ours is not translated"


def as_jinja(go: str) -> str:
    """The few forms of Go's templates that are written, in jinja2."""
    closing: list[str] = []
    forms = {
        "range .Messages": "{% for m in messages %}", "else": "{% else %}", ".Content": "{{ m.content }}",
        ".Role": "{{ m.role }}", ".Prompt": "{{ prompt }}", "if not .System": "{% if not system %}",
        'if eq .Role "system"': "{% if m.role == 'system' %}", 'if eq .Role "user"': "{% if m.role == 'user' %}",
        'else if eq .Role "user"': "{% elif m.role == 'user' %}",
    }  # fmt: skip

    def translated(match: re.Match) -> str:
        if match[1].startswith(("range", "if")):
            closing.append("{% endfor %}" if match[1].startswith("range") else "{% endif %}")
        return closing.pop() if match[1] == "end" else forms[match[1]]

    translated_text = re.sub(r"\{\{ (.*?) \}\}", translated, go)
    assert not closing
    return "{% raw %}{% endraw %}" + translated_text.replace("\n", "{{ '\\n' }}")


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (EXPERTS, "mixtral"),
        ({**TINY_LLAMA, "model_type": "gemma"}, "gemma"),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window"),
        ({**TINY_LLAMA, "hidden_act": "gelu"}, "hidden_act: gelu"),
        ({**GEMMA2, "query_pre_attn_scalar": 20}, "query_pre_attn_scalar: 20"),
        ({**TINY_LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({**MISTRAL, "sliding_window": 8, "max_position_embeddings": 48}, "sliding_window"),
    ],
)
def test_what_has_no_form_in_gguf_is_refused(config, fact):
    with pytest.raises(InputError, match=re.escape(fact)) as caught:
        written.check_gguf_request(config)
    assert "without --format gguf" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_tokenizer_that_splits_in_its_own_way_is_refused(tmp_path):
    folder = byte_level_folder(tmp_path / "tokenizer", bos=None, eos="<|endoftext|>")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="splits text"):
        written._vocabulary(folder, VOCAB)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    missing = ("gguf", "onnxscript")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    with pytest.raises(EnvironmentFaultError, match=re.escape("shardwise[gguf]")):
        written.check_gguf_request(TINY_LLAMA)
    with pytest.raises(EnvironmentFaultError, match="onnxscript ") as caught:
        check_onnx_installed()
    assert set(requirements_in(str(caught.value), tmp_path)) == {"onnx", "onnxscript", "onnxruntime"}


ONE_BLOCK = {"num_hidden_layers": 1}  # tracing takes as long as there are blocks


@pytest.mark.parametrize(
    ("config", "method"),
    [
        pytest.param({**TINY_LLAMA, **ONE_BLOCK}, Method.QLORA, id="llama merged"),
        pytest.param({**EXPERTS, **ONE_BLOCK}, Method.FULL, id="mixtral"),
        pytest.param(TINY_GPT2, Method.FULL, id="gpt2", marks=pytest.mark.long),
    ],
)
def test_a_graph_gives_the_logits_of_the_model(config, method, tmp_path):
    import onnxruntime  # not where these tests are collected: it takes a while

    plan = run_of(write_base(tmp_path / "base", config), method, lora=LORA, config=config)
    run_dir = save_run(tmp_path / "run", plan)
    merge = method is Method.QLORA
    done = export(run_dir, tmp_path / "graph", format=ExportFormat.ONNX, merge=merge)
    export(run_dir, tmp_path / "model", merge=merge)
    names = {path.name for path in (tmp_path / "graph").iterdir()}
    assert names >= {"model.onnx", "config.json", "generation_config.json", "README.md"}
    assert not any(name.endswith(".safetensors") for name in names)
    assert "onnxruntime" in done.checks[-1]
    session = onnxruntime.InferenceSession(tmp_path / "graph" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape, each.type) for each in session.get_inputs()] == [
        ("input_ids", ["batch", "sequence"], "tensor(int64)"),
        ("attention_mask", ["batch", "sequence"], "tensor(int64)"),
    ]
    assert [(each.name, each.type) for each in session.get_outputs()] == [("logits", "tensor(float)")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for batch, length in ((1, 1), (2, 7), (5, 31)):
        ids = np.random.default_rng(length).integers(0, 256, (batch, length))
        mask = np.ones_like(ids)
        (found,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(ids)).logits
        assert found.shape == (batch, length, 256)
        assert relative_difference(expected, torch.from_numpy(found)) < 1e-5
