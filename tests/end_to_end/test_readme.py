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
from export_factory import write_base
from hub_server import Hub, serving
from slurm_cluster import SlurmCluster
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace, make_workplace, read_metrics, write_chats

from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
INSTALLATION, PLANS, OWN_DATA, CLUSTER, PYTHON = range(5)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder with chats, the commands of this environment on the path, and a hub that has the model."""
    made = make_workplace(tmp_path_factory.mktemp("readme"))
    made.job.unlink()
    write_chats(made.folder / "chats.jsonl", 200)
    folder = tmp_path_factory.mktemp("hub") / "model"
    write_trained_tokenizer(train_tokenizer(iter(SENTENCES), vocab_size=TINY_CONFIG["vocab_size"]), folder)
    write_base(folder, TINY_CONFIG)
    with serving(Hub(files={MODEL: {path.name: path.read_bytes() for path in folder.iterdir()}})) as hub:
        given = {name: value for name, value in made.environment.items() if "PROXY" not in name.upper()}
        path = f"{Path(sys.executable).parent}:{given['PATH']}"
        yield made._replace(environment=given | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PATH": path})


def run_block(place: Workplace, number: int) -> str:
    """What the commands print; fails with the first of them."""
    answer = subprocess.run(
        ["sh", "-ec", BLOCKS[number][1]],
        cwd=place.folder, env=place.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_every_block_is_run() -> None:
    assert [language for language, _ in BLOCKS] == ["bash", "bash", "bash", "bash", "python"]
    assert BLOCKS[INSTALLATION][1].splitlines()[0] == "make train"


def test_plans_need_no_job_file_and_no_network(place: Workplace) -> None:
    nowhere = place._replace(environment=place.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    shown = run_block(nowhere, PLANS)
    assert "QLoRA of llama (8.03B) on 1 x RTX-4060-8GB: fits" in shown and "8 x H100-SXM5-80GB: fits" in shown


def test_own_chats_become_a_model_to_chat_with_and_a_folder(place: Workplace) -> None:
    run_block(place, OWN_DATA)
    assert len(read_metrics(place.folder / "runs" / "mine")) >= 100
    assert (place.folder / "my-model" / "model.safetensors").is_file()


def test_python_plans_the_job_of_the_block_before(place: Workplace) -> None:
    answer = subprocess.run(
        [sys.executable, "-P", "-c", BLOCKS[PYTHON][1]],
        cwd=place.folder, env=place.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.fullmatch(r"none/[\w-]+/\w+ \d+\.\d+\n", answer.stdout)


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
    blocks.insert(CLUSTER, login)  # before that, this is no login node, on which `train` would refuse to train
    answer = subprocess.run(
        ["sh", "-ec", "\n".join(blocks)],
        cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for fact in (r"finished at step \d+", "8 x H100-SXM5-80GB: fits", "#SBATCH --nodes=2", r"none/[\w-]+/\w+ \d+\.\d+"):
        assert re.search(fact, answer.stdout), answer.stdout
    assert (clone / "my-model" / "model.safetensors").is_file()
