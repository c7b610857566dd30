"""The learning rate is a function of the step: warm, then down a known course, never spent at zero."""

import pytest

from shardwise.trainer.spec.job.sections import LrSchedule, TrainJob
from shardwise.trainer.spec.plan import Schedule, learning_rate


def schedule_of(*, num_steps: int = 100, warmup_steps: int = 10, lr: float = 1.0) -> Schedule:
    return Schedule(
        num_steps=num_steps, sequences_per_step=1, tokens_per_step=1, warmup_steps=warmup_steps, lr=lr, lr_source="",
        eval_every_steps=None, checkpoint_every_steps=None,
    )  # fmt: skip


def rate(step: int, course: LrSchedule = LrSchedule.COSINE, **facts: float) -> float:
    return learning_rate(schedule_of(**facts), TrainJob(schedule=course), step)  # type: ignore[arg-type]


@pytest.mark.parametrize("course", LrSchedule)
def test_warmup_rises_linearly_to_the_full_rate(course: LrSchedule) -> None:
    assert [rate(step, course, lr=2.0) for step in (1, 5, 10, 11)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert rate(1, course, warmup_steps=0) == 1.0


@pytest.mark.parametrize(
    ("course", "step", "expected"),
    [
        (LrSchedule.COSINE, 56, 0.1 + 0.9 * 0.5),  # half of the 90 steps after warmup: half-way down to a tenth
        (LrSchedule.LINEAR, 56, 0.5), (LrSchedule.LINEAR, 100, 1 / 90), (LrSchedule.CONSTANT, 100, 1.0),
        (LrSchedule.WSD, 80, 1.0),  # the cooldown is the last fifth: steps 81 to 100
        (LrSchedule.WSD, 81, 1.0),
        (LrSchedule.WSD, 86, 0.5),  # 1 - sqrt(5 / 20)
    ],
)  # fmt: skip
def test_each_course_has_its_exact_values(course: LrSchedule, step: int, expected: float) -> None:
    assert rate(step, course) == pytest.approx(expected)


@pytest.mark.parametrize("course", LrSchedule)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (2, 1), (10, 9), (1000, 30)])
def test_the_rate_is_positive_and_never_rises_after_warmup(course, num_steps: int, warmup_steps: int) -> None:
    rates = [rate(step, course, num_steps=num_steps, warmup_steps=warmup_steps) for step in range(1, num_steps + 1)]
    assert min(rates) > 0
    after = rates[max(0, warmup_steps - 1) :]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("step", [0, 101])
def test_steps_count_from_one_to_the_last(step: int) -> None:
    with pytest.raises(ValueError, match=rf"step {step} .*100"):
        rate(step)
