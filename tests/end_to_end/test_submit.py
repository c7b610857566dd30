"""`shardwise submit` on a login node of a real Slurm: the script, the run directory, the queue, and every refusal."""

import json
from pathlib import Path

import pytest
import yaml
from slurm_cluster import SlurmCluster
from small_disk import mounted_disk
from workplace_factory import Workplace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.messages.submission import Submission

HELD = "slurm.extra=[--hold]"


@pytest.fixture
def login(workplace: Workplace, slurm: SlurmCluster) -> Workplace:
    names = ("PATH", "SLURM_CONF")
    return workplace._replace(environment=workplace.environment | {name: slurm.environment[name] for name in names})


def beside(place: Workplace, path: str, **programs: str) -> Workplace:
    folder = place.folder / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return place._replace(environment={**place.environment, "PATH": f"{folder}:{path}"})


def refused(place: Workplace, *words: str) -> str:
    answer = place.run("submit", "job.yaml", *words, check=False)
    assert answer.returncode in (2, 4), answer.stdout + answer.stderr
    assert not list(place.folder.glob("runs/*")), "nothing is left behind"
    return answer.stderr.removeprefix("shardwise: ")


def test_a_dry_run_prints_a_script_that_slurm_takes_and_leaves_nothing(login: Workplace, slurm: SlurmCluster):
    """A flag goes over the job file, which goes over a person's defaults."""
    settings = login.folder / "home" / ".config" / "shardwise" / "config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("slurm: {account: person, qos: person, mail: a@person.org, modules: [cuda]}\n")
    login.write_job(slurm={"account": "job", "qos": "normal"})
    words = ("--dry-run", "--partition", "h100", "--nodes", "4", "--constraint", "ib", "--account", "flag: {a}")
    answer = login.run("submit", "job.yaml", *words)
    assert "using 384 processors on nodes c[1-4] in partition h100" in answer.stderr
    lines = answer.stdout.splitlines()
    expected = (
        "--job-name=tiny", "--partition=h100", '--account="flag: {a}"', "--qos=normal", "--mail-user=a@person.org",
        "--constraint=ib", "--nodes=4", "--exclusive", "--gpus-per-node=h100:8", "--mem=0", "--time=00:20:00",
        "--signal=B:USR1@120",
    )  # fmt: skip
    assert lines[0] == "#!/bin/bash -l" and "module load cuda" in answer.stdout, "modules need a login shell"
    assert "4 nodes of 8 x H100" in lines[1]
    assert [option for option in expected if f"#SBATCH {option}" not in lines] == []
    assert not (login.folder / "runs").exists()
    assert not slurm.run("squeue", "--noheader").stdout


def test_a_login_node_gets_the_submit_line_instead_of_a_run(login: Workplace):
    answer = login.run("train", "job.yaml", "train.steps=2", check=False)
    assert answer.returncode == 4
    (line,) = [line for line in answer.stderr.splitlines() if line.strip().startswith("shardwise submit")]
    assert line.split() == ["shardwise", "submit", "job.yaml", "train.steps=2"]
    assert not (login.folder / "runs").exists()
    login.run("train", "job.yaml", "train.steps=2", "--here")
    assert login.only_run().is_dir()


def test_a_part_of_a_node_is_asked_for_as_it_is_planned(login: Workplace):
    words = ("--partition", "h100", "--gpus-per-node", "2", "--dry-run")
    script = login.run("submit", "job.yaml", *words).stdout
    assert "#SBATCH --gpus-per-node=h100:2\n" in script and "2 x H100" in script
    assert "#SBATCH --cpus-per-task=24\n" in script and "#SBATCH --mem=250000M\n" in script
    assert "--exclusive" not in script
    script = login.run("submit", "job.yaml", *words, "slurm.cores=4", "slurm.memory=64GiB").stdout
    assert "#SBATCH --cpus-per-task=4\n" in script and "#SBATCH --mem=65536M\n" in script


def test_a_submission_is_a_run_directory_and_a_job(login: Workplace, slurm: SlurmCluster):
    answer = login.run("submit", "job.yaml", HELD, "--nodes", "2", "--hardware", "2xCPU", "--time", "1:00:00")
    run_dir = login.only_run()
    written = {path.name for path in run_dir.iterdir()}
    assert written == {"job.yaml", "hardware.json", "submission.json", "train.sbatch"}
    submission = codec.read(run_dir / "submission.json", Submission)
    (job_id,) = submission.job_ids
    assert f"job {job_id}" in answer.stdout and "2 nodes of 2 ranks" in answer.stdout
    assert f"  shardwise status '{run_dir}'" in answer.stdout
    hardware = codec.read(run_dir / "hardware.json", Hardware)
    assert hardware == submission.hardware and (hardware.num_nodes, hardware.num_cpu_devices) == (2, 2)
    assert (submission.partition, submission.time_limit_s) == ("cpu", 3600)
    assert yaml.safe_load((run_dir / "job.yaml").read_text())["slurm"]["time"] == "1:00:00"
    shown = slurm.job(job_id).text
    assert "JobName=tiny " in shown and f"Command={run_dir}/train.sbatch " in shown
    assert f"WorkDir={login.folder} " in shown and "TimeLimit=01:00:00" in shown and "NumNodes=2-2" in shown
    plain = slurm.run("sbatch", "--test-only", run_dir / "train.sbatch")
    assert "on nodes n[1-2]" in plain.stderr, "plain sbatch takes it again"


def test_a_sweep_is_one_array_with_a_folder_for_each_point(login: Workplace, slurm: SlurmCluster):
    words = ("--sweep", "train.lr=1e-4,3e-4", "--sweep", "train.seed=0,1", HELD, "--json", "--run-dir", "sweep")
    answer = json.loads(login.run("submit", "job.yaml", *words).stdout)
    (array,) = answer["job_ids"]
    assert [point["job_id"] for point in answer["points"]] == [f"{array}_{number}" for number in (1, 2, 3, 4)]
    third = Path(answer["points"][2]["run_dir"])
    assert third == login.folder / "sweep" / "point-3"
    job = yaml.safe_load((third / "job.yaml").read_text())
    assert (job["train"]["lr"], job["train"]["seed"]) == (3e-4, 0)
    submission = codec.read(third / "submission.json", Submission)
    assert submission.job_ids == (f"{array}_3",) and submission.overrides == ("train.lr=3e-4", "train.seed=0")
    assert not (third / "train.sbatch").exists() and (login.folder / "sweep" / "train.sbatch").exists()
    assert "ArrayTaskId=1-4 " in slurm.run("scontrol", "-o", "show", "job", array).stdout


def test_a_chain_is_jobs_that_wait_for_each_other(login: Workplace, slurm: SlurmCluster):
    login.run("submit", "job.yaml", "--chain", "3", HELD)
    run_dir = login.only_run()
    ids = codec.read(run_dir / "submission.json", Submission).job_ids
    assert (run_dir / "chain.txt").read_text().split() == list(ids) and len(ids) == 3
    awaited = ("Dependency=(null)", f"Dependency=afterany:{ids[0]}", f"Dependency=afterany:{ids[1]}")
    assert all(words in slurm.job(job_id).text for job_id, words in zip(ids, awaited, strict=True))


def test_a_limit_that_only_the_real_submission_meets_leaves_nothing(login: Workplace, slurm: SlurmCluster):
    """As a QOS of few jobs a user does: `--test-only` does not count."""
    (real,) = slurm.run("sh", "-c", "command -v sbatch").stdout.split()
    said = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"
    sbatch = f'[ "$1" = --test-only ] && exec {real} "$@"\necho "{said}" >&2\nexit 1'
    limited = beside(login, login.environment["PATH"], sbatch=sbatch)
    assert "--nodes" in refused(limited)
    (login.folder / "mine").mkdir()
    assert "job submit limit" in refused(limited, "--run-dir", "mine")
    assert not list((login.folder / "mine").iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--partition", "nope"), "Slurm shows no such partition"),
        (("--partition", "h100", "--nodes", "9"), "gives a job 4"),
        (("--partition", "h100", "--time", "3-0"), "2-00:00:00 at most"), (("--partition", "gpu"), "gpu:8"),
        (("--sweep", "train.lr=1,2", "--chain", "2"), "exclude each other"),
        (("--qos", "a\nb"), "can hold no such character"), (("slurm.container=/nowhere/image.sif",), "is no file here"),
        (("slurm.container=org/image",), "no --container-image on this cluster"),
        (("log.notify=no-such-program",), "log.notify: there is no program"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(login: Workplace, words, says):
    assert says in refused(login, *words)


def test_what_is_not_here_is_refused_where_nodes_have_no_network(login: Workplace):
    login.write_job(model={"name": "qwen2.5-0.5b", "config": None, "tokenizer": None})
    message = refused(login, "--partition", "h100", "slurm.network=none")
    assert "Qwen/Qwen2.5-0.5B" in message and "shardwise fetch job.yaml" in message
    answer = login.run("submit", "job.yaml", "--partition", "h100", "--dry-run")
    assert "Qwen/Qwen2.5-0.5B" in answer.stderr and "HF_HUB_OFFLINE" not in answer.stdout


def test_a_file_system_without_room_is_refused(login: Workplace, tmp_path: Path):
    with mounted_disk(tmp_path / "small", "256k") as small_disk:
        message = refused(login, "--run-dir", str(small_disk / "run"))
        assert "256 KiB are free" in message and not list(small_disk.iterdir())


@pytest.mark.parametrize(
    ("programs", "fact"), [((), "sbatch"), (("sbatch", "scontrol", "sinfo", "squeue", "sacctmgr"), "lookup failed")]
)
def test_away_from_a_cluster_a_script_is_printed_for_stated_nodes(workplace: Workplace, programs, fact):
    """Programs of Slurm without a cluster are no cluster."""
    fails = "echo 'fetch_config: DNS SRV lookup failed' >&2\nexit 1"
    away = beside(workplace, "/usr/bin:/bin" if programs else "/nonexistent", **dict.fromkeys(programs, fails))
    assert fact in refused(away, *(["--dry-run"] if programs else []))
    script = away.run("submit", "job.yaml", "--dry-run", "--hardware", "4x8xH100-SXM5-80GB").stdout
    assert "#SBATCH --nodes=4\n" in script and "#SBATCH --gpus-per-node=8\n" in script
