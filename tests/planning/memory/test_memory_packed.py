"""Packed rows: what their positions, cosines and masks take, by allocator events of a steady step on this CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from estimate_factory import LLAMA_8B, config, configuration, cpu, gpu, shape_of
from msgspec.structs import replace
from rank_factory import rank_plan

from shardwise.trainer.planning.configuration import PolicyChoices
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.schedule import document_tokens
from shardwise.trainer.planning.speed.step import estimate_speed
from shardwise.trainer.runtime.loop.memory_profile import MemoryProfile
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.spec.data.profile import DataProfile, LengthHistogram
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Precision

VOCAB, HIDDEN, FFN, LAYERS, HEADS = 1024, 128, 352, 2, 4
SEQ_LEN, MICRO_BATCH, DOCUMENT = 256, 2, 64
HEAD_DIM, TOKENS = HIDDEN // HEADS, MICRO_BATCH * SEQ_LEN
LLAMA = config(VOCAB, HIDDEN, FFN, LAYERS, HEADS, 2, is_tied=True, max_position_embeddings=512)
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
NEOX = {
    "model_type": "gpt_neox", **SIZES, "intermediate_size": FFN, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip
FALCON = {
    "model_type": "falcon", **SIZES, "ffn_hidden_size": FFN, "num_kv_heads": 2, "new_decoder_architecture": True,
    "parallel_attn": True, "bias": False, "alibi": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MPT = {
    "model_type": "mpt", "vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS,
    "max_seq_len": 512, "no_bias": True, "attn_config": {"attn_type": "multihead_attention", "alibi": True},
}  # fmt: skip
POSITIONS = 8 * TOKENS
COSINES = 2 * 4 * (TOKENS - SEQ_LEN) * HEAD_DIM  # of each row, rather than of one
MASK = TOKENS * SEQ_LEN
ROWS = {"precision": Precision.FP32, "loss": LossHead.EAGER, "micro_batch": MICRO_BATCH, "seq_len": SEQ_LEN}
CASES = {
    "llama": (LLAMA, Attention.SDPA, Checkpointing.NONE, POSITIONS + COSINES),
    "llama recomputed": (LLAMA, Attention.SDPA, Checkpointing.FULL, POSITIONS + COSINES),
    "falcon recomputed": (FALCON, Attention.SDPA, Checkpointing.FULL, POSITIONS + COSINES + MASK),
    "mpt": (MPT, Attention.EAGER, Checkpointing.NONE, POSITIONS),
    "gpt_neox": (NEOX, Attention.SDPA, Checkpointing.NONE, POSITIONS + COSINES // 4 - 4 * LAYERS * TOKENS * HIDDEN),
}


def measured(fields: dict[str, Any], document: int | None, chosen: dict[str, Any]) -> int:
    """The peak of the second of two steps; every row is of documents of one length."""
    model = build_model(rank_plan(Path("nowhere"), model_config=fields, **chosen))
    optimizer = build_optimizer(Optimizer.SGD, model, lr=1e-4, weight_decay=0.0)

    def step() -> None:
        ids = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ_LEN))
        positions = {}
        if document is not None:
            positions = {"position_ids": torch.arange(SEQ_LEN).remainder(document).repeat(MICRO_BATCH, 1)}
        loss = model(input_ids=ids, labels=ids.clone(), **positions)
        loss.backward()
        del ids, loss, positions
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    profile = MemoryProfile(model, optimizer, torch.device("cpu"))
    with profile.step():
        step()
    return profile.figures().peak_allocated_bytes


def predicted(fields: dict[str, Any], document: float | None, chosen: dict[str, Any]) -> int:
    rows = configuration(optimizer=Optimizer.SGD, policy=PolicyChoices(document_tokens=document), **chosen)
    return estimate_memory(shape_of(fields), rows, cpu()).peak_allocated_bytes


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_hold_what_was_predicted(name):
    """The rise to a thousandth of the peak: less than half of any of the terms beside the positions."""
    fields, attention, checkpointing, rise = CASES[name]
    chosen = {**ROWS, "attention": attention, "checkpointing": checkpointing}
    packed = measured(fields, DOCUMENT, chosen)
    assert predicted(fields, DOCUMENT, chosen) == pytest.approx(packed, rel=0.02)
    assert predicted(fields, DOCUMENT, chosen) - predicted(fields, None, chosen) == rise
    if checkpointing is Checkpointing.NONE:
        plain = measured(fields, None, chosen)
        assert rise == pytest.approx(packed - plain, abs=0.001 * plain)


def profile_of(counts: dict[int, int], *, is_packed: bool = True) -> DataProfile:
    documents = LengthHistogram(edges=tuple(counts), counts=tuple(counts.values()))
    return DataProfile(
        source="prepared", num_rows=10, num_tokens=1000, longest_row=100, is_packed=is_packed, fingerprint="",
        vocab_size=VOCAB, documents=documents,
    )  # fmt: skip


def test_the_document_of_an_average_token_is_longer_than_the_average_document():
    assert document_tokens(None, seq_len=1024) is None
    assert document_tokens(profile_of({64: 10}, is_packed=False), seq_len=1024) is None
    assert document_tokens(replace(profile_of({64: 10}), documents=None), seq_len=1024) == 1024
    length = document_tokens(profile_of({64: 100, 96: 0, 128: 0, 192: 0, 256: 0, 384: 0, 512: 10}), seq_len=1024)
    assert length == pytest.approx((100 * 53.5**2 + 10 * 448.5**2) / (100 * 53.5 + 10 * 448.5))
    whole, rest = 3, 6144.5 - 3 * 2048
    cut = document_tokens(profile_of({4096: 0, 8192: 10}), seq_len=2048)
    assert cut == pytest.approx((whole * 2048**2 + rest**2) / 6144.5)


def test_attention_of_packed_rows_takes_the_time_of_their_documents():
    def seconds(**policy: Any) -> float:
        rows = configuration(seq_len=16384, attention=Attention.FLASH, policy=PolicyChoices(**policy))
        return estimate_speed(LLAMA_8B, rows, gpu()).parts["compute_s"]

    whole, packed = seconds(), seconds(document_tokens=1024.0)
    assert seconds(document_tokens=16384.0) == whole
    attention = (whole - packed) / (1 - 1024 / 16384)
    assert 0.1 * whole < attention < 0.5 * whole
    assert seconds(document_tokens=8192.0) == pytest.approx(whole - attention / 2)
