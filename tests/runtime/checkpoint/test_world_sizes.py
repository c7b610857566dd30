"""One process and two gloo ranks read each other's checkpoints bit for bit, and fail together or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from shardwise.trainer.runtime.checkpoint import find_checkpoint


class Outcome(NamedTuple):
    root: Path
    answers: list[dict[str, Any]]
    single_digest: str  # of step 3, saved by one process
    single_losses: list[float]  # of steps 3 to 5 in one process


@pytest.fixture(scope="module")
def outcome(tiny: ModuleType, run_tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two ranks resume from one process, train, save, and are put through every failure."""
    root = tmp_path_factory.mktemp("ranks")
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=3)
    tiny.save(root / "single", model, optimizer, 3)
    (root / "single" / "step-00000009").mkdir()
    digest = tiny.digest(model, optimizer)
    done = run_tiny("ranks", root)
    assert done.returncode == 0, done.stderr
    answers = [json.loads((root / f"answers-{rank}.json").read_text()) for rank in range(2)]
    return Outcome(root, answers, digest, tiny.train(model, optimizer, start=3, stop=6))


def test_one_to_two_arrives_bitwise(outcome: Outcome) -> None:
    assert [answer["imported"] for answer in outcome.answers] == [outcome.single_digest] * 2


def test_two_ranks_go_on_as_one_would(outcome: Outcome) -> None:
    together = [sum(losses) / 2 for losses in zip(*(answer["losses"] for answer in outcome.answers), strict=True)]
    assert together == pytest.approx(outcome.single_losses, abs=1e-5)


def test_two_to_one_arrives_bitwise(tiny: ModuleType, outcome: Outcome) -> None:
    checkpoint = find_checkpoint(outcome.root / "ddp", on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 6
    assert [answer["trained"] for answer in outcome.answers] == [tiny.digest(*tiny.resume(checkpoint))] * 2


def test_each_rank_writes_its_half(outcome: Outcome) -> None:
    sizes = [path.stat().st_size for path in sorted((outcome.root / "ddp" / "step-00000006").glob("shard-*"))]
    assert len(sizes) == 2
    assert max(sizes) / sum(sizes) < 0.55


def test_a_tensor_may_be_cut_between_ranks(outcome: Outcome) -> None:
    manifest = json.loads((outcome.root / "ddp" / "step-00000006" / "MANIFEST.json").read_text())
    tensors = [
        tensor for entry in manifest["parameters"].values() for tensor in [entry["weight"], *entry["state"].values()]
    ]
    files = [[chunk["file"] for chunk in tensor["chunks"]] for tensor in tensors]
    assert ["shard-00000.safetensors", "shard-00001.safetensors"] in files


def test_only_rank_0_reports_what_was_passed_over(outcome: Outcome) -> None:
    assert [len(answer["skipped"]) for answer in outcome.answers] == [1, 0]
    assert "step-00000009 is damaged and was passed over" in outcome.answers[0]["skipped"][0]


@pytest.mark.parametrize("case", ["saved", "saved_again", "full", "non_finite", "unknown_optimizer", "after"])
def test_every_rank_gets_the_same_answer(outcome: Outcome, case: str) -> None:
    first, second = (answer[case] for answer in outcome.answers)
    assert first == second


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("full", "EnvironmentFaultError: rank 1: the checkpoint of step 7 was not saved: File too large"),
        ("non_finite", "NonFiniteStateError: rank 1: "),
        ("unknown_optimizer", "InputError: there are no checkpoints of RMSprop; there are those of "),
    ],
)
def test_a_failure_on_one_rank_is_said_on_all(outcome: Outcome, case: str, sentence: str) -> None:
    assert outcome.answers[0][case].startswith(sentence)


def test_failed_saves_left_the_older_checkpoint_and_nothing_else(outcome: Outcome) -> None:
    assert outcome.answers[0]["left"] == [".lock", "step-00000006"]


def test_saving_goes_on_after_failures(outcome: Outcome) -> None:
    assert outcome.answers[0]["after"] == str(outcome.root / "ddp" / "step-00000010")
    assert outcome.answers[0]["saved_again"] == outcome.answers[0]["saved"]


def test_ranks_vote_and_talk(outcome: Outcome) -> None:
    for answer in outcome.answers:
        assert answer["agree"] == [True, False]
        assert answer["heard"] == ["from 0", ""]
        assert answer["exchanged"] == ["", "x"]
    assert [answer["gathered"] for answer in outcome.answers] == [["yy", "y"], []]


def test_a_rank_killed_in_its_file_ends_the_save_for_all(
    tiny: ModuleType, run_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_tiny("lost-rank", tmp_path)
    assert done.returncode == 2  # both failed: one was killed, the other noticed
    checkpoint = find_checkpoint(tmp_path / "ddp", on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 2
    tiny.resume(checkpoint)
