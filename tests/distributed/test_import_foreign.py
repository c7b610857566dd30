"""Checkpoints that engines of other libraries save on two ranks, imported: the logits are those that were trained."""

from pathlib import Path

import pytest
import torch
from export_factory import write_base
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.launch.inputs.model_files import find_config
from shardwise.trainer.runtime.importing.run import import_checkpoint
from shardwise.trainer.spec.messages.worker_requests import ImportKind, ImportRequest

WORKER = Path(__file__).parent / "foreign_worker.py"
IDS = torch.arange(24).reshape(1, 24) % 251  # as in the worker
TINY = {
    "model_type": "llama", "vocab_size": 253, "hidden_size": 33, "intermediate_size": 67, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "zero2": (ImportKind.DEEPSPEED, "ZeRO-2 on 2 ranks, global_step2"),
    "zero3": (ImportKind.DEEPSPEED, "ZeRO-3 on 2 ranks, global_step2"),
    "dcp": (ImportKind.DCP, "dcp"),
    "accelerate-fsdp2": (ImportKind.ACCELERATE, "pytorch_model_fsdp_0"),
    "zero1": (ImportKind.DEEPSPEED, "ZeRO-1 on 2 ranks, global_step2"),
    "accelerate-ddp": (ImportKind.ACCELERATE, "model.safetensors"),
    "accelerate-bin": (ImportKind.ACCELERATE, "pytorch_model.bin"),
}
FEW = tuple(KINDS)[:4]  # one of each library, and of each way to keep weights


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("kinds", "is_tied"),
    [(FEW, True), *(pytest.param(tuple(KINDS), each, marks=pytest.mark.long) for each in (False, True))],
    ids=["few", "all", "all-tied"],
)
def test_a_checkpoint_of_two_ranks_becomes_the_model_that_was_trained(kinds, is_tied, start_ranks, tmp_path):
    """The sizes of the model do not divide by two."""
    base = write_base(tmp_path / "base", {**TINY, "tie_word_embeddings": is_tied})
    start_ranks([str(WORKER), str(base), str(tmp_path), *kinds], 2)
    config = find_config(str(base)).config
    for name in kinds:
        out = tmp_path / f"out-{name}"
        done = import_checkpoint(ImportRequest(checkpoint=str(tmp_path / name), out=str(out), config=config))
        kind, origin = KINDS[name]
        assert (done.kind, done.dtype) == (kind, "F32") and done.source.endswith(origin)
        trained = load_file(tmp_path / f"{name}.logits")["logits"]
        torch.testing.assert_close(logits_of(out), trained, rtol=0, atol=1e-6)
        assert not torch.allclose(logits_of(base), trained, atol=1e-3), "two steps change the logits"
