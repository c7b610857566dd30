"""Two ranks compute the global batch of every step of two epochs, whatever their micro batch: seen at the model.

The data is prepared from files: chats packed to full rows, chats in rows of their own, and preference pairs.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chat_tokenizers import byte_level_folder
from conversations import assistant, user
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from prepare_request_factory import listed_request
from rank_factory import SEED, rank_plan

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import LoraJob, Objective
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

SEQ_LEN, SEQUENCES_PER_STEP, NUM_EPOCHS = 64, 6, 2
NUM_RANKS = 2
ONES, FOURS = (1, 3), (4, 1)  # micro batch, accumulation; fours have two dummies
ARRANGEMENTS = {"packed": FOURS, "grouped": ONES, "pairs": FOURS}


def chat(number: int) -> dict[str, Any]:
    return {"messages": [user(f"what is {number}"), assistant("four days " * (number % 5) + str(number))]}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"what is {number}", "chosen": f" it is {number}", "rejected": " no" * (1 + number % 4)}


KINDS: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "packed": (chat, {}, {}),
    "grouped": (chat, {"packing": False}, {}),
    "pairs": (pair, {}, {"method": Method.LORA, "train": {"lora": LoraJob(rank=4), "objective": Objective.DPO}}),
}


class Prepared(NamedTuple):
    profile: DataProfile
    rows: TokenRows


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Prepared]:
    tokenizer = byte_level_folder(tmp_path_factory.mktemp("words") / "tokenizer", bos=None, eos="<|endoftext|>")
    made = {}
    for name, (row, settings, _) in KINDS.items():
        folder = tmp_path_factory.mktemp("data")
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row(number)) for number in range(50)))
        request = listed_request(
            folder / "rows.jsonl", cache_root=folder / "cache", tokenizer=str(tokenizer), chat_template="chatml",
            vocab_size=1024, seq_len=SEQ_LEN, eval_share=0.1, **settings,
        )  # fmt: skip
        profile = prepare(request, lambda _: None)
        made[name] = Prepared(profile, TokenRows.open(Path(profile.cache_dir), "train"))
    return made


def plan_of(prepared: Prepared, name: str) -> Plan:
    micro_batch, accumulation = ARRANGEMENTS[name]
    plan = rank_plan(
        Path(prepared.profile.cache_dir), Sharding.DDP, num_ranks=NUM_RANKS,
        micro_batch=micro_batch, accumulation=accumulation, sequences_per_step=SEQUENCES_PER_STEP, seq_len=SEQ_LEN,
        num_steps=-(-NUM_EPOCHS * len(prepared.rows) // SEQUENCES_PER_STEP),
        model_config={**TINY_LLAMA, "vocab_size": 1024}, **KINDS[name][2],
    )  # fmt: skip
    config = {**plan.model_config, "max_position_embeddings": SEQ_LEN}
    return replace(plan, data=prepared.profile, model_config=config)


@pytest.fixture(scope="module")
def runs(data, run_dirs) -> Callable[[str], Path]:
    return run_dirs(lambda name, _: plan_of(data[name], name), tuple(KINDS), kind=":note")


@pytest.fixture
def steps(name, runs, notes_of) -> list[list[list[tuple[int, ...]]]]:
    """Of every step what each rank computed, as token ids; dummies left out."""
    _, accumulation = ARRANGEMENTS[name]
    ranks = []
    for rank in range(NUM_RANKS):
        forwards = notes_of(runs(name), rank)["rows"]
        assert len(forwards) % accumulation == 0
        ranks.append(list(_steps(forwards, accumulation)))
    return [list(step) for step in zip(*ranks, strict=True)]


def _steps(forwards: list[list[list[int]]], accumulation: int) -> Iterator[list[tuple[int, ...]]]:
    for first in range(0, len(forwards), accumulation):
        yield [tuple(row) for rows in forwards[first : first + accumulation] for row in rows if row]


def rows_of_step(rows: TokenRows, step: int) -> Counter[tuple[int, ...]]:
    examples = rows.order(seed=SEED, sequences_per_step=SEQUENCES_PER_STEP).rows_of_step(step)
    return Counter(_learned(rows, number) for example in examples for number in rows.rows_of(example))


def _learned(rows: TokenRows, number: int) -> tuple[int, ...]:
    end = int((rows.labels(number) != IGNORED_LABEL).nonzero()[0][-1]) + 1
    return tuple(rows.row(number)[:end].tolist())


@pytest.mark.parametrize("name", KINDS)
def test_what_the_ranks_compute_is_the_global_batch_of_every_step(name, data, steps):
    rows = data[name].rows
    assert len(steps) == -(-NUM_EPOCHS * len(rows) // SEQUENCES_PER_STEP)
    for step, of_ranks in enumerate(steps):
        assert Counter(row for computed in of_ranks for row in computed) == rows_of_step(rows, step)
    assert all(all(of_ranks) for of_ranks in steps), "no rank is idle"
