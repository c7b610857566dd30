"""Packed rows from a file to the gradients of a step: what one document says changes nothing of another, to the bit.

On every attention path: PyTorch's, the scores written out, and flash-attn's, whose functions a stand-in computes from
the bounds that it is handed.
"""

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architecture_factory import TINY
from flash_stand_in import load_stand_in
from prepare_request_factory import listed_request
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.attention.packed import FLASH, document_bounds
from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.loop.step import forward
from shardwise.trainer.runtime.loss import LossOutput, install_loss_head
from shardwise.trainer.spec.strategy import LossHead

SEQ_LEN, NUM_ROWS = 48, 4  # longer than the windows of the models, which are 16
CPU = torch.device("cpu")
MODELS = ("llama", "qwen2", "mistral", "gemma2", "gemma3_text")  # the last three with windows
CASES = [
    (name, path) for name in MODELS for path in ("sdpa", "eager", FLASH) if (name, path) != ("gemma2", "sdpa")
]  # Gemma 2 caps its scores, which PyTorch's attention has no place for


class Packed(NamedTuple):
    """One micro batch as a run gets it, and where the documents are in it: row, first token, end."""

    batch: MicroBatch
    documents: list[tuple[int, slice]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("data")
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 31, (40,), generator=draw).tolist()
    rows = [{"tokens": torch.randint(3, 200, (length,), generator=draw).tolist()} for length in lengths]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = listed_request(
        folder / "rows.jsonl", cache_root=folder / "cache", packing=True, seq_len=SEQ_LEN, vocab_size=200
    )
    profile = prepare(request, lambda _: None)
    train = TokenRows.open(Path(profile.cache_dir), "train")
    [batch, *_], _ = step_micro_batches(
        train, step=0, seed=0, sequences_per_step=len(train), rank=0, num_ranks=1, micro_batch=NUM_ROWS,
        accumulation=-(-len(train) // NUM_ROWS),
    )  # fmt: skip
    assert batch.position_ids is not None
    documents = []
    for row, number in enumerate(train.order(seed=0, sequences_per_step=len(train)).rows_of_step(0)[:NUM_ROWS]):
        starts = [0, *train.document_starts(number).tolist(), train.length(number)]
        assert len(starts) > 2, "several documents"
        documents += [(row, slice(begin, end)) for begin, end in itertools.pairwise(starts)]
    return Packed(batch, documents)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch):
    def build(name: str, path: str) -> PreTrainedModel:
        if path == FLASH:
            load_stand_in(FLASH, monkeypatch)
        torch.manual_seed(0)
        config = {key: value for key, value in TINY[name].items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config), attn_implementation=path)
        install_loss_head(model, LossHead.CHUNKED, chunk_tokens=64)
        return model.eval()

    return build


def changed_documents(packed: Packed) -> list[tuple[int, slice]]:
    """One document of each row: the first, or one between others."""
    found = [[each for each in packed.documents if each[0] == row] for row in range(NUM_ROWS)]
    return [documents[row % 2 if len(documents) > 2 else 0] for row, documents in enumerate(found)]


def with_others_changed(packed: Packed) -> MicroBatch:
    """The same micro batch, where one document of each row says something else."""
    ids = packed.batch.input_ids.clone()
    for row, place in changed_documents(packed):
        ids[row, place] = 3 + (ids[row, place] + 71) % 197
    return packed.batch._replace(input_ids=ids)


def only_unchanged(packed: Packed, batch: MicroBatch) -> MicroBatch:
    labels = packed.batch.labels.clone()
    for row, place in changed_documents(packed):
        labels[row, place] = IGNORED_LABEL
    return batch._replace(labels=labels)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_the_loss_and_gradients_of_a_document_do_not_depend_on_the_others_in_its_row(name, path, build, packed):
    assert packed.batch.document_bounds == document_bounds(packed.batch.position_ids)
    found = []
    for batch in (packed.batch, with_others_changed(packed)):
        model = build(name, path).train()
        loss = forward(model, only_unchanged(packed, batch), CPU)
        loss.backward()
        found.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    (loss, gradients), (other_loss, other_gradients) = found
    assert torch.equal(loss, other_loss)
    for weight, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[weight], gradient, rtol=0, atol=1e-6, msg=weight)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.mark.parametrize(("name", "path"), CASES)
def test_a_packed_row_loses_what_its_documents_lose_alone(name, path, build, packed):
    model = build(name, path)
    with torch.no_grad():
        together = forward(model, packed.batch, CPU, output=LossOutput.ROWS)
        alone = torch.zeros(NUM_ROWS, dtype=torch.float64)
        for row, place in packed.documents:
            ids, labels = (each[row : row + 1, place] for each in (packed.batch.input_ids, packed.batch.labels))
            positions = None if path != FLASH else torch.arange(ids.shape[1])[None]
            alone_in_row = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_bounds": ()}
            document = packed.batch._replace(**alone_in_row)
            alone[row] += forward(model, document, CPU, output=LossOutput.ROWS)[0]
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("path", ["sdpa", "eager"])
def test_a_mask_of_ones_lets_documents_see_each_other(path, build, packed):
    """What transformers does with positions beside a mask: the reason why no mask is ever handed on here."""
    model = build("llama", path)
    found = []
    with torch.no_grad():
        for batch in (packed.batch, with_others_changed(packed)):
            mask = torch.ones_like(batch.input_ids)
            found.append(model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask).logits)
    last = [place for row, place in packed.documents if row == 0][-1]
    assert (found[0][0, last] - found[1][0, last]).abs().max() > 1e-3
