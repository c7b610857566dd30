"""kill -9 at any point of a save, of one process or of ranks: the newest committed checkpoint is whole, and the run
ends as if never killed; the same while a checkpoint is written beside the training."""

import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from outcome_file import FAULTS

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, find_checkpoint

# Killed in the save of step 4; step 2 was committed before. `copied` is in the background alone, and before
# `damaged-moved` step 4 was there, damaged.
BEFORE_COMMIT = ("staged", "copied", "mid-file", "shard-written", "manifest-written", "damaged-moved")
NEWEST_AFTER_DEATH_AT = dict.fromkeys(BEFORE_COMMIT, 2) | dict.fromkeys(("committed", "synced", "pruning", "pruned"), 4)
NAMES = [f"{how}-{point}" for point in NEWEST_AFTER_DEATH_AT for how in ("waiting", "background")]
NAMES.remove("waiting-copied")
RANDOM = [f"{how}-random-{number}" for how in ("waiting", "background") for number in range(12)]
LAST, MOST = 8, 204  # steps of runs that go on, and of one that was to be killed and its four more


@pytest.fixture(scope="module")
def crashed(run_tiny, tmp_path_factory):
    """The root of a folder per name, as a process that was killed there left it."""
    root = tmp_path_factory.mktemp("crashed")
    run_tiny("crash", root, *NAMES, *RANDOM)
    return root


@pytest.fixture(scope="module")
def digests(tiny):
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    found = {0: tiny.digest(model, optimizer)}
    for step in range(1, MOST + 1):
        tiny.train(model, optimizer, start=step - 1, stop=step)
        found[step] = tiny.digest(model, optimizer)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_newest_committed_survives_a_kill_there(tiny, crashed, digests, newest, name):
    root, (how, _, point) = crashed / name, name.partition("-")
    checkpoint = newest(root)
    assert checkpoint.step == NEWEST_AFTER_DEATH_AT[point]
    assert tiny.digest(*tiny.resume(checkpoint)) == digests[checkpoint.step]
    is_clean = point in ("committed", "synced", "pruned")
    assert any(found.startswith(".tmp-") for found in tiny.names(root)) is not is_clean
    assert tiny.run_until(root, LAST, keep=1, in_background=how == "background") == digests[LAST]
    assert tiny.names(root) == [".lock", f"step-{LAST:08d}"]


@pytest.mark.parametrize("name", RANDOM)
def test_a_kill_at_any_moment_costs_only_uncommitted_steps(tiny, crashed, digests, name):
    """The run goes on to what it would have come to; every second one had committed something."""
    checkpoint = find_checkpoint(crashed / name, on_skip=pytest.fail)
    assert checkpoint is not None or not int(name.rpartition("-")[2]) % 2
    last = 4 + (0 if checkpoint is None else checkpoint.step)
    assert tiny.run_until(crashed / name, last, in_background=name.startswith("b")) == digests[last]


def test_an_error_in_a_save_leaves_nothing_behind(tiny, tmp_path):
    def fail(point):
        if point == "manifest-written":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run_until(tmp_path, 4, on_point_of_4=fail)
    assert tiny.names(tmp_path) == [".lock", "step-00000002"]
    assert tiny.run_until(tmp_path, 4)


def test_what_is_saved_in_the_background_is_of_the_step_at_which_the_save_began(tiny, trained, newest, tmp_path):
    then = tiny.digest(*trained)
    saving = tiny.begin(tmp_path, *trained, 1)
    tiny.train(*trained, start=1, stop=4)
    assert tiny.digest(*trained) != then
    while not saving.poll():
        assert find_checkpoint(tmp_path, on_skip=pytest.fail) is None, "it is committed by a poll alone"
    assert saving.poll() and saving.is_over
    saving.finish()
    assert newest(tmp_path).step == 1 and tiny.digest(*tiny.resume(newest(tmp_path))) == then
    before = (tmp_path / "step-00000001" / "MANIFEST.json").stat().st_mtime_ns
    tiny.train(*trained, start=4, stop=5)
    assert tiny.begin(tmp_path, *trained, 1).poll(), "a step that is there is not written again"
    assert (tmp_path / "step-00000001" / "MANIFEST.json").stat().st_mtime_ns == before


def test_a_state_without_numbers_that_the_thread_finds_is_raised_later_and_leaves_nothing(tiny, trained, tmp_path):
    tiny.save(tmp_path, *trained, 1)
    next(iter(trained[0].parameters())).data.view(-1)[0] = float("nan")
    with pytest.raises(NonFiniteStateError):
        tiny.begin(tmp_path, *trained, 3).finish()
    assert tiny.names(tmp_path) == [".lock", "step-00000001"]


def check_kills(run_tiny, root, seeds):
    """Nothing damaged (the program looks), nothing committed lost, the state that of the run that was never killed."""
    run_tiny("reference", root / "reference")
    digests = json.loads((root / "reference" / "results-0.json").read_text())
    run_tiny("kill", root, *seeds)
    outcomes = [json.loads((root / str(seed) / "outcome.json").read_text()) for seed in seeds]
    for outcome in outcomes:
        newest = outcome["newest"]
        assert newest >= outcome["committed"], "what was reported as committed is there"
        assert newest == 0 or outcome["digest"] == digests[str(newest)]
        assert outcome["digest_after"] == digests[str(newest + 4)]
        assert not [name for name in outcome["left"] if name.startswith(".tmp-")]
    counts = Counter((len(each["victims"]), each["in_background"]) for each in outcomes)
    assert len(counts) == 4, "one and both, waited for and in the background"
    assert sum(each["newest"] > 0 for each in outcomes) >= len(outcomes) // 3, "most moments fall into the run"
    sys.stdout.write(f"{len(outcomes)} kills of ranks, {counts}; no checkpoint damaged, none lost\n")


def test_four_kills_of_ranks_cost_only_uncommitted_steps(run_tiny, tmp_path):
    check_kills(run_tiny, tmp_path, (2, 4, 7, 9))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_two_hundred_kills_of_ranks_cost_only_uncommitted_steps(run_tiny, tmp_path, record_property):
    seeds = range(1000, 1200)
    check_kills(run_tiny, tmp_path, seeds)
    record_property(FAULTS, {"SIGKILL of ranks that save": {"tried": len(seeds), "survived": len(seeds)}})


@pytest.fixture(scope="module")
def outcome(run_tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    run_tiny("ranks", root)
    first, second = (json.loads((root / f"results-{rank}.json").read_text()) for rank in range(2))
    return SimpleNamespace(root=root, first=first, second=second)


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


def test_what_ranks_agree_on_reaches_the_others_and_failed_saves_leave_the_older_checkpoint(outcome):
    for result in (outcome.first, outcome.second):
        assert (result["agree"], result["heard"]) == ([True, False], ["from 0", ""])
        assert result["exchanged"] == ["", "x"]
    assert (outcome.first["gathered"], outcome.second["gathered"]) == (["yy", "y"], [])
    assert outcome.first["left"] == [".lock", "step-00000006"]
    assert "step-00000009 is damaged and was passed over" in outcome.first["skipped"][0]
    assert (len(outcome.first["skipped"]), outcome.second["skipped"]) == (1, []), "rank 0 alone reports it"
    assert outcome.first["saved_again"] == outcome.first["saved"]
    assert outcome.first["after"] == str(outcome.root / "ddp" / "step-00000010")


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
