"""Tokens per second of the same model on the same rows with shardwise and other trainers, on this machine's CPU.

Each trainer is a separate process; they alternate step by step, A B C D, B C D A, ..., while the others wait, so that
load on the machine affects all alike. A step counts from the release of a process to the end of its step, including
everything that the trainer does in between; the first SKIPPED are omitted. All use the same config and the rows that
shardwise prepared, with AdamW, gradient clipping and a cosine schedule; all other settings are each trainer's defaults.

    bare         a loop of a dozen lines: transformers' model with its own loss, torch's AdamW
    shardwise    `shardwise train` with the planner's choice of optimizer and loss head
    transformers Trainer
    trl          SFTTrainer
"""

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("bare", "shardwise", "transformers", "trl")
NUM_STEPS, SKIPPED = 60, 12
LONGEST_TURN_S = 300.0  # starting included
ROWS, SEQ_LEN = 4, 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LEAST_SHARE = 0.98  # of the bare loop
# Called at the end of a step in each process: reports the duration of the step, and waits for the next turn. The pipes
# are opened at the first step, so that loading this file alone reads nothing from them.
_CLOCK = """
import time

_pipes = []
_released_at = None

def on_step(step, metrics):
    global _released_at
    if not _pipes:
        _pipes.extend((open({turn!r}), open({ended!r}, "w")))
    seconds = time.perf_counter() - (_released_at or time.perf_counter())
    print(seconds, file=_pipes[1], flush=True)
    _pipes[0].readline()
    _released_at = time.perf_counter()
"""


def bench_trainers() -> list[dict[str, object]]:
    """Median tokens per second of each, and the median ratio to the bare loop over the turns."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        cache = _prepared(folder)
        runs = {trainer: stack.enter_context(_Run(trainer, folder, cache)) for trainer in TRAINERS}
        for run in runs.values():
            run.wait()
        seconds: dict[str, list[float]] = {trainer: [] for trainer in TRAINERS}
        for number in range(1, NUM_STEPS):
            first = number % len(TRAINERS)
            for trainer in TRAINERS[first:] + TRAINERS[:first]:
                runs[trainer].release()
                seconds[trainer].append(runs[trainer].wait())
    rows = []
    for trainer, found in seconds.items():
        counted, bare = found[SKIPPED - 1 :], seconds["bare"][SKIPPED - 1 :]
        share = statistics.median(other / own for own, other in zip(counted, bare, strict=True))
        has_target = trainer == "shardwise"
        rows.append({
            "trainer": trainer,
            "tokens_per_s": round(ROWS * SEQ_LEN / statistics.median(counted)),
            "of_bare_loop": round(share, 3),
            "target": f"at least {LEAST_SHARE}" if has_target else "",
            "verdict": "" if not has_target else "met" if share >= LEAST_SHARE else "MISSED",
        })  # fmt: skip
    return rows


class _Run:
    """A process that trains one step each time it is released."""

    def __init__(self, trainer: str, folder: Path, cache: str) -> None:
        self._trainer = trainer
        out = folder / trainer
        out.mkdir()
        turn, ended = out / "turn", out / "ended"
        os.mkfifo(turn)
        os.mkfifo(ended)
        (out / "clock.py").write_text(_CLOCK.format(turn=str(turn), ended=str(ended)))
        self._turn, self._ended = (os.open(path, os.O_RDWR) for path in (turn, ended))  # does not block
        if trainer == "shardwise":
            (out / "job.yaml").write_text("{}\n")
            command = [
                sys.executable,
                "-P",
                "-m",
                "shardwise.launch.cli",
                "train",
                str(out / "job.yaml"),
                *_job(folder, out),
            ]
            command += ["--run-dir", str(out / "run")]
        else:
            command = [sys.executable, __file__, trainer, cache, str(out)]
        self._log = (out / "log.txt").open("w+b")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "ignore"}, stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._turn, b"\n" * NUM_STEPS)  # releases all remaining steps
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for descriptor in (self._turn, self._ended):
            os.close(descriptor)
        self._log.close()

    def release(self) -> None:
        """Starts the next step."""
        os.write(self._turn, b"\n")

    def wait(self) -> float:
        """Seconds of the step that ends; SystemExit if none does."""
        give_up_at = time.monotonic() + LONGEST_TURN_S
        while not select.select([self._ended], [], [], 1.0)[0]:
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self._log.seek(0)
                output = self._log.read()[-2000:].decode(errors="replace")
                raise SystemExit(f"{self._trainer} does not train ({self._process.poll()}):\n{output}")
        return float(os.read(self._ended, 64))


def _job(folder: Path, out: Path) -> list[str]:
    """The settings of the job, as key=value."""
    return [
        f"model.config={folder / 'model.json'}", "model.tokenizer=train", "data.train=python-stdlib", "data.eval=none",
        f"train.seq_len={SEQ_LEN}", f"train.tokens_per_step={ROWS * SEQ_LEN}", f"train.steps={NUM_STEPS}",
        "train.lr=1e-3", "checkpoint.every=1000 steps", f"pin.micro_batch={ROWS}", "pin.sharding=none",
        "pin.precision=fp32", f"extensions={out / 'clock.py'}",
    ]  # fmt: skip


def _prepared(folder: Path) -> str:
    """The folder of the rows of all trainers."""
    from shardwise.launch.inputs.prepare_data import prepare_data
    from shardwise.launch.plan.gather import read_inputs

    (folder / "model.json").write_text(json.dumps(MODEL))
    overrides = [setting for setting in _job(folder, folder) if not setting.startswith("extensions")]
    inputs = read_inputs(None, overrides)
    profile = prepare_data(inputs.request, on_progress=lambda _: None)
    assert profile.cache_dir is not None
    return profile.cache_dir


def _batches(cache: str) -> list[list[list[int]]]:
    """The rows of every step, as lists of ids; full rows only, so that no trainer pads."""
    from shardwise.trainer.runtime.data.cache import TokenRows

    rows = TokenRows.open(Path(cache), "train")
    full = [number for number in range(len(rows)) if rows.length(number) == SEQ_LEN][: NUM_STEPS * ROWS]
    ids = [rows.row(number).tolist() for number in full]
    return [ids[start : start + ROWS] for start in range(0, len(ids), ROWS)]


def _model() -> "PreTrainedModel":
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    return model


def _on_step(out: Path) -> Callable[..., None]:
    """The `on_step` of the clock in this folder."""
    names: dict[str, Callable[..., None]] = {}
    exec((out / "clock.py").read_text(), names)  # written above
    return names["on_step"]


def run_bare(cache: str, out: Path) -> None:
    """A training loop written by hand."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    model = _model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, NUM_STEPS)
    on_step = _on_step(out)
    for step, batch in enumerate(_batches(cache), start=1):
        ids = torch.tensor(batch)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step, {"loss": float(loss)})


def run_trainer(name: str, cache: str, out: Path) -> None:
    """transformers' Trainer, or TRL's SFTTrainer on top of it."""
    from datasets import Dataset
    from transformers import TrainerCallback

    on_step = _on_step(out)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            on_step(0, {})

    ids = [row for batch in _batches(cache) for row in batch]
    settings: dict[str, Any] = {
        "output_dir": str(out / "out"),
        "per_device_train_batch_size": ROWS,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
    }
    if name == "transformers":
        from transformers import Trainer, TrainingArguments, default_data_collator

        rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = Trainer(
            model=_model(),
            args=TrainingArguments(**settings),
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[Clock()],
        )
    else:
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(
            model=_model(),
            args=SFTConfig(**settings, max_length=SEQ_LEN, dataset_kwargs={"skip_prepare_dataset": True}),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=AutoTokenizer.from_pretrained(str(Path(cache) / "tokenizer")),
            callbacks=[Clock()],
        )
    trainer.train()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _, chosen, cache_dir, out_dir = sys.argv
    if chosen == "bare":
        run_bare(cache_dir, Path(out_dir))
    else:
        run_trainer(chosen, cache_dir, Path(out_dir))
