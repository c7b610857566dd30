"""A job small enough to train for real in seconds, in a home of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from durations import CPU_SECONDS

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
OF_OTHERS = ("SLURM", "XDG", "SHARDWISE")  # variables that a workplace does not inherit
LIMIT_S = 600.0  # of a command, also where other work keeps every core busy
SENTENCES = ("the cat sat on the mat", "a dog ran over the hill", "we plan before we train", "memory is a budget")


class Workplace(NamedTuple):
    folder: Path
    environment: dict[str, str]

    @property
    def job(self) -> Path:
        return self.folder / "job.yaml"

    def write_job(self, **sections: object) -> None:
        job: dict[str, Any] = {
            "model": {"config": "model", "tokenizer": "train"},
            "data": {"train": "text", "eval": "20%"},
            "train": {"seq_len": 32, "tokens_per_step": 256, "steps": 8, "lr": 3e-3},
            "checkpoint": {"every": "3 steps"},
            "output": "runs/tiny",
        }
        for name, section in sections.items():
            before = job.get(name)
            job[name] = {**before, **section} if isinstance(before, dict) and isinstance(section, dict) else section
        self.job.write_text(yaml.safe_dump(job))

    def command(self, *words: str | Path) -> list[str]:
        return [sys.executable, "-P", "-m", "shardwise.launch.cli", *map(str, words)]

    def by_hand(self, attempt: Path) -> list[str]:
        files = (attempt / "accelerate.yaml", "-m", "shardwise.trainer", attempt / "plan.json")
        return [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", *map(str, files)]

    def run(self, *words: str | Path, check: bool = True, timeout: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        return self.execute(*self.command(*words), check=check, timeout=timeout)

    def execute(
        self, *argv: str | Path, check: bool = False, timeout: float = LIMIT_S, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Any program, with `text` on its standard input."""
        answer = subprocess.run(
            list(map(str, argv)), cwd=self.folder, env=self.environment, input=text, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        if check and answer.returncode != 0:
            raise AssertionError(f"exit code {answer.returncode}\n{answer.stdout}\n{answer.stderr}")
        return answer

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def only_run(self) -> Path:
        (run_dir,) = sorted((self.folder / "runs").iterdir())
        return run_dir


def wait_for(condition: Callable[[], object], what: str, process: subprocess.Popen[Any] | None = None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        assert process is None or process.poll() is None, f"ended before {what}"
        time.sleep(0.02)


def read_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {int(row["step"]): row for row in rows}


def make_workplace(folder: Path) -> Workplace:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(TINY_CONFIG))
    (folder / "text").mkdir()
    for number in range(40):
        lines = [f"{SENTENCES[(number + line) % 4]} {number * line % 7}" for line in range(40)]
        (folder / "text" / f"{number:02d}.txt").write_text("\n".join(lines))
    environment = {
        **{name: value for name, value in os.environ.items() if name == CPU_SECONDS or not name.startswith(OF_OTHERS)},
        "HOME": str(folder / "home"),
        "SHARDWISE_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    workplace = Workplace(folder, environment)
    workplace.write_job()
    return workplace


_THINGS = ("cat", "dog", "hill", "mat", "plan", "train", "memory", "budget")


def write_chats(path: Path, number: int) -> None:
    with path.open("w") as stream:
        for count in range(number):
            thing, other = _THINGS[count % 8], _THINGS[count // 8 % 8]
            messages = [
                {"role": "user", "content": f"where is the {thing}"},
                {"role": "assistant", "content": f"the {thing} is near the {other}"},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
