"""A table of embeddings in host RAM gives the rows that it gives on the device; no move of the model reaches it."""

from typing import Any

import block_models as blocks
import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from torch import nn
from transformers import PreTrainedModel

from shardwise.trainer.runtime.loop.memory_profile import WEIGHTS, held_bytes
from shardwise.trainer.runtime.memory.host_embedding import (
    Lookups,
    OnHost,
    embedding_facts,
    ids_on_host,
    is_on_host,
    keep_embedding_on_host,
)
from shardwise.trainer.runtime.models.build import Installed
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.strategy import Checkpointing, Method

IDS = torch.tensor([[3, 1, 2], [0, 5, 5]])
TABLE_BYTES = 4 * TINY_LLAMA["vocab_size"] * TINY_LLAMA["hidden_size"]


def build(method: Method = Method.LORA, **engine: Any) -> tuple[Any, Installed]:
    model, installed = blocks.build_installed(method=method, train={"lora": LoraJob(rank=4)}, **engine)
    for name, parameter in model.named_parameters():  # new adapters multiply with zeros
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return model, installed


@pytest.mark.parametrize("settings", [{}, {"activation_offload": True, "checkpointing": Checkpointing.FULL}])
def test_gradients_are_those_of_a_table_on_the_device(settings):
    model, installed = build(embedding_on_host=True, **settings)
    found, expected = blocks.backward(model), blocks.backward(build(**settings)[0])
    assert found.loss == expected.loss and len(found.gradients) > 20
    blocks.assert_same_gradients(found, expected)
    assert installed.activation_facts(model)["embedding table"] == "64 KiB in host RAM; lookups: 1"


def test_no_move_and_no_cast_of_the_model_reaches_the_table_which_keeps_its_name_and_its_class():
    (ours, _), (theirs, _) = build(embedding_on_host=True), build()
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    embedding = ours.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding) and type(embedding).__name__ == "EmbeddingOnHost"
    assert is_on_host(ours) and not is_on_host(theirs) and embedding_facts(theirs) == {}
    optimizer = torch.optim.SGD(each for each in ours.parameters() if each.requires_grad)
    cpu, cuda = (held_bytes(ours, optimizer, torch.device(kind))[WEIGHTS] for kind in ("cpu", "cuda"))
    assert cpu - cuda == TABLE_BYTES, "a GPU does not hold it"
    ours.to(torch.bfloat16)
    ours.to("meta")
    kept = [name for name, each in ours.named_parameters() if each.device.type == "cpu"]
    assert kept == ["model.embed_tokens.weight"] and is_on_host(ours)
    assert embedding.weight.dtype is torch.float32
    embedding.weight = nn.Parameter(embedding.weight.to("meta"), requires_grad=False)
    assert not is_on_host(ours) and "no host RAM" in embedding_facts(ours)["embedding table"], (
        "one that left it is seen"
    )


def test_what_the_device_computes_with_is_refused():
    def refused(model: PreTrainedModel, why: str) -> None:
        with pytest.raises(InputError, match=rf"pin\.embedding_on_host: .*{why}.*pin\.embedding_on_host=false"):
            keep_embedding_on_host(model)

    refused(build(Method.FULL)[0], "trained")
    tied, _ = build(config={"tie_word_embeddings": True})
    refused(tied, "head")
    with pytest.raises(InputError, match="head"):
        build(config={"tie_word_embeddings": True}, embedding_on_host=True)
    plain, _ = build()
    plain.set_input_embeddings(nn.Linear(2, 2))
    refused(plain, "no plain table")


class _Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(ids)


@pytest.mark.parametrize("kind", [nn.Embedding, _Scaled])
def test_a_class_of_its_own_computes_its_rows_itself(kind):
    model, _ = build()
    own: Any = kind(256, 64, padding_idx=5).requires_grad_(requires_grad=False)
    expected = own(IDS)
    model.set_input_embeddings(own)
    keep_embedding_on_host(model)
    assert isinstance(own, OnHost) and torch.equal(own(IDS), expected)
    assert own.lookups._is_plain is (kind is nn.Embedding)


@pytest.mark.parametrize(
    ("ids_of", "num_waits"),
    [
        (lambda sent: sent, 0),
        (lambda sent: sent.view(-1), 0),
        (lambda sent: sent + 1, 1),
        (lambda sent: sent[:1], 1),
        (lambda sent: sent[:, :2], 1),
        (lambda sent: sent.t(), 1),
        (lambda sent: sent.clone(), 1),
        (lambda sent: sent.fill_(4), 1),
    ],
    ids=["as sent", "a view", "others", "a row", "columns", "transposed", "a copy", "overwritten"],
)
def test_the_ids_of_the_loader_stand_for_what_was_sent_and_for_nothing_else(ids_of, num_waits):
    lookups, sent = Lookups(nn.Linear(1, 1), is_plain=True), IDS.clone()
    lookups.send(IDS, sent)
    ids = ids_of(sent)
    found = lookups.ids_on_host(ids)
    assert torch.equal(found, ids) and lookups.num_waits == num_waits
    assert (found.untyped_storage().data_ptr() == IDS.untyped_storage().data_ptr()) is (num_waits == 0)


def test_ids_are_forgotten_when_the_model_has_run():
    model, _ = build(embedding_on_host=True)
    lookups = model.get_input_embeddings().lookups
    with ids_on_host(model, IDS, IDS.clone()):
        assert lookups._sent is not None
    assert lookups._sent is None
    with ids_on_host(build()[0], IDS, IDS):
        pass
