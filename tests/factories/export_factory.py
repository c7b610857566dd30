"""Runs to export: a plan, weights that are not those it began with, and a committed checkpoint of them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import SEQ_LEN, rank_plan, write_attempt
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.trainer.runtime.checkpoint import Ranks, Save
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.export.run import Done, export_run, plan_on
from shardwise.trainer.runtime.loop.session import facts_of
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import LoraJob, ModelJob
from shardwise.trainer.spec.messages.worker_requests import ExportRequest
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.strategy import Method, Precision

TINY_GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SEQ_LEN,
}  # fmt: skip
EXPERTS = {**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
LORA = LoraJob(rank=4, alpha=8.0)
_IDLE = ", ".join(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
IDLE = f"no gradient in 5 steps for the adapters of {_IDLE}: they do not learn"  # in runs from `write_idle_base`


def write_base(folder: Path, config: Mapping[str, Any] = TINY_LLAMA, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(11)
    fields = {"max_position_embeddings": SEQ_LEN, **config}
    made = AutoConfig.for_model(**({**config} if config["model_type"] == "gpt2" else fields))
    AutoModelForCausalLM.from_config(made).to(dtype).save_pretrained(folder)
    return folder


def write_idle_base(folder: Path, config: Mapping[str, Any], sentences: Iterable[str]) -> None:
    """A folder of weights whose second feed-forward layer reads zeros, so that its adapters never have a gradient."""
    write_trained_tokenizer(train_tokenizer(iter(sentences), vocab_size=config["vocab_size"]), folder)
    path = write_base(folder, config) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.post_attention_layernorm.weight"].zero_()
    save_file(weights, path, {"format": "pt"})


def run_of(
    base: Path | None, method: Method, *, precision: Precision = Precision.FP32, lora: LoraJob = LORA,
    config: Mapping[str, Any] = TINY_LLAMA, tokenizer: Path | None = None,
) -> Plan:  # fmt: skip
    plan = rank_plan(Path("rows"), method=method, precision=precision, train={"lora": lora})
    job = replace(plan.job, model=ModelJob(name=None if base is None else str(base)))
    written = json.loads((base / "config.json").read_text()) if base is not None else plan.model_config
    fields = {**config, "max_position_embeddings": SEQ_LEN} if config is TINY_LLAMA else dict(written)
    folders = {"model_path": base, "tokenizer_path": tokenizer}
    paths = {name: None if folder is None else str(folder) for name, folder in folders.items()}
    return replace(plan, job=job, model_config=fields, model_shape=read_model_shape(config), **paths)


def save_run(run_dir: Path, plan: Plan, *, losses: Mapping[int, float] = {}, steps: tuple[int, ...] = (4,)) -> Path:
    """A run directory with a checkpoint of each step: the trained weights, moved by a tenth of their size."""
    write_attempt(run_dir, plan)
    model = build_model(plan_on(plan, DeviceKind.CPU))
    state = RunState()
    for step in steps:
        torch.manual_seed(step)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(torch.randn_like(parameter) * (0.1 * parameter.abs().mean() + 0.01))
        state.step = step
        if step in losses:
            state.evaluations.append(Evaluation(step=step, loss=losses[step], perplexity=2.0, num_tokens=100))
        Save(
            run_dir / "checkpoints", model=model, optimizer=torch.optim.AdamW(trained), sharding=Sharding.NONE,
            facts=facts_of(plan, state), ranks=Ranks.alone(), keep=len(steps),
        ).run()  # fmt: skip
    return run_dir


def export(run_dir: Path, out: Path, **settings: Any) -> Done:
    return export_run(ExportRequest(run_dir=str(run_dir), out=str(out), **settings))
