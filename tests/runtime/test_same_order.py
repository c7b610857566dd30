"""From files to forwards: the same bytes whatever renders them, and the same global batches whoever computes them."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chat_tokenizers import byte_level_folder
from conversations import assistant, user
from msgspec.structs import replace
from prepare_request_factory import listed_request

from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.data.chat import rendering
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.token_rows import IGNORED_LABEL, TokenRows
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.request import PrepareRequest

NUM_ROWS = 420
BATCH_UNITS = 64  # examples in a batch: several for each worker
SEQUENCES_PER_STEP, NUM_EPOCHS, SEED = 24, 2, 5
ARRANGEMENTS = [(1, 24), (1, 5), (2, 12), (4, 4)]  # ranks, micro batch
Key = tuple[bytes, ...]  # of the rows of an example


def words(number: int) -> str:
    return "four days in Paris " * (number % 7) + f"{number * 7919 % 10_007}"


def chat(number: int) -> dict[str, Any]:
    return {"messages": [user(f"what is {number}"), assistant(words(number))] * (1 + number % 2)}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"what is {number}", "chosen": f" {words(number)}", "rejected": f" no {number}"}


def completion(number: int) -> dict[str, Any]:
    return {"prompt": f"what is {number}", "completion": f" {words(number)}"}


class Kind(NamedTuple):
    row: Callable[[int], dict[str, Any]]
    settings: dict[str, Any] = {}
    weights: tuple[float, ...] = (1.0,)  # of sources that share the rows


KINDS = {
    "packed": Kind(chat),
    "grouped": Kind(chat, {"packing": False}),
    "pairs": Kind(pair),
    "weighted": Kind(completion, {"packing": False}, (1.0, 2.0, 0.25)),
}


class Prepared(NamedTuple):
    profile: DataProfile
    rows: TokenRows
    content: dict[str, bytes]  # of every file of rows in the cache


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PrepareRequest]:
    tokenizer = byte_level_folder(tmp_path_factory.mktemp("words") / "tokenizer", bos=None, eos="<|endoftext|>")
    made = {}
    for name, kind in KINDS.items():
        folder = tmp_path_factory.mktemp("data")
        sources = []
        for number, weight in enumerate(kind.weights):
            path = folder / f"{number}.jsonl"
            rows = (json.dumps(kind.row(row)) for row in range(number, NUM_ROWS, len(kind.weights)))
            path.write_text("\n".join(rows))
            sources.append((path, weight))
        made[name] = listed_request(
            *sources, cache_root=folder / "cache", tokenizer=str(tokenizer), chat_template="chatml", vocab_size=1024,
            seq_len=128, **kind.settings,
        )  # fmt: skip
    return made


def prepared(request: PrepareRequest, cache_root: Path) -> Prepared:
    profile = prepare(replace(request, cache_root=str(cache_root)), lambda _: None)
    folder = Path(profile.cache_dir)
    content = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".npy")}
    return Prepared(profile, TokenRows.open(folder, "train"), content)


@pytest.fixture(scope="module")
def by_one(requests, tmp_path_factory) -> dict[str, Prepared]:
    """Rendered by one process."""
    return {name: prepared(request, tmp_path_factory.mktemp("cache")) for name, request in requests.items()}


@pytest.mark.parametrize(("name", "num_workers"), [("packed", 2), ("grouped", 3), ("pairs", 3), ("weighted", 2)])
def test_any_number_of_workers_writes_the_same_bytes(name, num_workers, requests, by_one, tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "LEAST_EXAMPLES", 1)
    monkeypatch.setattr("shardwise.trainer.runtime.data.prepare.BATCH_UNITS", BATCH_UNITS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_workers)))  # a machine of so many cores
    found, expected = prepared(requests[name], tmp_path), by_one[name]
    assert found.profile.fingerprint == expected.profile.fingerprint
    assert {"tokens.bin", "train_rows.npy"} <= found.content.keys()
    assert found.content == expected.content


def key_of(ids: np.ndarray, labels: np.ndarray) -> bytes:
    """What makes a row another: its tokens up to the last label, and which of them have one; empty for a dummy."""
    targets = np.flatnonzero(labels != IGNORED_LABEL)
    end = targets[-1] + 1 if len(targets) else 0
    return ids[:end].tobytes() + labels[:end].tobytes()


def examples_of(rows: TokenRows) -> list[Key]:
    """Every example by what it holds."""
    return [
        tuple(key_of(rows.row(number), rows.labels(number)) for number in rows.rows_of(example))
        for example in range(len(rows))
    ]


def examples_in(batch: MicroBatch, rows: TokenRows) -> list[Key]:
    """Those of a micro batch, dummies left out; of pairs the chosen answers come first."""
    keys = [key_of(*row) for row in zip(batch.input_ids.numpy(), batch.labels.numpy(), strict=True)]
    num_sides = rows.layout.rows_per_example
    num_examples = len(keys) // num_sides
    sides = [keys[side * num_examples : (side + 1) * num_examples] for side in range(num_sides)]
    return [key for key in zip(*sides, strict=True) if all(key)]


def dealt(rows: TokenRows, *, num_ranks: int, micro_batch: int) -> list[list[Key]]:
    """The examples of every step that begins in the first epochs, as they are dealt to the ranks round by round."""
    num_steps = -(-NUM_EPOCHS * len(rows) // SEQUENCES_PER_STEP)
    steps = []
    for step in range(num_steps):
        of_ranks = []
        for rank in range(num_ranks):
            batches, num_terms = step_micro_batches(
                rows, step=step, seed=SEED, sequences_per_step=SEQUENCES_PER_STEP, rank=rank, num_ranks=num_ranks,
                micro_batch=micro_batch, accumulation=-(-SEQUENCES_PER_STEP // (num_ranks * micro_batch)),
            )  # fmt: skip
            of_ranks.append(batches)
        rounds = list(zip(*of_ranks, strict=True))
        assert num_terms == sum(batch.num_terms for batches in rounds for batch in batches)
        steps.append([key for batches in rounds for batch in batches for key in examples_in(batch, rows)])
    return steps


@pytest.mark.parametrize("name", KINDS)
def test_every_arrangement_of_ranks_computes_every_example_once_an_epoch_in_one_order(name, by_one):
    rows = by_one[name].rows
    examples = examples_of(rows)
    first, *others = (dealt(rows, num_ranks=ranks, micro_batch=micro_batch) for ranks, micro_batch in ARRANGEMENTS)
    assert all(len(step) == SEQUENCES_PER_STEP for step in first)
    for other in others:
        assert other == first
    table, seen = Counter(examples), Counter(key for step in first for key in step)
    more = len(first) * SEQUENCES_PER_STEP - NUM_EPOCHS * len(rows)  # of the epoch that the last step begins
    again = seen - Counter({key: NUM_EPOCHS * count for key, count in table.items()})
    assert seen.total() == NUM_EPOCHS * table.total() + more
    assert again.total() == more and not again - table
    in_one_epoch = Counter(key for step in first[: len(rows) // SEQUENCES_PER_STEP] for key in step)
    assert not in_one_epoch - table, "none comes twice"


def test_a_source_of_twice_the_weight_comes_twice_an_epoch(by_one):
    counts = Counter(Counter(examples_of(by_one["weighted"].rows)).values())
    shares = [len(range(number, NUM_ROWS, 3)) for number in range(3)]
    assert counts == {1: shares[0] + round(shares[2] / 4), 2: shares[1]}
