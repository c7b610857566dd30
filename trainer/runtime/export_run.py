"""Writes a Hugging Face model folder: weights as safetensors, config, generation settings, tokenizer.

    python -m trainer.runtime.export_run RUN_DIR OUT

writes it from the newest committed checkpoint of a run, whatever engine saved it, on the CPU and in one process.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from trainer.runtime.checkpoint import find_checkpoint, import_weights
from trainer.runtime.export_tokenizer import export_tokenizer
from trainer.runtime.model import build_model, is_deepspeed, plain_model
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from trainer.spec.plan import Plan


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
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    incident = None
    try:
        use_cache, model.config.use_cache = model.config.use_cache, True
        model.save_pretrained(staging, state_dict=None if state_dict is None else dict(state_dict))
        model.config.use_cache = use_cache
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


def gathered_weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The whole model's weights, on rank 0 at least; collective under a sharding engine."""
    if isinstance(model, FSDPModule) or is_deepspeed(model):
        weights: Mapping[str, torch.Tensor] = accelerator.get_state_dict(model)
        return weights
    return plain_model(model).state_dict()


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
    model = build_model(plan)
    import_weights(model, checkpoint)
    return checkpoint.path, write_model_folder(model, out, tokenizer_path=plan.tokenizer_path)


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
