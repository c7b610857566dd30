"""Embeddings with room for new tokens: the old rows to the bit, new ones near their mean, and nothing else changed."""

import json

import pytest
import torch
from optimizer_factory import tiny_llama
from transformers import AutoModelForCausalLM

from shardwise.trainer.runtime.tools.extend_vocabulary import extend_vocabulary
from shardwise.trainer.spec.errors import InputError

IDS = torch.arange(12).reshape(2, 6)


def write_llama(folder, *, is_tied, shard_size="5GB", dtype=torch.float32):
    model = tiny_llama(vocab_size=48, tie_word_embeddings=is_tied).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize(
    ("is_tied", "shard_size", "dtype"),
    [(True, "5GB", torch.float32), (True, "20KB", torch.bfloat16), (False, "20KB", torch.float32)],
)
def test_old_rows_and_the_logits_of_known_tokens_stay_to_the_bit(tmp_path, is_tied, shard_size, dtype):
    model = write_llama(tmp_path / "model", is_tied=is_tied, shard_size=shard_size, dtype=dtype)
    extend_vocabulary(tmp_path / "model", 64, tmp_path / "grown")
    extended = AutoModelForCausalLM.from_pretrained(tmp_path / "grown", dtype="auto").eval()
    assert (extended.config.vocab_size, extended.dtype) == (64, dtype)
    extended, model = extended.float(), model.float()  # a larger product in 16 bit may be rounded another way
    with torch.no_grad():
        torch.testing.assert_close(extended(IDS).logits[..., :48], model(IDS).logits, rtol=0, atol=1e-6)
    assert torch.equal(extended.get_input_embeddings().weight[:48], model.get_input_embeddings().weight)
    new, old = extended.get_input_embeddings().weight[48:], model.get_input_embeddings().weight
    assert (new.float() - old.float().mean(0)).abs().max() < 0.1 * old.float().std() + 1e-3
    assert len({tuple(row.tolist()) for row in new}) == 16


def test_a_folder_without_an_embedding_of_that_size_is_refused_and_leaves_nothing(tmp_path):
    write_llama(tmp_path / "model", is_tied=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 47}))
    with pytest.raises(InputError, match="47 rows"):
        extend_vocabulary(tmp_path / "model", 64, tmp_path / "grown")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_vocabulary_that_the_config_names_in_its_part_of_the_text_is_extended_there(tmp_path):
    write_llama(tmp_path / "model", is_tied=True)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"text_config": {"vocab_size": config.pop("vocab_size")}, **config}))
    extend_vocabulary(tmp_path / "model", 64, tmp_path / "grown")
    grown = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert grown["text_config"] == {"vocab_size": 64} and "vocab_size" not in grown
