"""`shardwise train` on machines that this one is not: a GPU that torch cannot use, a Slurm login node."""

import shlex
from pathlib import Path

from captured_machine import Machine, lay_out
from workplace_factory import Workplace

OLD_CARD = "NVIDIA GeForce RTX 4090, 450.36.06, 8.9"


def on(machine: Machine, place: Workplace) -> Workplace:
    path = f"{machine.programs}:{place.environment['PATH']}"
    return place._replace(environment={**place.environment, "PATH": path})


def test_a_gpu_that_torch_cannot_use_stops_with_the_remedy_and_leaves_nothing(workplace: Workplace, tmp_path: Path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    program = machine.programs / "nvidia-smi"
    rest = program.read_text().replace("#!/bin/sh\n", "")
    columns = "--query-gpu=name,driver_version,compute_cap"
    program.write_text(f'#!/bin/sh\ncase "$*" in {columns}*) echo {shlex.quote(OLD_CARD)}; exit 0 ;; esac\n{rest}')
    answer = on(machine, workplace).run("train", "job.yaml", check=False)
    assert answer.returncode == 4, answer.stdout + answer.stderr
    assert "RTX 4090" in answer.stderr and "remedy: " in answer.stderr
    assert not (workplace.folder / "runs").exists()


def test_a_login_node_gets_the_submit_line_instead_of_a_run(workplace: Workplace, tmp_path: Path):
    machine = Machine(tmp_path)
    sbatch = machine.programs / "sbatch"
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    machine.write("../etc/slurm.conf", "ClusterName=test\n")
    answer = on(machine, workplace).run("train", "job.yaml", "train.steps=2", check=False)
    assert answer.returncode == 4
    (line,) = [line for line in answer.stderr.splitlines() if line.strip().startswith("shardwise submit")]
    assert shlex.split(line) == ["shardwise", "submit", "job.yaml", "train.steps=2"]
    assert not (workplace.folder / "runs").exists()

    on(machine, workplace).run("train", "job.yaml", "train.steps=2", "--here")
    assert workplace.only_run().is_dir()
