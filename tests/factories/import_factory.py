"""Checkpoints to import, and what became of them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from shardwise.trainer.runtime.export.check import logits_of, prompt_ids
from shardwise.trainer.runtime.importing.run import import_checkpoint
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.worker_requests import Imported, ImportRequest

IDS = prompt_ids(256)
STATES = "mp_rank_00_model_states.pt"
MASTERS = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FIRST = "model.embed_tokens.weight"


def imported(checkpoint: Path, out: Path, **request: Any) -> Imported:
    return import_checkpoint(ImportRequest(checkpoint=str(checkpoint), out=str(out), **request))


def assert_refused(checkpoint: Path, out: Path, fact: str, **request: Any) -> None:
    """The import ends with an InputError that matches `fact`, and leaves nothing behind."""
    with pytest.raises(InputError, match=fact):
        imported(checkpoint, out, **request)
    assert not out.exists()


def logits(folder: Path) -> torch.Tensor:
    return logits_of(AutoModelForCausalLM.from_pretrained(folder).eval(), IDS)


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def saved_by_torch(base: Path, folder: Path, change: Callable[[dict[str, Any]], object] = lambda each: each) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    torch.save(change(load_file(base / "model.safetensors")), folder / "pytorch_model.bin")
    return folder


def zero(base: Path, folder: Path, *, ranks: int = 2) -> Path:
    states = folder / "global_step2"
    states.mkdir(parents=True)
    weights = load_file(base / "model.safetensors")
    flat = torch.cat([each.reshape(-1) for each in weights.values()])
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % ranks)).chunk(ranks)
    shapes = [{name: each.shape for name, each in weights.items()}]
    rounded = {name: each.bfloat16() for name, each in weights.items()}
    torch.save({"module": rounded, "buffer_names": [], "param_shapes": shapes, "shared_params": {}}, states / STATES)
    for rank, part in enumerate(padded):
        state = {"zero_stage": 2, "partition_count": [ranks], "single_partition_of_fp32_groups": [part.clone()]}
        torch.save({"optimizer_state_dict": state}, states / MASTERS.format(rank))
    (folder / "latest").write_text("global_step2\n")
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def distributed(base: Path, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save({"model": load_file(base / "model.safetensors")}, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder
