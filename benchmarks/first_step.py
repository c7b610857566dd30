"""Processor seconds of a rank from its start to the end of its first step, compared with the libraries it imports.

The run is minimal: a Llama of two layers on one CPU rank with AdamW, nothing sharded, one thread. An extensions file
records the processor time when the rank loads it, after the imports and before the model is built, and at the end of
the first step, where it ends the process. `shardwise train` makes the plan once; the rank then starts directly from
plan.json, alternating with the other commands.

With another checkout (`--against DIR`) ranks of both alternate, A B, B A, and the ratio is the median over the rounds:
processor time increases with the load of the machine, the ratio hardly does.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 5
MOST_OF_LIBRARIES = 1.1  # times the imports of `LIBRARIES` alone
TORCH, LIBRARIES = "import torch", "import torch, accelerate, transformers.modeling_utils"
LAUNCHER = "import accelerate.commands.launch"  # the first import of a rank's launcher
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_FILE_VARIABLE = "FIRST_STEP_FILE"  # path of the marks; if unset the run continues
_MARKS = f"""
import os
import time

imported = time.process_time()

def on_step(step, metrics):
    path = os.environ.get({_FILE_VARIABLE!r})
    if path is not None:
        with open(path, "w") as marks:
            marks.write(f"{{imported}} {{time.process_time()}}")
        os._exit(0)
"""


def bench_first_step(*, against: Path | None = None) -> list[dict[str, object]]:
    """One row per part; with `against` also the time of that checkout's rank, and the ratio of the two."""
    checkouts = [ROOT] if against is None else [ROOT, against.resolve()]
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        plans = [_plan(checkout, Path(name, str(number))) for number, checkout in enumerate(checkouts)]
        alone: dict[str, list[float]] = {TORCH: [], LIBRARIES: [], LAUNCHER: []}
        ranks: list[list[tuple[float, float]]] = [[] for _ in checkouts]
        for turn in range(ROUNDS + 1):
            for code, seconds in alone.items():
                seconds.append(_seconds_of(code))
            order = range(len(checkouts)) if turn % 2 else reversed(range(len(checkouts)))
            for number in order:
                ranks[number].append(_marks(checkouts[number], plans[number]))
    counted = {code: seconds[1:] for code, seconds in alone.items()}  # the first round is a warm-up
    return _rows(counted, [marks[1:] for marks in ranks])


def _rows(alone: dict[str, list[float]], ranks: list[list[tuple[float, float]]]) -> list[dict[str, object]]:
    libraries = alone[LIBRARIES]
    parts = {
        "rank: until its imports are done": [[imported for imported, _ in marks] for marks in ranks],
        "rank: model, engine and first step": [[ended - imported for imported, ended in marks] for marks in ranks],
        "rank: start to first step": [[ended for _, ended in marks] for marks in ranks],
    }
    rows = [_row(f"python -c '{code}'", [seconds], libraries) for code, seconds in alone.items()]
    rows += [_row(part, seconds, libraries) for part, seconds in parts.items()]
    share = _ratio([ended for _, ended in ranks[0]], libraries)
    rows[-1]["target"] = f"at most {MOST_OF_LIBRARIES} of the libraries"
    rows[-1]["verdict"] = "met" if share <= MOST_OF_LIBRARIES else "MISSED"
    return rows


def _row(part: str, seconds: list[list[float]], libraries: list[float]) -> dict[str, object]:
    has_other = len(seconds) > 1
    return {
        "part": part,
        "cpu_s": round(statistics.median(seconds[0]), 2),
        "of_libraries": round(_ratio(seconds[0], libraries), 2),
        "cpu_s_other_checkout": round(statistics.median(seconds[1]), 2) if has_other else "",
        "ratio": round(_ratio(seconds[0], seconds[1]), 2) if has_other else "",
        "target": "",
        "verdict": "",
    }


def _ratio(seconds: list[float], others: list[float]) -> float:
    """The median ratio over the rounds."""
    return statistics.median(own / other for own, other in zip(seconds, others, strict=True))


def _plan(checkout: Path, folder: Path) -> Path:
    """plan.json of a finished attempt, from which a rank can be started again."""
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "marks.py").write_text(_MARKS)
    (folder / "text.txt").write_text("\n".join(f"{number} is not {number + 1}." for number in range(4000)))
    (folder / "job.yaml").write_text("{}\n")
    settings = [
        f"model.config={folder / 'model.json'}", "model.tokenizer=train", f"data.train={folder / 'text.txt'}",
        "data.eval=none", "train.seq_len=64", "train.tokens_per_step=128", "train.steps=1", "pin.micro_batch=1",
        "pin.sharding=none", f"extensions={folder / 'marks.py'}",
    ]  # fmt: skip
    argv = [sys.executable, "-P", "-m", "shardwise.launch.cli", "train", str(folder / "job.yaml"), *settings]
    environment = _environment(checkout)
    run = subprocess.run(
        [*argv, "--run-dir", str(folder / "run")], cwd=checkout, env=environment, capture_output=True, text=True
    )
    if run.returncode != 0:
        raise RuntimeError(f"{checkout}: the run that makes the plan failed:\n{run.stdout}{run.stderr}")
    attempt = folder / "run" / "attempts" / "1"
    shutil.rmtree(attempt / "pids")  # a rank ends if the launcher recorded there no longer exists
    return attempt / "plan.json"


def _marks(checkout: Path, plan: Path) -> tuple[float, float]:
    """Processor seconds of a rank after its imports, and after its first step."""
    marks = plan.with_name("marks.txt")
    argv = [sys.executable, "-P", "-m", "shardwise.trainer", str(plan), "--log-dir", str(plan.parent / "logs-again")]
    environment = _environment(checkout) | {_FILE_VARIABLE: str(marks)}
    subprocess.run(argv, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    imported, ended = map(float, marks.read_text().split())
    marks.unlink()
    return imported, ended


def _seconds_of(code: str) -> float:
    """Processor seconds of a Python that only imports."""
    program = f"{code}\nimport time\nprint(time.process_time())"
    argv = [sys.executable, "-P", "-W", "ignore", "-c", program]
    run = subprocess.run(argv, env=_environment(ROOT), check=True, capture_output=True, text=True)
    return float(run.stdout)


def _environment(checkout: Path) -> dict[str, str]:
    """One thread: on a busy machine, several OpenMP threads spend processor time waiting for each other."""
    return os.environ | {"PYTHONPATH": str(checkout), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
