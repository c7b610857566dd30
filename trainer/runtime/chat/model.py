"""The model of a run, loaded to answer on whatever device is here.

The run's export, where there is one and no checkpoint is named; else a checkpoint. Adapters go onto their base as they
were trained: of qlora it is held in 4 bit. On a GPU weights are held in the type that the run computed in; on a CPU,
where 16 bit is slow, as they lie there.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer.runtime.checkpoint import import_weights
from trainer.runtime.data.chat.end_tokens import end_token_ids
from trainer.runtime.data.chat.template import load_chat_template
from trainer.runtime.data.tokenizer import load_tokenizer
from trainer.runtime.export.checkpoint import checkpoint_of
from trainer.runtime.export.merge import round_weights
from trainer.runtime.export.plan import plan_on, read_plan
from trainer.runtime.models.adapters import peft_key
from trainer.runtime.models.build import build_model
from trainer.runtime.models.model_code import compute_buffers, load_model_code
from trainer.runtime.run.types import compute_type
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Plan


class Partner(NamedTuple):
    """A model to talk with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    title: str  # `runs/x, step 30`
    end_ids: tuple[int, ...]
    prefix: tuple[int, ...]  # what stands before a text
    max_positions: int | None  # tokens that the model reads, prompt and answer together

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)


def load_partner(run_dir: Path, *, checkpoint: str | None) -> Partner:
    """The model and tokenizer of a run; InputError where it has none of either, or its base is gone."""
    plan = read_plan(run_dir)
    if plan.tokenizer_path is None:
        raise InputError(f"{run_dir}: was trained on token ids without a tokenizer; there are no words to talk with")
    export = run_dir / "export"
    if checkpoint is None and export.is_dir():
        model, title, source = _exported(plan, export), f"{export}", export
    else:
        found, _ = checkpoint_of(run_dir, plan, checkpoint)
        model = _built(plan)
        import_weights(model, found)
        title, source = f"{run_dir}, step {found.step}", Path(plan.tokenizer_path)
    tokenizer = _tokenizer(source, plan)
    return Partner(
        model=_on_device(model, plan),
        tokenizer=tokenizer,
        title=title,
        end_ids=end_token_ids(plan, tokenizer),
        prefix=load_tokenizer(source).document_prefix,
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )


def _exported(plan: Plan, folder: Path) -> PreTrainedModel:
    """The model of a run's own export; adapters on the base that they were trained on."""
    if not plan.chosen.method.freezes_base:
        load_model_code(plan.model_code)  # the run's own copy, not what lies in the folder
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        assert isinstance(loaded, PreTrainedModel)
        compute_buffers(loaded, loaded.dtype, with_persistent=False)
        return loaded
    model, saved = _built(plan), load_file(folder / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(saved[peft_key(name)])
    return model


def _built(plan: Plan) -> PreTrainedModel:
    """The plan's model as it is before its first step."""
    if plan.model_path is not None and not Path(plan.model_path).is_dir():
        raise InputError(f"{plan.model_path}: the base model is not there any more; put it back")
    model = build_model(plan_on(plan, _device_kind()))
    model.config.use_cache = True
    return model


def _tokenizer(folder: Path, plan: Plan) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder with the template that the run was trained with."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    template = load_chat_template(plan.job.data.chat_template, folder)
    if template is not None:
        tokenizer.chat_template = template.source
    return tokenizer


def _on_device(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    model.requires_grad_(requires_grad=False).eval()
    if _device_kind() is not DeviceKind.CUDA:
        return model
    if not plan.chosen.method.freezes_base:
        round_weights(model, compute_type(plan.chosen.strategy.precision))
    try:
        moved: Any = model.to("cuda")  # type: ignore[arg-type]  # transformers' decorator hides the signature
    except torch.cuda.OutOfMemoryError as error:
        raise EnvironmentFaultError(
            "the model does not fit on this GPU; to talk with it on the CPU, set CUDA_VISIBLE_DEVICES= (nothing)"
        ) from error
    assert isinstance(moved, PreTrainedModel)
    return moved


def _device_kind() -> DeviceKind:
    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
