"""The predicted time of a run is the sum of its parts, and a part that nothing predicts is not in it."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from planning_factory import machine, plan_of, shape_of
from report_factory import calibration_of, make_report, record_of

from shardwise.launch.plan.calibration_store import record_of_run
from shardwise.trainer.planning.candidates import configuration_of, run_seconds, run_time, run_totals
from shardwise.trainer.planning.explain.first_screen import first_screen, text_of
from shardwise.trainer.planning.explain.plan_page import explain_plan
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.certainty import part_errors, run_error, time_error
from shardwise.trainer.planning.speed.files import export_volume, saved_volume
from shardwise.trainer.planning.speed.step import evaluation_seconds
from shardwise.trainer.spec.hardware import Disk, Hardware
from shardwise.trainer.spec.job.kinds import Every
from shardwise.trainer.spec.plan import Plan, RecordSource
from shardwise.trainer.spec.report import Report, TimePart
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB, MIB


def disk_of(path: str, write: int | None, read: int | None = None) -> Disk:
    return Disk(
        path=path, filesystem="ext4", total_bytes=1024 * GIB, free_bytes=512 * GIB, write_bytes_per_s=write,
        read_bytes_per_s=read,
    )  # fmt: skip


def with_disks(spec: str, *disks: Disk) -> Hardware:
    hardware = machine(spec)
    return replace(hardware, host=replace(hardware.host, disks=disks))


def at(plan: Plan, every: int | None, *, max_share: float | None = None, steps: int = 40) -> Plan:
    schedule = replace(plan.schedule, num_steps=steps, checkpoint_every_steps=every, checkpoint_every_s=None)
    job = replace(
        plan.job, checkpoint=replace(plan.job.checkpoint, every=None if every is None else Every(steps=every))
    )
    return replace(plan, job=job, schedule=replace(schedule, saving_max_share=max_share))


def test_without_a_measured_disk_or_a_run_the_time_is_that_of_steps_and_evaluations() -> None:
    plan = plan_of("tiny", "1xCPU", steps=40)
    context, chosen = context_of(plan), plan.chosen
    time = run_time(context, chosen)
    assert time.not_predicted == (TimePart.START_UP, TimePart.SAVING, TimePart.EXPORT)
    assert list(time.parts_s) == [TimePart.STEPS, TimePart.EVALUATION]
    assert time.steps == pytest.approx(plan.schedule.num_steps * chosen.speed.step_s)
    assert run_seconds(context, chosen) == run_totals(context, chosen).hours * 3600 == pytest.approx(time.total_s)
    assert run_error(context, chosen) == time_error(context, chosen)
    assert "without start-up, saving, export" in text_of(first_screen(plan))
    shown = " ".join(explain_plan(plan, width=200).split())
    assert all(f"{part} not predicted" in shown for part in time.not_predicted)


def test_a_run_without_evaluations_between_scores_its_last_step() -> None:
    plan = plan_of("tiny", "1xCPU")
    plan = replace(plan, schedule=replace(plan.schedule, eval_every_steps=None))
    context = context_of(plan)
    scored = evaluation_seconds(
        context.shape, configuration_of(context, plan.chosen), context.device, plan.data.num_eval_tokens
    )
    assert run_time(context, plan.chosen).evaluation == pytest.approx(scored)


def test_saves_and_the_export_are_bytes_at_the_rate_of_a_measured_disk() -> None:
    hardware = with_disks("1xCPU", disk_of("/", 100 * MIB, 200 * MIB))
    plan = at(plan_of("tiny", hardware, method=Method.FULL), 10)
    context, chosen = context_of(plan), plan.chosen
    size, weights = chosen.memory.checkpoint_bytes, 4 * shape_of("tiny").num_parameters
    time = run_time(context, chosen)
    # After step 1, after steps 10, 20 and 30, and at the end; the first is read back.
    assert time.saving == pytest.approx(5 * size / (100 * MIB) + size / (200 * MIB))
    assert time.export == pytest.approx(weights / (100 * MIB) + weights / (200 * MIB))
    assert time.total_s == pytest.approx(sum(time.parts_s.values())) and time.not_predicted == (TimePart.START_UP,)
    assert set(part_errors(context, chosen)) == set(time.parts_s)
    shown = " ".join(explain_plan(plan, width=200).split())
    assert "as / was measured" in shown and shown.count("(at least)") == 2, "files are more than their bytes"


def test_saves_that_are_limited_cost_their_share_of_the_training() -> None:
    plan = plan_of("tiny", with_disks("1xCPU", disk_of("/", 10 * MIB, 10 * MIB)), method=Method.FULL)
    limited, context = at(plan, 1, max_share=0.03), context_of(at(plan, 1, max_share=0.03))
    time, once = run_time(context, limited.chosen), plan.chosen.memory.checkpoint_bytes / (10 * MIB)
    assert time.saving == pytest.approx(3 * once + 0.03 * (time.steps + time.evaluation))


def test_adapters_export_what_they_train() -> None:
    plan = plan_of("1b", "1xH100-SXM5-80GB", method=Method.LORA)
    context = context_of(plan)
    volume = export_volume(context, configuration_of(context, plan.chosen))
    assert volume.written == volume.read == pytest.approx(plan.chosen.memory.checkpoint_bytes / 3, rel=0.01)


def test_saves_in_the_background_cost_the_copy() -> None:
    hardware = with_disks("1xH100-SXM5-80GB", disk_of("/", GIB, GIB))
    plan = at(plan_of("1b", hardware, method=Method.FULL), 10)
    context, chosen = context_of(plan), plan.chosen
    volume = saved_volume(context, chosen, configuration_of(context, chosen), training_s=1.0)
    time, size = run_time(context, chosen), chosen.memory.checkpoint_bytes
    assert time.saving == pytest.approx(3 * size / GIB + volume.copied_s) and 0 < volume.copied_s < size / GIB


@pytest.mark.parametrize(("output", "rate"), [("/data/x/run", 30), ("/database/run", 10), ("runs/one", 10)])
def test_the_disk_is_that_of_the_run_directory_or_the_slowest_that_was_measured(output: str, rate: int) -> None:
    disks = (disk_of("/", 10 * MIB), disk_of("/data", 20 * MIB), disk_of("/data/x", 30 * MIB), disk_of("/boot", None))
    plan = at(plan_of("tiny", with_disks("1xCPU", *disks), method=Method.FULL), None)
    plan = replace(plan, job=replace(plan.job, output=output))
    assert run_time(context_of(plan), plan.chosen).saving == pytest.approx(
        3 * plan.chosen.memory.checkpoint_bytes / (rate * MIB)
    )


def ran(plan: Plan, *, start_up_s: float = 7.0, attempts: int = 1) -> Report:
    parts = {"steps": 20.0, "evaluation": 1.0, "saving": 2.0, "export": 0.5}
    duration_s = start_up_s + sum(parts.values())
    facts = {"duration_s": duration_s, "saved_bytes": 8 * MIB, "attempts": attempts}
    return make_report(plan=plan.chosen, phases_s=parts, **facts)


def test_a_run_teaches_the_next_plan_its_start_up_and_the_rate_of_its_files() -> None:
    plan = plan_of("tiny", "1xCPU", method=Method.FULL)
    records = [
        record_of_run(ran(plan, start_up_s=start_up_s), plan, now=datetime.now(UTC), source=source)
        for start_up_s, source in ((7.0, RecordSource.RUN), (9.0, RecordSource.RUN), (99.0, RecordSource.TRIAL))
    ]
    learned = plan_of("tiny", "1xCPU", method=Method.FULL, steps=40, calibration=calibration_of(*filter(None, records)))
    context, chosen = context_of(learned), learned.chosen
    time, configuration = run_time(context, chosen), configuration_of(context, chosen)
    assert time.start_up == pytest.approx(8.0), "the median of the runs; a trial saves and exports nothing"
    assert time.export == pytest.approx(0.5)
    volume = saved_volume(context, chosen, configuration, training_s=time.steps + time.evaluation)
    assert time.saving >= (volume.waited.written + volume.waited.read) / (4 * MIB)
    assert not time.not_predicted and "without" not in text_of(first_screen(learned))
    assert "as measured in 2 runs on this device" in " ".join(explain_plan(learned, width=200).split())


def test_a_run_of_another_size_or_of_several_attempts_teaches_no_start_up() -> None:
    plan = plan_of("tiny", "1xCPU", method=Method.FULL)
    record = record_of_run(ran(plan, attempts=2), plan, now=datetime.now(UTC))
    assert record is not None and record.start_up_s is None and record.saved_bytes_per_s is None
    large = record_of(start_up_s=60.0)
    other = plan_of("tiny", "1xCPU", method=Method.FULL, calibration=calibration_of(large))
    assert run_time(context_of(other), other.chosen).start_up is None
