"""Silence that is too long, by what a rank does; who hangs where all are silent."""

from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import TINY_LLAMA, engine_plan
from msgspec.structs import replace

from shardwise.launch.attempt.watchdog import CallStack, Silence, Watchdog, WatchLimits, read_stack, with_stacks
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.messages.rank_files import (
    HEARTBEAT_BYTES,
    Heartbeat,
    encode_heartbeat,
    heartbeat_path,
    read_heartbeat,
)
from shardwise.trainer.spec.model.readers import read_model_shape

LIMITS = WatchLimits(phase_s=1000, least_step_s=100, end_s=10)


class Ranks:
    """Signs of life of several ranks, under a clock that a test sets."""

    def __init__(self, folder: Path, num_ranks: int, limits: WatchLimits = LIMITS) -> None:
        self.folder, self.now_s = folder, 0.0
        self.notices: list[Silence] = []
        self.counts = dict.fromkeys(range(num_ranks), 0)
        self.watchdog = Watchdog(folder, num_ranks=num_ranks, limits=limits, clock=lambda: self.now_s)

    def beat(self, phase: str, step: int, *, but: tuple[int, ...] = ()) -> None:
        for rank in self.counts.keys() - set(but):
            self.counts[rank] += 1
            path = heartbeat_path(self.folder, rank)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encode_heartbeat(Heartbeat(count=self.counts[rank], phase=phase, step=step)))

    def wait(self, seconds: float) -> Silence | None:
        """Looks once a second; what is not yet too long is collected in `notices`."""
        silence = None
        for _ in range(round(seconds)):
            self.now_s += 1
            found = self.watchdog.look()
            if found is not None and found.is_allowed:
                self.notices.append(found)
            else:
                silence = silence or found
        return silence

    def train(self, steps: range, *, step_s: float) -> None:
        for step in steps:
            self.beat("data", step)
            self.beat("backward", step)
            assert self.wait(step_s) is None
            self.beat("training", step + 1)


@pytest.mark.parametrize(
    ("steps_s", "limit_s"),
    [([30] * 6, 600), ([1] * 6 + [90] + [1] * 5, 270)],  # twenty usual steps; three times the longest
)
def test_a_step_may_be_silent_for_twenty_usual_ones_or_three_of_the_longest(tmp_path: Path, steps_s, limit_s):
    ranks = Ranks(tmp_path, 1)
    for step, step_s in enumerate(steps_s):
        ranks.train(range(step, step + 1), step_s=step_s)
    ranks.beat("forward", len(steps_s))
    assert ranks.wait(limit_s - 5) is None
    silence = ranks.wait(10)
    assert silence is not None and silence.limit_s == pytest.approx(limit_s, rel=1 / 30)
    assert (silence.ranks, silence.phase, silence.step) == ((0,), "forward", len(steps_s))


def test_an_unusual_silence_in_a_step_is_reported_within_a_minute_and_once(tmp_path: Path):
    ranks = Ranks(tmp_path, 2)
    ranks.beat("loading", 0)
    ranks.wait(200)
    ranks.train(range(6), step_s=2)
    assert not ranks.notices, "loading may take longer"
    ranks.beat("forward", 6, but=(1,))
    assert ranks.wait(44) is None and not ranks.notices
    assert ranks.wait(50) is None
    (notice,) = ranks.notices
    assert notice.ranks == (1,) and notice.silent_s < 60
    assert ranks.wait(10) is not None, "and ended at its limit"
    slow = Ranks(tmp_path / "slow", 1)
    slow.folder.mkdir()
    slow.train(range(6), step_s=30)
    slow.beat("forward", 6)
    slow.wait(85)
    assert not slow.notices, "three steps of the longest"


@pytest.mark.parametrize(
    ("num_steps", "step_s", "phase", "where"),
    [
        (6, 1, "loading the model", "loading the model"),
        (6, 1, "on_step", "on_step after step 6"),
        (2, 500, "forward", "forward of step 3"),  # first steps may compile
    ],
)
def test_phases_outside_a_step_and_first_steps_have_their_own_limit(tmp_path: Path, num_steps, step_s, phase, where):
    ranks = Ranks(tmp_path, 1)
    ranks.train(range(num_steps), step_s=step_s)
    ranks.beat(phase, num_steps)
    assert ranks.wait(999) is None
    silence = ranks.wait(3)
    assert silence is not None and all(fact in silence.message for fact in ("rank 0", where, "16 min 41 s"))


@pytest.mark.parametrize("has_come", [True, False])
def test_the_rank_with_the_fewest_heartbeats_hangs_also_if_it_never_came(tmp_path: Path, has_come: bool):
    ranks = Ranks(tmp_path, 3)
    if has_come:
        ranks.train(range(6), step_s=1)
        ranks.beat("forward", 6)
    ranks.beat("backward" if has_come else "starting the engine", 6, but=(1,))
    silence = ranks.wait(102 if has_come else 1002)
    assert silence is not None and silence.ranks == (1,)
    assert all(fact in silence.message for fact in ("rank 1", "forward of step 7" if has_come else "starting"))


def test_time_of_a_suspended_supervisor_does_not_count(tmp_path: Path):
    ranks = Ranks(tmp_path, 1)
    ranks.train(range(6), step_s=1)
    ranks.beat("forward", 6)
    assert ranks.wait(1) is None  # this sign has been seen, so all that follows is silence
    ranks.now_s += 10_000
    assert ranks.watchdog.look() is None
    assert ranks.wait(90) is None


def test_a_process_that_does_not_end_after_its_last_heartbeat_is_noticed(tmp_path: Path):
    ranks = Ranks(tmp_path, 2)
    ranks.beat("finished", 8, but=(1,))
    assert ranks.wait(9) is None and not ranks.watchdog.has_ended
    ranks.beat("finished", 8, but=(0,))
    assert ranks.wait(4) is not None and ranks.watchdog.has_ended


def test_a_rank_that_waits_for_a_slow_one_is_not_late(tmp_path: Path):
    """The second rank waits for the data of a stream, the first for the second."""
    ranks = Ranks(tmp_path, 2, LIMITS._replace(data_s=1000))
    ranks.train(range(6), step_s=1)
    ranks.beat("data", 6)
    ranks.beat("forward", 6, but=(1,))
    assert ranks.wait(999) is None
    silence = ranks.wait(3)
    assert silence is not None and (silence.ranks, silence.phase) == ((1,), "data")


def test_limits_grow_with_the_model_and_the_predicted_step():
    plan = engine_plan(Sharding.NONE)

    def limits(**changes: Any) -> WatchLimits:
        return WatchLimits().scaled_to(replace(plan, **changes))

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    assert limits().phase_s == pytest.approx(3600, abs=1) and limits().data_s is None
    assert limits(model_shape=read_model_shape({**TINY_LLAMA, **sizes})).phase_s > 20_000
    streamed = replace(plan.job, data=replace(plan.job.data, streaming=True))
    assert limits(job=streamed).data_s == limits().phase_s
    slow = replace(plan.chosen, speed=replace(plan.chosen.speed, step_s=1000.0))
    assert limits(candidates=(slow,)).phase_s == 20_000


def test_a_heartbeat_has_one_length_for_any_phase(tmp_path: Path):
    heartbeat_path(tmp_path, 0).parent.mkdir()
    for phase in ("forward", "x" * 1000, "\x01" * 1000, "\u00e9\u4e2d" * 500):
        content = encode_heartbeat(Heartbeat(count=10**12, phase=phase, step=10**9))
        heartbeat_path(tmp_path, 0).write_bytes(content)
        found = read_heartbeat(tmp_path, 0)
        assert len(content) == HEARTBEAT_BYTES and found is not None and found.step == 10**9
        assert found.phase and phase.startswith(found.phase)


DUMP = """Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Current thread 0x02 (most recent call first):
  File "{path}", line 12 in {name}
  File "/lib/trainer/runtime/loop.py", line 70 in train
"""
SILENCE = Silence(ranks=(0, 1), phase="backward", step=6, silent_s=301, limit_s=300)


def test_of_two_that_are_equally_far_the_one_outside_a_collective_hangs(tmp_path: Path):
    def stack_of(path: str, name: str) -> CallStack:
        log = tmp_path / "rank.log"
        log.write_text("an older line\n" + DUMP.format(path=path, name=name))
        return read_stack(log, begin=len("an older line\n"), pid=None)

    waiting = stack_of("/lib/torch/distributed/distributed_c10d.py", "all_reduce")
    busy = stack_of("/home/me/mine.py", "loss")
    assert waiting.is_waiting and not busy.is_waiting
    assert read_stack(tmp_path / "none", begin=0, pid=None).frame is None
    words = with_stacks(SILENCE, {0: waiting, 1: busy})
    assert words.startswith("rank 1 ") and "backward of step 7" in words and "loss (mine.py, line 12)" in words


def test_the_time_a_stop_may_take_is_that_of_the_longest_step_and_save(tmp_path: Path):
    ranks = Ranks(tmp_path, 2)
    assert ranks.watchdog.stop_s == 0
    ranks.train(range(3), step_s=10)
    assert ranks.watchdog.stop_s == pytest.approx(2 * 10, abs=4)
    ranks.beat("saving a checkpoint", 3)
    ranks.wait(30)
    assert ranks.watchdog.stop_s == pytest.approx(2 * 10 + 2 * 30, abs=8)
    ranks.beat("training", 3)
    ranks.wait(60)
    assert ranks.watchdog.stop_s == pytest.approx(2 * 10 + 2 * 30, abs=8)
