"""A stop saves, a resumption goes on with the same losses, and what happens to a run meanwhile costs nothing saved."""

import json
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime

import pytest
from kill_factory import Count, losses
from outcome_file import FAULTS
from workplace_factory import LIMIT_S, Workplace, make_workplace, wait_for

from shardwise.launch.rundir.lock import is_cancelled, write_cancel_flag
from shardwise.launch.rundir.process_record import read_records, record_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import MemoryState, memory_state_path
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report

STEPS = 60
LONG = {"train": {"steps": STEPS}, "checkpoint": {"every": "1000 steps"}, "eval": {"every": "1000 steps"}}
SLOW = """\
import pathlib
import time

END = time.monotonic() + 600  # so that nothing waits for ever after a test that failed


def on_step(step, metrics):
    if pathlib.Path("slow").exists():
        time.sleep(0.05)
    while pathlib.Path("hold").exists() and time.monotonic() < END:
        time.sleep(0.05)
"""


@pytest.fixture
def long_job(workplace: Workplace) -> Workplace:
    """A run that is not over before it is stopped: its steps wait a little beside a file `slow`, and beside `hold`."""
    (workplace.folder / "slow.py").write_text(SLOW)
    (workplace.folder / "slow").touch()
    workplace.write_job(**LONG, extensions="slow.py")
    return workplace


@pytest.fixture(scope="module")
def straight_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    place = make_workplace(tmp_path_factory.mktemp("straight") / "work place")
    place.write_job(**LONG)
    place.run("train", "job.yaml")
    return losses(place.only_run())


def num_steps_done(place: Workplace) -> int:
    files = list(place.folder.glob("runs/*/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def start_and_wait(place: Workplace, *words: str, steps: int) -> subprocess.Popen[str]:
    process = place.start("train", "job.yaml", *words)
    wait_for(lambda: num_steps_done(place) >= steps or process.poll() is not None, f"{steps} steps")
    assert process.poll() is None, process.communicate()[0]
    return process


STOPS = {
    "SIGINT": (130, Ending.STOPPED),
    "SIGTERM": (75, Ending.PREEMPTED),
    "SIGUSR1": (75, Ending.PREEMPTED),
    "the flag of `shardwise cancel` on another machine": (130, Ending.STOPPED),
}


def test_a_stopped_run_resumes_with_the_losses_of_an_uninterrupted_one(long_job, straight_losses):
    words: tuple[str, ...] = ()
    step = None
    for stop, (code, ending) in STOPS.items():
        process = start_and_wait(long_job, *words, steps=(step or 0) + 3)
        run_dir = long_job.only_run()
        if stop.startswith("SIG"):
            process.send_signal(signal.Signals[stop])
        else:
            write_cancel_flag(run_dir, now=datetime.now(UTC))
        output = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == code, output
        assert ("Ctrl-C again to stop now" in output) == (stop == "SIGINT")
        stopped = codec.read(run_dir / "report.json", Report)
        assert stopped.ending is ending and stopped.checkpoint is not None
        assert stopped.resumed_from_step == step and (step or 0) + 3 <= stopped.step < STEPS
        words, step = ("--resume",), stopped.step

    (long_job.folder / "slow").unlink()
    long_job.run("train", "job.yaml", "--resume")
    assert not is_cancelled(run_dir), "a person goes on with it"
    resumed = codec.read(run_dir / "report.json", Report)
    assert resumed.ending is Ending.FINISHED and resumed.resumed_from_step == step
    assert losses(run_dir) == straight_losses, "not bitwise equal"


def test_a_run_that_was_killed_before_its_first_checkpoint_is_resumed_from_its_beginning(workplace):
    """With a step in its metrics; before its plan was written; and as an empty directory."""
    words = ("train", "job.yaml", "--run-dir", "run", "--dry-run")
    workplace.run(*words)
    run_dir = workplace.folder / "run"
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "attempt": 1}\n')
    answer = workplace.run(*words, "--resume")
    assert "from the beginning" in answer.stdout
    assert not codec.read(run_dir / "attempts" / "2" / "plan.json", Plan).resume, "the second attempt begins anew"
    (run_dir / "plan.json").unlink()
    workplace.run(*words, "--resume", "--hardware", "3xCPU")
    assert (run_dir / "attempts" / "3").is_dir()
    assert codec.read(run_dir / "plan.json", Plan).chosen.num_ranks == 3, "not as many as before"
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    workplace.run(*words, "--resume")
    (run_dir / "plan.json").unlink()
    (run_dir / ".lock").unlink()
    answer = workplace.run(*words, "--resume", check=False)
    assert answer.returncode == 2 and "not a run directory" in answer.stderr


def test_a_run_directory_that_is_moved_while_the_run_writes_stays_one(long_job, straight_losses):
    process = start_and_wait(long_job, steps=3)
    (long_job.folder / "hold").touch()
    run_dir, place = long_job.only_run(), long_job.folder / "another place"
    run_dir.rename(place)
    wait_for(lambda: run_dir.is_symlink() or process.poll() is not None, "a link at the old path")
    for name in ("hold", "slow"):
        (long_job.folder / name).unlink()
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0 and f"was moved to {place}" in output, output
    assert run_dir.readlink() == place and losses(place) == straight_losses
    report = codec.read(place / "report.json", Report)
    assert report.ending is Ending.FINISHED and (place / str(report.checkpoint) / "MANIFEST.json").is_file()


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.kills
def test_processes_that_are_stopped_and_continued_are_named_and_cost_nothing(
    long_job, straight_losses, record_property
):
    process = start_and_wait(long_job, steps=3)
    run_dir = long_job.only_run()
    records = read_records(run_dir / "attempts" / "1" / "pids")
    supervisor = record_of(process.pid)
    assert records["rank-0"].send(signal.SIGSTOP) and records["launcher"].send(signal.SIGSTOP)
    time.sleep(8)
    assert supervisor.send(signal.SIGSTOP)
    status = long_job.run("status", run_dir).stdout
    assert f"kill -CONT {supervisor.pid}" in status, status
    for record in (supervisor, records["launcher"], records["rank-0"]):
        assert record.send(signal.SIGCONT)
    (long_job.folder / "slow").unlink()
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, output
    for name, kind in (("rank 0", "rank-0"), ("the launcher", "launcher")):
        assert f"{name} is stopped by a signal; kill -CONT {records[kind].pid}" in output, output
    assert losses(run_dir) == straight_losses
    record_property(FAULTS, {f"SIGSTOP of {each}": Count(1, 1).row() for each in ("rank", "launcher", "supervisor")})


def test_a_second_interrupt_ends_everything_at_once(long_job):
    process = start_and_wait(long_job, steps=3)
    (long_job.folder / "hold").touch()
    run_dir = long_job.only_run()
    family = read_records(run_dir / "attempts" / "1" / "pids").values()
    while process.poll() is None:  # two that follow each other at once may be one
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 130 and "without a checkpoint" in output, output
    assert len(family) == 2 and not any(member.is_alive for member in family)


@pytest.mark.parametrize(
    ("cap_bytes", "micro_batches", "code"),
    [
        (100 * 2**20, (128, 32), 0),  # tensors of 256 and 128 rows: 271 and 136 MiB; of 32: 34, and 34 beside
        pytest.param(2**20, (128, 64), 5, marks=[pytest.mark.long, pytest.mark.kills]),
    ],
)
def test_out_of_memory_leads_to_the_fallbacks_at_the_same_global_batch_then_to_exit_code_5(
    workplace, cap_bytes, micro_batches, code
):
    """Real ones: a data limit on the process refuses what the plan thought was there. A report is for a person."""
    workplace.write_job(train={"steps": 2, "seq_len": 128, "tokens_per_step": 65536}, pin={"loss": "eager"})
    plan = json.loads(workplace.run("plan", "job.yaml", "--json").stdout)
    assert plan["candidates"][0]["micro_batch"] == 256
    fallbacks = [each for each in plan["fallbacks"] if each["checkpointing"] == "none"]
    plan["fallbacks"] = [each for each in fallbacks if each["micro_batch"] in micro_batches]
    plan["hardware"]["vram_cap_bytes"] = cap_bytes
    (workplace.folder / "kept.json").write_text(json.dumps(plan))
    answer = workplace.run("train", "kept.json", check=False)
    assert answer.returncode == code, answer.stdout + answer.stderr
    run_dir = workplace.only_run()
    numbers = range(1, len(micro_batches) + 2)
    ran = [codec.read(run_dir / "attempts" / str(number) / "plan.json", Plan).chosen for number in numbers]
    assert [candidate.micro_batch for candidate in ran] == [256, *micro_batches]
    assert {candidate.micro_batch * candidate.accumulation for candidate in ran} == {512}
    report = codec.read(run_dir / "report.json", Report)
    assert report.attempts == len(ran) == len(list((run_dir / "attempts").iterdir()))
    failed = ran if code else ran[:-1]
    incidents = [incident for incident in report.incidents if incident.startswith("out of memory at step 0 ")]
    assert [told.split("micro batch ")[1].split(":")[0] for told in incidents] == [str(c.micro_batch) for c in failed]
    assert all("next fallback" in told for told in incidents[: len(ran) - 1])
    assert report.ending is (Ending.OUT_OF_MEMORY if code else Ending.FINISHED)
    assert ("no fallback is left" in incidents[-1]) is bool(code)

    written = run_dir / "attempts" / "1" / "out-of-memory.txt"
    state = codec.read(memory_state_path(written.parent, 0), MemoryState)
    # Under the smaller cap the packed documents by which `check_documents_apart` tries the model have no room already.
    moments = {phase: f"in {phase} of step 1" for phase in ("forward", "backward")}
    if code:
        moments = {"preparing the engine": "while preparing the engine, before step 1"}
    assert state.step == 1 and state.phase in moments
    assert state.tensors["weights"] > 50_000 and state.data_limit_bytes and state.host_bytes
    text = " ".join(written.read_text().split())
    assert str(written.relative_to(run_dir)) in answer.stdout and f"could not allocate {moments[state.phase]}." in text
    assert "data limit" in text and "micro batch 128 x 4" in text, "what would need less"
