"""One process and two gloo ranks read each other's checkpoints bit for bit, and fail together or not at all."""

import json
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def outcome(tiny, run_tiny, tmp_path_factory):
    """Two ranks resume from one process, train, save, and are put through every failure."""
    root = tmp_path_factory.mktemp("ranks")
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=3)
    tiny.save(root / "single", model, optimizer, 3)
    (root / "single" / "step-00000009").mkdir()
    digest = tiny.digest(model, optimizer)
    run_tiny("ranks", root)
    first, second = (json.loads((root / f"results-{rank}.json").read_text()) for rank in range(2))
    losses = tiny.train(model, optimizer, start=3, stop=6)  # in one process
    return SimpleNamespace(root=root, first=first, second=second, single_digest=digest, single_losses=losses)


def test_one_to_two_arrives_bitwise_and_two_continue_as_one_would(outcome):
    assert outcome.first["imported"] == outcome.second["imported"] == outcome.single_digest
    both = [sum(losses) / 2 for losses in zip(outcome.first["losses"], outcome.second["losses"], strict=True)]
    assert both == pytest.approx(outcome.single_losses, abs=1e-5)
    assert "step-00000009 is damaged and was passed over" in outcome.first["skipped"][0]
    assert (len(outcome.first["skipped"]), outcome.second["skipped"]) == (1, []), "rank 0 alone reports it"


def test_two_to_one_arrives_bitwise(tiny, newest, outcome):
    checkpoint = newest(outcome.root / "ddp")
    assert checkpoint.step == 6
    assert outcome.first["trained"] == outcome.second["trained"] == tiny.digest(*tiny.resume(checkpoint))


def test_each_rank_writes_its_half_and_a_tensor_may_be_cut_between_them(outcome):
    folder = outcome.root / "ddp" / "step-00000006"
    sizes = [path.stat().st_size for path in folder.glob("shard-*")]
    assert len(sizes) == 2 and max(sizes) / sum(sizes) < 0.55
    entries = json.loads((folder / "MANIFEST.json").read_text())["parameters"].values()
    tensors = [tensor for entry in entries for tensor in (entry["weight"], *entry["state"].values())]
    assert any(len({chunk["file"] for chunk in tensor["chunks"]}) == 2 for tensor in tensors)


@pytest.mark.parametrize(
    ("case", "start"),
    [
        ("full", "EnvironmentFaultError: rank 1: the checkpoint of step 7 was not saved: File too large"),
        ("non_finite", "NonFiniteStateError: rank 1: "),
        ("unknown_optimizer", "InputError: there are no checkpoints of RMSprop; there are those of "),
        ("saved", "/"),
        ("saved_again", "/"),
        ("after", "/"),
    ],
)
def test_every_rank_gets_the_same_result(outcome, case, start):
    assert outcome.first[case] == outcome.second[case] and outcome.first[case].startswith(start)


def test_what_ranks_agree_on_and_exchange_reaches_the_others(outcome):
    for result in (outcome.first, outcome.second):
        assert (result["agree"], result["heard"]) == ([True, False], ["from 0", ""])
        assert result["exchanged"] == ["", "x"]
    assert (outcome.first["gathered"], outcome.second["gathered"]) == (["yy", "y"], [])


def test_failed_saves_leave_the_older_checkpoint_and_nothing_else_and_saving_continues(outcome):
    assert outcome.first["left"] == [".lock", "step-00000006"]
    assert outcome.first["saved_again"] == outcome.first["saved"]
    assert outcome.first["after"] == str(outcome.root / "ddp" / "step-00000010")


def test_a_rank_killed_in_its_file_ends_the_save_for_all(tiny, run_tiny, newest, tmp_path):
    run_tiny("lost-rank", tmp_path, returns=2)  # both failed: one was killed, the other noticed
    checkpoint = newest(tmp_path / "ddp")
    assert checkpoint.step == 2
    tiny.resume(checkpoint)


def test_two_ranks_that_save_in_the_background_commit_together_and_fail_together(tiny, run_tiny, newest, tmp_path):
    run_tiny("background-ranks", tmp_path)
    first, second = (json.loads((tmp_path / f"results-{rank}.json").read_text()) for rank in (0, 1))
    assert len(first["polls"]) > 1, "the second rank slept in its file"
    assert first == second | {"failed": first["failed"]}
    assert first["over"] == [True, True]
    assert "rank 1: the checkpoint of step 50 was not saved: shard: No space left on device" in first["failed"]
    assert first["left"] == [".lock", "step-00000001"]
    (tmp_path / "ddp" / "step-00000051").rename(tmp_path / "step-00000051")
    assert tiny.digest(*tiny.resume(newest(tmp_path / "ddp"))) == first["digest of 1"]
