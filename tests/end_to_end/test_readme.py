"""The command blocks of the README run as printed, in order, in a clean shell with a home of its own.

The first, which installs, runs in the long test alone.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from printed_page import blocks_of, place_with_hub, run_block
from slurm_cluster import SlurmCluster
from workplace_factory import Workplace, read_metrics, write_chats

ROOT = Path(__file__).parents[2]
BLOCKS = blocks_of(ROOT / "README.md")
INSTALLATION, PLANS, OWN_DATA, CLUSTER, PYTHON = BLOCKS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with place_with_hub(tmp_path_factory.mktemp("readme")) as made:
        write_chats(made.folder / "chats.jsonl", 200)
        yield made


def test_every_block_is_run() -> None:
    assert [language for language, _ in BLOCKS] == ["bash", "bash", "bash", "bash", "python"]
    assert INSTALLATION.text.splitlines()[0] == "make train"


def test_plans_need_no_job_file_and_no_network(place: Workplace) -> None:
    nowhere = place._replace(environment=place.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    shown = run_block(nowhere, PLANS)
    assert "QLoRA of llama (8.03B) on 1 x RTX-4060-8GB: fits" in shown and "8 x H100-SXM5-80GB: fits" in shown


def test_own_chats_become_a_model_to_chat_with_and_a_folder(place: Workplace) -> None:
    run_block(place, OWN_DATA)
    assert len(read_metrics(place.folder / "runs" / "mine")) >= 100
    assert (place.folder / "my-model" / "model.safetensors").is_file()


def test_python_plans_the_job_of_the_block_before(place: Workplace) -> None:
    assert re.fullmatch(r"none/[\w-]+/\w+ \d+\.\d+\n", run_block(place, PYTHON))


def test_the_job_is_planned_for_a_partition_and_its_script_printed(place: Workplace, slurm: SlurmCluster) -> None:
    names = ("PATH", "SLURM_CONF")
    here = Path(sys.executable).parent
    login = {name: slurm.environment[name] for name in names}
    shown = run_block(
        place._replace(environment=place.environment | login | {"PATH": f"{here}:{login['PATH']}"}), CLUSTER
    )
    assert "\n#SBATCH --partition=h100\n" in shown and "\n#SBATCH --nodes=2\n" in shown


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.timeout(3600)
def test_a_clone_installs_and_runs_every_block_in_one_empty_shell(
    place: Workplace, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """No cache, and no variable but those that name the hub and the cluster of this test, and this machine's index."""
    clone = tmp_path / "shardwise"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    shutil.copy(place.folder / "chats.jsonl", clone)
    own = str(Path(sys.executable).parent)
    path, path_to_slurm = (
        ":".join(folder for folder in text.split(":") if folder != own)
        for text in (place.environment["PATH"], slurm.environment["PATH"])
    )
    environment = {"HOME": str(tmp_path / "home"), "PATH": path}
    environment |= {name: place.environment[name] for name in ("HF_ENDPOINT", "HF_HUB_DISABLE_XET")}
    environment |= {name: value for name, value in place.environment.items() if name.startswith("PIP_")}
    blocks = [text if language == "bash" else f"python - <<'END'\n{text}END\n" for language, text in BLOCKS]
    login = f'export PATH="$VIRTUAL_ENV/bin:{path_to_slurm}" SLURM_CONF={slurm.environment["SLURM_CONF"]}'
    # Before that, this is no login node, on which `train` would refuse to train.
    blocks.insert(BLOCKS.index(CLUSTER), login)
    answer = subprocess.run(
        ["sh", "-ec", "\n".join(blocks)],
        cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for fact in (r"finished at step \d+", "8 x H100-SXM5-80GB: fits", "#SBATCH --nodes=2", r"none/[\w-]+/\w+ \d+\.\d+"):
        assert re.search(fact, answer.stdout), answer.stdout
    assert (clone / "my-model" / "model.safetensors").is_file()
