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
}
MORE_KINDS = {
    "zero1": (ImportKind.DEEPSPEED, "ZeRO-1 on 2 ranks, global_step2"),
    "accelerate-ddp": (ImportKind.ACCELERATE, "model.safetensors"),
    "accelerate-bin": (ImportKind.ACCELERATE, "pytorch_model.bin"),
}


def save_all(start_ranks, root: Path, kinds, *, is_tied: bool) -> Path:
    base = write_base(root / "base", {**TINY, "tie_word_embeddings": is_tied})
    start_ranks([str(WORKER), str(base), str(root), *kinds], 2)
    return root


@pytest.fixture(scope="module")
def checkpoints(start_ranks, tmp_path_factory) -> Path:
    """A checkpoint of each kind, of a tied model whose sizes two ranks do not divide."""
    return save_all(start_ranks, tmp_path_factory.mktemp("foreign"), KINDS, is_tied=True)


def check(root: Path, name: str, expected: tuple[ImportKind, str], out: Path) -> None:
    config = find_config(str(root / "base")).config
    done = import_checkpoint(ImportRequest(checkpoint=str(root / name), out=str(out), config=config))
    kind, origin = expected
    assert (done.kind, done.dtype) == (kind, "F32") and done.source.endswith(origin)
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        found = loaded(input_ids=IDS).logits
    trained = load_file(root / f"{name}.logits")["logits"]
    torch.testing.assert_close(found, trained, rtol=0, atol=1e-6)
    before = AutoModelForCausalLM.from_pretrained(root / "base").eval()
    with torch.no_grad():
        assert not torch.allclose(before(input_ids=IDS).logits, trained, atol=1e-3), "two steps change the logits"


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_two_ranks_becomes_the_model_that_was_trained(name, checkpoints, tmp_path):
    check(checkpoints, name, KINDS[name], tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_kind_with_and_without_tied_weights(is_tied, start_ranks, tmp_path):
    root = save_all(start_ranks, tmp_path, KINDS | MORE_KINDS, is_tied=is_tied)
    for name, expected in (KINDS | MORE_KINDS).items():
        check(root, name, expected, tmp_path / f"out-{name}")
