"""Plans and runs of the zoo: a type is trained from a folder that transformers wrote, and by a plain loop beside it."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from plain_training import train_plainly
from rank_factory import SEED, rank_plan, train_rows
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from zoo import NUM_IDS, config_of, model_of

from shardwise.launch.plan import trace
from shardwise.launch.plan.gather import plan_inputs, profile_data, read_inputs
from shardwise.trainer.runtime.attention.choice import attention_name
from shardwise.trainer.runtime.checkpoint import read_weights
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import quantised_layers, seed_adapters
from shardwise.trainer.simulation.describe import describe_traced
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.model.config_json import read_config
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, LossHead, Method

NUM_STEPS = 3
ROWS_PER_STEP = 4
_MACHINE = engine_plan(Sharding.NONE).hardware  # of one CPU
_RANDOM = ("drop", "jitter")  # in the names of fields


def config_without_noise(name: str) -> PreTrainedConfig:
    """The miniature's config, its dropout and jitter zero."""
    fields = config_of(name).to_dict()
    noisy = [field for field in fields if any(word in field for word in _RANDOM) and isinstance(fields[field], float)]
    return type(config_of(name)).from_dict({**fields, **dict.fromkeys(noisy, 0.0)})


def write_miniature(name: str, folder: Path) -> Path:
    model_of(name, config=config_without_noise(name), noise=0.02).save_pretrained(folder)
    return folder


def shape_by_plan(base: Path, home: Path) -> ModelShape:
    """What `shardwise plan` reads of a folder, once it has planned for it; InputError if it refuses."""
    environment = {**os.environ, "HOME": str(home), "SHARDWISE_CACHE": str(home / "cache")}
    with pytest.MonkeyPatch.context() as patch:  # the worker's own function, without the start of a worker
        patch.setattr(trace, "ask_simulation", lambda _flag, request, _type, **_: describe_traced(request))
        inputs = read_inputs(
            None, [f"model.name={base}", "train.seq_len=64", "train.method=full"], machines=_MACHINE, only_plans=True,
            assumes_data=True, environment=environment,
        )  # fmt: skip
        plan = plan_inputs(inputs, profile_data(inputs), environment=environment)
    assert plan.chosen.memory.peak_allocated_bytes > 0
    return inputs.shape


def zoo_plan(base: Path, shape: ModelShape, rows: Path, sharding: Sharding = Sharding.NONE, **settings: Any) -> Plan:
    """A run of three steps in fp32 that starts from the folder; `settings` are those of `rank_plan`."""
    attention = Attention.SDPA if Attention.SDPA in shape.attentions else Attention.EAGER
    loss = LossHead.CHUNKED if LossHead.CHUNKED in shape.loss_heads else LossHead.EAGER
    plan = rank_plan(
        rows, sharding, num_steps=NUM_STEPS, sequences_per_step=ROWS_PER_STEP, attention=attention, loss=loss,
        micro_batch=2 // settings.get("num_ranks", 1), accumulation=2, **settings,
    )  # fmt: skip
    job = replace(plan.job, model=replace(plan.job.model, name=str(base)))
    return replace(
        plan, job=job, model_path=str(base), model_config=read_config(base / "config.json"), model_shape=shape,
        data=replace(plan.data, num_eval_rows=0),
    )  # fmt: skip


def loaded(folder: Path, plan: Plan) -> PreTrainedModel:
    settings = {"attn_implementation": attention_name(plan.chosen.attention), "output_loading_info": True}
    found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    model, notes = found
    assert not any(notes.values()), notes
    assert isinstance(model, PreTrainedModel)
    return model


def plain_model(plan: Plan, export: Path) -> nn.Module:
    """What a plain loop trains: the whole model, or new adapters of PEFT on it, as `export` describes them."""
    base = _plain_base(plan)
    model: nn.Module = base
    if plan.chosen.method.freezes_base:
        from peft import PeftConfig, get_peft_model

        config = PeftConfig.from_pretrained(str(export))
        config.inference_mode = False
        seed_adapters(SEED)
        model = get_peft_model(base, config)
    return model.train()


def saved_model(plan: Plan, run_dir: Path) -> nn.Module:
    """What a run saved, in transformers' model: the last checkpoint, or the exported adapters on their base."""
    base = _plain_base(plan)
    model: nn.Module = base
    if plan.chosen.method.freezes_base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(base, str(run_dir / "export"))
    else:
        weights = read_weights(open_checkpoint(run_dir / "checkpoints" / f"step-{plan.schedule.num_steps:08d}"))
        missing, surplus = base.load_state_dict(weights, strict=False)
        assert not surplus and not {name for name, _ in base.named_parameters()}.intersection(missing)
    return model


def _plain_base(plan: Plan) -> PreTrainedModel:
    """The base as transformers loads it; that of QLoRA with the weights that bitsandbytes' 4 bit leave."""
    assert plan.model_path is not None
    model = loaded(Path(plan.model_path), plan)
    if plan.chosen.method is Method.QLORA:
        _round_to_4_bit(model, _packed_layers(plan))
    return model


def _packed_layers(plan: Plan) -> Iterable[str]:
    model = build_model(plan)
    layers = {id(layer) for layer in quantised_layers(model)}
    return [path.removesuffix(".base_layer") for path, layer in model.named_modules() if id(layer) in layers]


@torch.no_grad()
def _round_to_4_bit(model: nn.Module, names: Iterable[str]) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name in names:
        layer: Any = model.get_submodule(name)
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight  # [out, in]
        codes, state = quantize_4bit(weight.contiguous(), quant_type="nf4", compress_statistics=True)
        weight.copy_(dequantize_4bit(codes, state))


def plain_losses(plan: Plan, model: nn.Module) -> list[float]:
    return list(train_plainly(plan, model=model, mean_loss=_mean_loss(plan)).losses.values())


def _mean_loss(plan: Plan) -> Callable[[nn.Module, int], Tensor]:
    """The loss of a step, from transformers' logits of each document alone."""
    rows, per_step = train_rows(plan), plan.schedule.sequences_per_step

    def of_step(model: nn.Module, step: int) -> Tensor:
        losses, num_targets = [], 0
        for number in rows.order(seed=SEED, sequences_per_step=per_step).rows_of_step(step):
            ids = torch.from_numpy(rows.row(number))
            for document in ids.tensor_split(rows.document_starts(number).tolist()):
                if len(document) > 1:
                    logits = model(input_ids=document[None], use_cache=False).logits
                    losses.append(functional.cross_entropy(logits[0, :-1], document[1:], reduction="sum"))
                    num_targets += len(document) - 1
        return torch.stack(losses).sum() / num_targets

    return of_step


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    """[1, 40, V] of a fixed row."""
    ids = torch.randint(3, NUM_IDS, (1, 40), generator=torch.Generator().manual_seed(0))
    logits: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits
