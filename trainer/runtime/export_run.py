"""Writes what a run trained for others to load: a Hugging Face model folder, or a PEFT folder of adapters.

    python -m trainer.runtime.export_run RUN_DIR OUT

writes it from the newest committed checkpoint of a run, whatever engine saved it, on the CPU and in one process.

    full, galore   weights as safetensors, config, generation settings, tokenizer
    lora, qlora    adapter_config.json, adapter_model.safetensors in the type they were trained in, tokenizer; the base
                   is named as the job names it, for `PeftModel.from_pretrained(base, folder)`
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from trainer.runtime.adapters import TRANSPOSED, adapted_layers, is_adapted, peft_config, peft_key
from trainer.runtime.checkpoint import canonical_name, find_checkpoint, import_weights, read_weights
from trainer.runtime.export_tokenizer import export_tokenizer
from trainer.runtime.model import build_model, is_deepspeed, plain_model
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from trainer.spec.plan import Plan

_SNAPSHOTS = "snapshots"  # the folder of the hub's cache that holds one folder for each revision


def write_model_folder(
    model: PreTrainedModel,
    out: Path,
    *,
    tokenizer_path: str | None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> str | None:
    """Makes `out` in one rename, so that a folder of that name is always complete; an older one is replaced.

    The answer is what is wrong with the exported tokenizer, in one line; None where nothing is.
    """

    def write(folder: Path) -> None:
        use_cache, model.config.use_cache = model.config.use_cache, True
        model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))
        model.config.use_cache = use_cache

    return _write_folder(out, write, tokenizer_path=tokenizer_path)


def write_adapter_folder(weights: Mapping[str, torch.Tensor], plan: Plan, out: Path) -> str | None:
    """As `write_model_folder`, for the adapters of a plan: `weights` by their names in the model."""
    job = plan.job
    config = peft_config(
        job.train.lora,
        targets=adapted_layers(job.train.lora, weights),
        is_transposed=plan.model_config["model_type"] in TRANSPOSED,
        base=_base_name(plan),
        revision=job.model.revision,
    )
    config.inference_mode = True
    tensors = {peft_key(name): weight.contiguous() for name, weight in weights.items()}

    def write(folder: Path) -> None:
        config.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return _write_folder(out, write, tokenizer_path=plan.tokenizer_path)


def gathered_weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """What a run exports, on rank 0 at least: adapters where there are any, else the whole model's weights.

    Collective under a sharding engine, which gathers no more than is answered.
    """
    plain = plain_model(model)
    trained = [(name, parameter) for name, parameter in plain.named_parameters() if parameter.requires_grad]
    if is_adapted(name for name, _ in trained):
        with torch.no_grad():
            return {canonical_name(name): _whole(parameter) for name, parameter in trained}
    if isinstance(model, FSDPModule) or is_deepspeed(model):
        weights: Mapping[str, torch.Tensor] = accelerator.get_state_dict(model)
        return weights
    return plain.state_dict()


def export_run(run_dir: Path, out: Path) -> tuple[Path, str | None]:
    """Exports the newest committed checkpoint of a run to `out`; InputError where there is none or `out` is in use.

    The checkpoint's folder, and what is wrong with the exported tokenizer.
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: is not empty; name another folder")
    plan = codec.read(run_dir / "plan.json", Plan)
    checkpoint = find_checkpoint(run_dir / "checkpoints", on_skip=lambda line: print(line, file=sys.stderr))  # noqa: T201  # the answer of a program
    if checkpoint is None:
        raise InputError(f"{run_dir}: holds no checkpoint to export")
    if plan.chosen.method.freezes_base:
        return checkpoint.path, write_adapter_folder(read_weights(checkpoint), plan, out)
    model = build_model(plan)
    import_weights(model, checkpoint)
    return checkpoint.path, write_model_folder(model, out, tokenizer_path=plan.tokenizer_path)


def _base_name(plan: Plan) -> str | None:
    """How the job names the model that adapters belong to; a folder by its whole path; None where it was made up."""
    if plan.model_path is None or Path(plan.model_path).parent.name == _SNAPSHOTS:
        return plan.job.model.name
    return plan.model_path


def _write_folder(out: Path, write: Callable[[Path], None], *, tokenizer_path: str | None) -> str | None:
    """Writes and adds the tokenizer beside `out`, then gives the folder its name."""
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    incident = None
    try:
        staging.mkdir(parents=True)
        write(staging)
        if tokenizer_path is not None:
            incident = export_tokenizer(Path(tokenizer_path), staging)
        if out.exists():
            shutil.rmtree(out)
        staging.rename(out)
    except OSError as error:
        raise EnvironmentFaultError(f"{out}: the export cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return incident


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """All elements of a parameter on the CPU; collective where ranks hold parts of it."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().cpu()
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    return parameter.detach().cpu()


def main() -> None:
    """Parses the command line, exports, and ends with the error's exit code where that fails."""
    parser = argparse.ArgumentParser(prog="python -m trainer.runtime.export_run", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed to save; it would look for GPUs
    disable_progress_bar()
    try:
        path, incident = export_run(chosen.run_dir, chosen.out)
    except ShardwiseError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the answer of a program
        sys.exit(int(error.exit_code))
    if incident is not None:
        print(incident, file=sys.stderr)  # noqa: T201  # the answer of a program
    print(f"{chosen.out}: exported from {path.name}")  # noqa: T201  # the answer of a program


if __name__ == "__main__":
    main()
