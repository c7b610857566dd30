"""The folder that others load: weights as safetensors, config, generation settings, tokenizer, model card.

    full, galore, merged   weights as safetensors, config, generation settings, tokenizer
    lora, qlora            adapter_config.json, adapter_model.safetensors in the type they were trained in, tokenizer;
                           the base is named as the job names it, for `PeftModel.from_pretrained(base, folder)`

A folder gets its name in one rename, when all of it is written (and, by `shardwise export`, was compared); one that
fails is removed, as its checkpoint is still there.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, modeling_utils

from trainer.runtime.data.chat.end_tokens import end_token_ids, write_generation_ids
from trainer.runtime.data.chat.template import load_chat_template, write_chat_template
from trainer.runtime.export.model_card import Export, base_of, model_card
from trainer.runtime.export.tokenizer import export_tokenizer
from trainer.runtime.models.adapters import ALL_LINEAR, TRANSPOSED, adapted_layers, peft_config, peft_key
from trainer.runtime.models.load.written_weights import check_model_written, check_written
from trainer.runtime.models.model_code import write_model_code
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.plan import Plan

# Experts in one tensor: PEFT puts one adapter around another and finds both again only by the word it was given.
_NESTED = ".base_layer.lora_"


def write_model_folder(
    model: PreTrainedModel, plan: Plan, out: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> str | None:
    """The folder of a run's model as it is now; one of that name is replaced.

    EnvironmentFaultError where the disk gives back other tensors than were written; nothing is replaced then.
    The answer is what is wrong with the exported tokenizer, in one line; None where nothing is.
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
        save_adapters(weights, plan, folder)
        check_written(folder, {peft_key(name): weight for name, weight in weights.items()})
        incident = add_tokenizer(plan, folder)
        write_card(Export(plan=plan), folder)
    return incident


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` that gets its name at the end, and goes where anything fails."""
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        if out.exists():
            shutil.rmtree(out)
        staging.rename(out)
    except OSError as error:
        raise EnvironmentFaultError(f"{out}: the export cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_model(model: PreTrainedModel, folder: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
    """Weights, config and generation settings, as transformers writes them."""
    use_cache, model.config.use_cache = model.config.use_cache, True
    with _taken_as_it_is():
        model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))
    model.config.use_cache = use_cache


@contextmanager
def _taken_as_it_is() -> Iterator[None]:
    """Keeps `save_pretrained` from loading DeepSpeed to ask whether the model that saves itself is its engine (W58)."""
    unwrap = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = cast(Any, _itself)  # it is overloaded
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap


def _itself(model: PreTrainedModel) -> PreTrainedModel:
    return model


def save_adapters(weights: Mapping[str, torch.Tensor], plan: Plan, folder: Path, *, hides_paths: bool = False) -> None:
    """PEFT's two files; with `hides_paths`, a base that is a folder here is recorded by the folder's name alone."""
    job, base = plan.job, base_of(plan)
    has_experts = any(_NESTED in name for name in weights)
    config = peft_config(
        job.train.lora,
        targets=ALL_LINEAR if has_experts else adapted_layers(job.train.lora, weights),
        is_transposed=plan.model_config["model_type"] in TRANSPOSED,
        base=base.name if hides_paths or base.folder is None else str(base.folder),
        revision=base.revision,
    )
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {peft_key(name): weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def add_tokenizer(plan: Plan, folder: Path) -> str | None:
    """The tokenizer with its chat template, and in generation_config.json the ids that end an answer.

    What is wrong with the tokenizer, in one line; None where nothing is, or where there is none.
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
    """A file of its own for the template that the run was trained with, wherever that stands.

    Why it is not there, in one line; None where it is, or where there is none.
    """
    assert plan.tokenizer_path is not None
    try:
        template = load_chat_template(plan.job.data.chat_template, Path(plan.tokenizer_path))
    except (InputError, EnvironmentFaultError) as error:
        return f"the exported tokenizer has no chat template: {' '.join(str(error).split())}"
    if template is not None:
        write_chat_template(template, folder)
    return None
