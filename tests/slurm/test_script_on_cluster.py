"""`train.sbatch` on a real Slurm: signals reach the supervisor, its code decides, the run goes on in the right job."""

from pathlib import Path

from slurm_cluster import SlurmCluster
from slurm_jobs import batch_job, read_events, read_output, read_starts, tell_ends, write_program, write_run

from shardwise.slurm.sbatch import container_of
from shardwise.slurm.submit import submit_script
from shardwise.trainer.spec.messages.submission import CHAIN_FILE

FRESH, AGAIN = "start restarts=0", "start restarts=1"


def wait_for_events(slurm: SlurmCluster, run_dir: Path, *events: str) -> None:
    slurm.wait_until(lambda: read_events(run_dir) == list(events), f"{run_dir} has {events}")


def next_job(slurm: SlurmCluster, run_dir: Path, number: int) -> str:
    """The id of the job that started there as the `number`-th."""
    slurm.wait_until(lambda: len(read_starts(run_dir)) >= number, f"{number} jobs started in {run_dir}")
    return read_starts(run_dir)[number - 1].job_id


def test_a_job_that_ends_with_75_is_queued_again_and_of_an_array_that_point_alone(slurm: SlurmCluster, tmp_path: Path):
    """Side by side, since Slurm holds a job back for seconds: one that hears USR1, and the last point of an array.

    The plain job id of that point is the id of the whole array.
    """
    run_dir, sweep_dir = tmp_path / "run", tmp_path / "sweep"
    job = slurm.submit(write_run(batch_job(run_dir), "told", "0"))
    script = write_run(batch_job(sweep_dir, num_points=2), "0")
    tell_ends(sweep_dir / "point-2", "75", "0")
    array = slurm.submit(script)
    wait_for_events(slurm, run_dir, FRESH)
    slurm.run("scancel", "--batch", "--signal=USR1", job)

    assert slurm.wait_for(job, "COMPLETED", restarts=1).exit_code == "0:0"
    assert read_events(run_dir) == [FRESH, "told", AGAIN]
    assert [(start.job_id, start.num_restarts) for start in read_starts(run_dir)] == [(job, 0), (job, 1)]
    slurm.wait_for(f"{array}_2", "COMPLETED", restarts=1)
    assert slurm.job(f"{array}_1").restarts == 0
    assert [read_events(sweep_dir / f"point-{point}") for point in (1, 2)] == [[FRESH], [FRESH, AGAIN]]


def test_term_reaches_the_supervisor_as_usr1_and_where_requeueing_is_refused_a_new_job_follows(slurm, tmp_path: Path):
    run_dir = tmp_path / "run"
    job = slurm.submit(write_run(batch_job(run_dir, requeue=False), "told", "0"))
    wait_for_events(slurm, run_dir, FRESH)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    following = next_job(slurm, run_dir, 2)
    assert following != job and slurm.wait_for(following, "COMPLETED").restarts == 0
    assert slurm.wait_for(job, "COMPLETED").restarts == 0
    assert read_events(run_dir) == [FRESH, "told", FRESH]
    assert "a new job continues" in read_output(run_dir)


def test_a_supervisor_that_does_not_listen_is_started_again_and_other_codes_are_the_jobs(
    slurm: SlurmCluster, tmp_path: Path
):
    run_dir = tmp_path / "run"
    job = slurm.submit(write_run(batch_job(run_dir, requeue=False), "deaf", "0"))
    wait_for_events(slurm, run_dir, FRESH)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait_for(job, "COMPLETED")
    wait_for_events(slurm, run_dir, FRESH, FRESH)
    job = slurm.submit(write_run(batch_job(tmp_path / "other"), "5"))
    assert slurm.wait_for(job, "FAILED").exit_code == "5:0"


def test_a_cancelled_job_saves_and_is_not_brought_back(slurm: SlurmCluster, tmp_path: Path):
    run_dir = tmp_path / "run"
    job = slurm.submit(write_run(batch_job(run_dir), "told", "0"))
    wait_for_events(slurm, run_dir, FRESH)
    slurm.run("scancel", job)
    assert slurm.wait_for(job, "CANCELLED").restarts == 0
    assert read_events(run_dir) == [FRESH, "told"]
    assert f"sbatch {run_dir}/train.sbatch" in read_output(run_dir)
    assert not slurm.run("squeue", "--noheader").stdout


def test_the_points_of_an_array_run_in_their_folders(slurm: SlurmCluster, tmp_path: Path):
    """And one that is stopped is followed by that point alone."""
    run_dir = tmp_path / "sweep"
    script = write_run(batch_job(run_dir, num_points=3, requeue=False), "0")
    tell_ends(run_dir / "point-3", "75", "0")
    array = slurm.submit(script)
    for point in (1, 2, 3):
        slurm.wait_for(f"{array}_{point}", "COMPLETED")
        assert next_job(slurm, run_dir / f"point-{point}", 1) == f"{array}_{point}"
    following = next_job(slurm, run_dir / "point-3", 2)
    assert following.endswith("_3") and slurm.wait_for(following, "COMPLETED")
    slurm.wait_until(lambda: not slurm.run("squeue", "--noheader").stdout, "the queue is empty")
    assert [len(read_starts(run_dir / f"point-{point}")) for point in (1, 2, 3)] == [1, 1, 2]
    assert "point-3" in (run_dir / "point-3" / "events").read_text()


def test_a_job_of_a_chain_hands_over_to_the_next(slurm: SlurmCluster, tmp_path: Path):
    run_dir = tmp_path / "run"
    job = batch_job(run_dir)
    script = write_run(job, "75", "0")
    first = submit_script(script, job, None, environment=slurm.environment)
    second = submit_script(script, job, None, after=first, environment=slurm.environment)
    (run_dir / CHAIN_FILE).write_text(f"{first}\n{second}\n")
    assert slurm.wait_for(first, "COMPLETED").restarts == 0
    assert slurm.wait_for(second, "COMPLETED").restarts == 0
    assert read_events(run_dir) == [FRESH, FRESH]
    assert f"job {second} continues" in read_output(run_dir)


def test_a_container_runs_on_every_node_with_its_rank_and_head(slurm: SlurmCluster, tmp_path: Path):
    """A stand-in for apptainer says how it was called, then runs the program where it is."""
    run_dir, image = tmp_path / "run", str(tmp_path / "my image.sif")
    container = container_of(image, folders=[str(tmp_path)], has_pyxis=False)
    job = batch_job(run_dir, container=container, num_nodes=2, requeue=False)
    script = write_run(job, "told", "told", "0", "0")
    write_program(run_dir / "bin" / "apptainer", '#!/bin/sh\nprintf "<%s>" "$@"\necho\nshift 7\nexec "$@"\n')
    path = f"{run_dir / 'bin'}:{slurm.environment['PATH']}"
    first = slurm.submit(script, PATH=path)
    slurm.wait_until(lambda: len(read_events(run_dir)) == 2, "both nodes started")
    slurm.run("scancel", "--batch", "--signal=USR1", first)
    slurm.wait_for(next_job(slurm, run_dir, 2), "COMPLETED")
    assert read_output(run_dir).count(f"<exec><--nv><--bind><{tmp_path}:{tmp_path}><--pwd><{tmp_path}><{image}>") == 4
    lines = (run_dir / "events").read_text().splitlines()
    port = 20000 + int(first) % 10000
    for rank in (0, 1):
        assert any(line.endswith(f"--nodes 2 --node-rank {rank} --head n1:{port}") for line in lines[:2])
    assert lines.count("told") == 2 and len(lines) == 6
