"""Small cards on a big one: what is run under a cap, what the choice is held against, and what the tables say of it."""

import io
import os
import time
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace
from on_gpu import caps
from on_gpu.bench import Bench
from on_gpu.caps_ballast import held_to
from on_gpu.caps_contenders import MOST, contenders_of, context_bytes, counts_beside, host_bytes
from on_gpu.caps_goals import goals
from on_gpu.caps_jobs import JOBS, USUAL_SEQ_LEN, CapJob, longest_rows, settings_of, shape_of
from on_gpu.caps_rows import CapPlan, CapRun, Entry, Job, MoreMemory, jobs_of, row_of
from on_gpu.caps_tables import tables
from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.goals import Goal
from on_gpu.pieces import StepLog, go_through

from launch.console import Console
from launch.plan_job import plan_inputs, profile_data, read_inputs
from launch.supervisor import StopRequest
from launch.unlimited_plan import without_limits
from trainer.planning.planner import situation_of
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Host
from trainer.spec.plan import Plan
from trainer.spec.report import Figures, MemoryFigures, SpeedFigures
from trainer.spec.strategy import Method
from trainer.spec.units import GIB

NOBODY = {"HOME": "/nonexistent"}
CARD, HOST_RAM = "1xH200", 128 * GIB
SEVEN_IN_EIGHT = next(job for job in JOBS if job.host_bytes_per_parameter is not None)
jobs = pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)


def plan_of(job: CapJob, *, cap_bytes: int | None = None, **more: str) -> Plan:
    """The plan of a job on a catalogue card with a host of its own."""
    words = {
        "model.name": job.model,
        "data.train": "python-stdlib",
        "data.eval": "none",
        "train.seq_len": str(job.seq_len or USUAL_SEQ_LEN),
        "train.tokens_per_step": str((job.seq_len or USUAL_SEQ_LEN) * job.rows),
        "train.steps": "6",
        "checkpoint.every": "100000 steps",
    }
    inputs = read_inputs(
        None,
        [f"{key}={value}" for key, value in (words | settings_of(job, is_tiny=False) | more).items()],
        vram_cap_bytes=cap_bytes or job.cap_gib * GIB,
        hardware_spec=CARD,
        environment=NOBODY,
    )
    host = Host(cpu_name=None, num_cores=16, ram_bytes=HOST_RAM, ram_available_bytes=HOST_RAM)
    resolved = inputs.resolved
    resolved = replace(resolved, job=replace(resolved.job, limits=without_limits(resolved.job.limits)))
    inputs = inputs._replace(hardware=replace(inputs.hardware, host=host), resolved=resolved)
    return plan_inputs(inputs, profile_data(inputs), environment=NOBODY)


@cache
def known_plan(name: str) -> Plan:
    return plan_of(next(job for job in JOBS if job.name == name))


@jobs
def test_every_job_has_a_choice_within_its_cap(job: CapJob):
    plan = known_plan(job.name)
    assert plan.chosen.memory.need_bytes <= job.cap_gib * GIB
    assert plan.chosen.method == job.settings["train.method"]


@jobs
def test_the_choice_is_run_first_and_each_contender_once(job: CapJob):
    plan = known_plan(job.name)
    contenders, num_left_out = contenders_of(plan)
    assert contenders[0].is_choice and contenders[0].candidate == plan.chosen
    assert [contender.is_choice for contender in contenders].count(True) == 1
    assert len({contender.key for contender in contenders}) == len(contenders) <= MOST
    more, none_left = contenders_of(plan, most=MOST + num_left_out)
    assert (len(more), none_left) == (len(contenders) + num_left_out, 0)
    assert {contender.candidate.strategy.name for contender in more} >= {c.strategy.name for c in plan.candidates}


@jobs
def test_what_is_beyond_a_budget_says_so(job: CapJob):
    for contender in contenders_of(known_plan(job.name), most=1000)[0]:
        granted = contender.candidate.memory.fits and not contender.is_beyond_host
        assert granted is (contender.beyond is None)


@jobs
def test_a_contender_is_made_again_from_a_later_plan(job: CapJob):
    first, again = (contenders_of(plan)[0] for plan in (known_plan(job.name), plan_of(job)))
    assert [contender.key for contender in first] == [contender.key for contender in again]


def test_seven_billion_parameters_within_8_gib_take_at_most_ten_bytes_each_of_the_host():
    plan = known_plan(SEVEN_IN_EIGHT.name)
    assert plan.chosen.method is Method.FULL and plan.chosen.memory.need_bytes <= 8 * GIB
    assert host_bytes(plan.chosen) <= 10 * shape_of(SEVEN_IN_EIGHT, is_tiny=False).num_parameters


def test_what_takes_more_of_the_host_than_the_job_grants_is_run_and_named():
    contenders, _ = contenders_of(known_plan(SEVEN_IN_EIGHT.name))
    beyond = [contender for contender in contenders if contender.is_beyond_host]
    assert beyond and not contenders[0].is_beyond_host
    assert all(host_bytes(contender.candidate) <= HOST_RAM for contender in beyond)


def test_a_setting_that_just_misses_the_cap_is_run_and_one_far_beyond_it_is_not():
    job = JOBS[0]
    free = plan_of(job, cap_bytes=100 * GIB)
    need = free.chosen.memory.need_bytes
    key = contenders_of(free)[0][0].key
    just_below, far_below = (
        {contender.key: contender.beyond for contender in contenders_of(plan_of(job, cap_bytes=round(cap)), most=99)[0]}
        for cap in (need * 0.97, need * 0.5)
    )
    assert just_below[key] is not None and key not in far_below


def test_an_approximate_candidate_does_not_count_beside_an_exact_choice_but_the_reverse_does():
    exact, approximate = (
        next(
            c
            for c in plan_of(next(job for job in JOBS if job.cap_gib == 80)).candidates
            if c.strategy.is_exact is is_it
        )
        for is_it in (True, False)
    )
    assert not counts_beside(approximate, exact)
    assert counts_beside(exact, approximate) and counts_beside(approximate, approximate)


def test_a_gpu_counts_its_context_as_part_of_the_cap():
    assert context_bytes(known_plan(JOBS[0].name)) == 0


def test_the_longest_rows_fit_and_twice_as_long_ones_do_not_without_offload():
    job = next(job for job in JOBS if job.seq_len is None)
    longest = longest_rows(situation_of(plan_of(job)))
    assert longest > USUAL_SEQ_LEN
    words = {"train.seq_len": str(longest), "train.tokens_per_step": str(longest)}
    assert plan_of(job, **words).chosen.memory.fits
    words = {"train.seq_len": str(2 * longest), "train.tokens_per_step": str(2 * longest), "pin.sharding": "none"}
    plan = plan_of(job, cap_bytes=100 * GIB, **words)
    assert plan.chosen.memory.need_bytes > job.cap_gib * GIB


# What follows from rows that were measured.

CHOICE, OTHER, LOSSY = "none a", "zero2 b", "none lossy"


def entry(key: str, **fields) -> Entry:
    return Entry(key=key, need_bytes=7 * GIB, host_bytes=0, step_s=1.0, tokens_per_s=1000.0, **fields)


def cap_plan(*entries: Entry, **fields) -> CapPlan:
    about = {"job": "1B, LoRA", "cap_gib": 8, "is_rehearsal": False, "device": "H200", "cap_bytes": 8 * GIB}
    return CapPlan(entries=entries, **(about | fields))


def cap_run(key: str, tokens_per_s: float | None, *, device_gib: float = 7.5, outcome: Outcome = Outcome.RAN) -> CapRun:
    measured = Figures(
        memory=MemoryFigures(peak_allocated_bytes=7 * GIB, device_bytes=round(device_gib * GIB)),
        speed=SpeedFigures(tokens_per_s_per_gpu=tokens_per_s),
    )
    result = CaseResult(case=Case(name=key, model="llama-3.2-1b"), outcome=outcome, measured=measured)
    return CapRun(outcome=outcome, key=key, result=result)


def job_of(plan: CapPlan, *runs: CapRun) -> Job:
    return Job(plan=plan, runs={run.key: run for run in runs})


def rows_of(job: Job) -> dict:
    name = job.plan.name
    runs = {f"{name}: {run.key}": row_of(run, of=name) for run in job.runs.values()}
    return {f"{name}: plan": row_of(job.plan)} | runs


def goal_of(job: Job, words: str) -> Goal:
    """The one goal whose name has these words."""
    (goal,) = (goal for goal in goals(rows_of(job)) if words in goal.name)
    return goal


def test_regret_is_what_the_choice_lacks_of_the_fastest_that_counts():
    plan = cap_plan(entry(CHOICE, is_choice=True), entry(OTHER), entry(LOSSY, is_faithful=False))
    job = job_of(plan, cap_run(CHOICE, 900), cap_run(OTHER, 1000), cap_run(LOSSY, 5000))
    assert job.regret == pytest.approx(0.1)
    assert job.best_other is not None and job.best_other.key == OTHER
    goal = goal_of(job, "regret")
    assert goal.is_met is False and "10.0%" in (goal.figure or "") and OTHER in goal.reason
    better = job_of(plan, cap_run(CHOICE, 1100), cap_run(OTHER, 1000))
    assert better.regret == 0 and goal_of(better, "regret").is_met


@pytest.mark.parametrize(
    ("field", "device_gib", "counts"),
    [
        ({}, 7.9, True),
        ({}, 8.1, False),
        ({"beyond": "needs 8.2 GiB"}, 7.9, True),
        ({"is_beyond_host": True}, 7.9, False),
    ],
    ids=["fits", "took more than the cap", "was ruled out and did fit", "more host RAM than granted"],
)
def test_what_counts_ran_within_the_cap_and_the_host(field: dict, device_gib: float, counts: bool):
    plan = cap_plan(entry(CHOICE, is_choice=True), entry(OTHER, **field))
    job = job_of(plan, cap_run(CHOICE, 900), cap_run(OTHER, 1000, device_gib=device_gib))
    assert (job.regret is not None) is counts


def test_there_is_no_regret_where_the_choice_did_not_run():
    plan = cap_plan(entry(CHOICE, is_choice=True), entry(OTHER))
    job = job_of(plan, cap_run(CHOICE, None, outcome=Outcome.OUT_OF_MEMORY), cap_run(OTHER, 1000))
    assert job.regret is None and goal_of(job, "regret").is_met is None
    assert (
        goal_of(job, "the choice under a cap").is_met is False
        and "out of memory" in goal_of(job, "the choice under a cap").reason
    )


def test_a_plan_is_broken_by_what_was_said_to_fit_and_by_nothing_else():
    ruled_out = entry("too large", beyond="needs 8.2 GiB")
    plan = cap_plan(entry(CHOICE, is_choice=True), entry(OTHER), ruled_out)
    out_of_memory = [cap_run(key, None, outcome=Outcome.OUT_OF_MEMORY) for key in (OTHER, "too large")]
    job = job_of(plan, cap_run(CHOICE, 900, device_gib=8.2), *out_of_memory)
    assert [broken.key for broken in job.broken] == [CHOICE, OTHER]
    assert goal_of(job, "said to fit").figure == "2 of 2 did"


@pytest.mark.parametrize(
    ("is_better", "device_gib", "wastes"), [(True, 6.7, True), (True, 6.9, False), (False, 4.0, False)]
)
def test_memory_is_wasted_only_where_more_of_it_would_help(is_better: bool, device_gib: float, wastes: bool):
    more = MoreMemory(cap_bytes=10 * GIB, key="none c", step_s=0.5, is_better=is_better)
    plan = cap_plan(entry(CHOICE, is_choice=True), more_memory=more)
    job = job_of(plan, cap_run(CHOICE, 900, device_gib=device_gib))
    assert job.wastes_memory is wastes
    assert goal_of(job, "device bytes").is_met is not wastes


@pytest.mark.parametrize(("host_bytes_each", "is_met"), [(9, True), (11, False)])
def test_seven_billion_parameters_are_held_to_ten_bytes_each(host_bytes_each: int, is_met: bool):
    choice = replace(entry(CHOICE, is_choice=True), host_bytes=host_bytes_each * 1000)
    job = job_of(cap_plan(choice, job=SEVEN_IN_EIGHT.words, num_parameters=1000), cap_run(CHOICE, 900))
    assert goal_of(job, "7B, all parameters").is_met is is_met


def test_what_was_not_measured_judges_no_goal():
    assert {goal.is_met for goal in goals({})} == {None}
    assert {goal.is_met for goal in goals(rows_of(job_of(cap_plan(entry(CHOICE, is_choice=True)))))} == {None}


def test_shares_leave_out_what_a_cap_grants_to_the_process():
    assert cap_plan(entry(CHOICE), cap_bytes=500, context_bytes=400).share(450) == pytest.approx(0.5)


def test_rows_give_back_the_job_that_was_measured():
    job = job_of(cap_plan(entry(CHOICE, is_choice=True), entry(OTHER)), cap_run(CHOICE, 900), cap_run(OTHER, 800))
    assert jobs_of(rows_of(job)) == (job,)
    assert job.is_whole


def test_the_table_shows_every_contender_and_what_raised():
    plan = cap_plan(entry(CHOICE, is_choice=True), entry(OTHER), why=("micro batch 8: 16 would need 9 GiB",))
    job = job_of(plan, cap_run(CHOICE, 900), cap_run(OTHER, 1000))
    text = tables(rows_of(job) | {"8 GiB, other: plan": {"error": "ValueError: no such thing"}})["caps"]
    shown = (CHOICE, OTHER, "900", "1,000", "10.0%", "16 would need", "ValueError: no such thing", "Measured on H200")
    for words in shown:
        assert words in text
    assert "rehearsal" not in text.lower()


def test_a_rehearsal_is_called_one():
    plan = cap_plan(entry(CHOICE, is_choice=True), is_rehearsal=True, device="some CPU")
    assert "A rehearsal on a CPU (some CPU)" in tables(rows_of(job_of(plan, cap_run(CHOICE, 10))))["caps"]
    assert tables({}) == {"caps": "Nothing was run yet.\n"}


def test_a_job_that_was_refused_says_why_and_is_not_met():
    job = job_of(cap_plan(outcome="refused", reason="needs 56 GiB of host RAM a node; 40 GiB are granted"))
    assert "needs 56 GiB of host RAM" in tables(rows_of(job))["caps"]
    goal = goal_of(job, "the choice under a cap")
    assert goal.is_met is False and "40 GiB are granted" in goal.reason


def test_a_card_that_cannot_be_held_is_said_to_be_so_and_nothing_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EnvironmentFaultError, match="the rest of the card could not be held: "), held_to(GIB):
        pytest.fail("there is no card")


# The steps themselves, in a rehearsal.


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One that rehearses, with models and rows that its tests share."""
    folder = tmp_path_factory.mktemp("bench")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    console = Console(io.StringIO())
    return Bench(folder / "work", is_tiny=True, console=console, stop=StopRequest(), environment=environment)


def test_the_cap_of_a_rehearsal_decides_its_choice(bench: Bench):
    lora = {job.cap_gib: job for job in JOBS if job.model == "llama-3.2-3b" and job.settings["train.method"] == "lora"}
    steps = {step.name: step for step in caps.steps(bench, {})}
    small, large = (jobs_of({"plan": steps[f"{lora[cap].name}: plan"].run()})[0].plan for cap in (12, 16))
    assert small.cap_bytes < large.cap_bytes
    assert small.choice.need_bytes < large.choice.need_bytes


def test_contenders_are_steps_once_the_plan_is_there_and_the_choice_runs_under_its_cap(bench: Bench, tmp_path: Path):
    assert [step.name for step in caps.steps(bench, {})] == [f"{job.name}: plan" for job in JOBS]
    log = StepLog(tmp_path / "steps.jsonl")
    go_through(caps.PIECE, bench, log, until_s=time.monotonic() + 3600, most=2)
    rows = log.rows(caps.PIECE)
    (job,) = jobs_of(rows)
    assert len(job.plan.entries) > 1 and job.plan.cap_bytes > job.plan.choice.need_bytes
    names = [step.name for step in caps.steps(bench, rows)]
    assert names[1 : 1 + len(job.plan.entries)] == [f"{job.plan.name}: {entry.key}" for entry in job.plan.entries]
    assert job.chosen_run is not None and job.chosen_run.outcome is Outcome.RAN
    assert 0 < (job.used_share or 0) <= 1 and job.tokens_per_s(job.plan.choice)
    assert str(bench.work) not in (tmp_path / "steps.jsonl").read_text()
