"""Preference pairs as a token cache: one prompt with two answers each, the prompt not learned."""

import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rank_factory import rank_plan
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenLayout
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.job.sections import DataFormat, EvalJob, Objective
from shardwise.trainer.spec.plan import Plan

PAIR_SEQ_LEN = 24
NUM_PAIRS, NUM_EVAL_PAIRS = 40, 10


def write_pairs(folder: Path) -> Path:
    """A cache of bytes of the standard library's own text, prompts of 2 to 8 tokens and answers of 3 to 16."""
    text = np.frombuffer(next(Path(sysconfig.get_path("stdlib")).glob("argparse.py")).read_bytes(), np.uint8)
    draw = np.random.default_rng(3)
    tokens: list[int] = []
    learned: list[int] = []
    rows: list[tuple[int, int]] = []
    for _ in range(NUM_PAIRS + NUM_EVAL_PAIRS):
        prompt = draw.choice(text, draw.integers(2, 9))
        start = draw.integers(0, len(text) - 20)
        for answer in (text[start : start + draw.integers(3, 17)], draw.choice(text, draw.integers(3, 17))):
            rows.append((len(tokens), len(prompt) + len(answer)))
            tokens += [*prompt.tolist(), *answer.tolist()]
            learned += [0] * len(prompt) + [1] * len(answer)
    folder.mkdir(parents=True)
    np.array(tokens, "<u2").tofile(folder / "tokens.bin")
    np.packbits(learned, bitorder="little").tofile(folder / "learned.bin")
    table = np.array(rows, np.int64)
    np.save(folder / "eval_rows.npy", table[: 2 * NUM_EVAL_PAIRS])
    np.save(folder / "train_rows.npy", table[2 * NUM_EVAL_PAIRS :])
    layout = TokenLayout(
        dtype="uint16", num_tokens=len(tokens), seq_len=PAIR_SEQ_LEN, pad_id=0, rows_per_example=2, is_masked=True,
    )  # fmt: skip
    codec.write(folder / "layout.json", layout)
    return folder


def pair_plan(cache_dir: Path, *args: Any, early_stop: int | None = None, **settings: Any) -> Plan:
    train = {"objective": Objective.DPO, **settings.pop("train", {})}
    plan = rank_plan(cache_dir, *args, **{"seq_len": PAIR_SEQ_LEN, "train": train, "lr": 1e-3, **settings})
    data: DataProfile = msgspec.structs.replace(
        plan.data, num_rows=NUM_PAIRS, num_eval_rows=NUM_EVAL_PAIRS, format=DataFormat.PREFERENCE, fingerprint="pairs"
    )
    job = msgspec.structs.replace(plan.job, eval=EvalJob(early_stop=early_stop))
    return msgspec.structs.replace(plan, data=data, job=job)


def plain_logps(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Of each row, the log-probability of what is learned of it, from transformers' own logits."""
    with torch.no_grad():
        shares: Tensor = model(input_ids=batch.input_ids).logits[:, :-1].log_softmax(-1)
    labels = batch.labels[:, 1:]
    picked = shares.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * (labels != IGNORED_LABEL)).double().sum(1)
