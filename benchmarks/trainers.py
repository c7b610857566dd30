"""Tokens a second of the same model on the same rows under shardwise and under other trainers, on this machine's CPU.

Each is a process of its own, started in turn; a step counts from the end of one to the end of the next, with all that
a trainer does between them, and the first SKIPPED are left out. All start from one config and take the rows that
shardwise prepared, with AdamW, a clipped gradient and a cosine rate; what else is chosen, each trainer chooses for
itself, as a person gets it who asks for no more.

    bare         a loop of a dozen lines: transformers' model with its own loss, torch's AdamW
    shardwise    `shardwise train` with the planner's choice of optimizer and loss head
    transformers Trainer
    trl          SFTTrainer
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, SKIPPED, ROUNDS = 40, 10, 3
ROWS, SEQ_LEN = 8, 256
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LEAST_SHARE = 0.98  # of the bare loop
_CLOCK = """
import time

def on_step(step, metrics):
    with open({path!r}, "a") as stream:
        stream.write(f"{{time.monotonic()}}\\n")
"""


def bench_trainers() -> list[dict[str, object]]:
    """Median tokens a second of each, and as a share of the bare loop in the same round."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        cache = _prepared(folder)
        rates: dict[str, list[float]] = {}
        for number in range(ROUNDS):
            for trainer in ("bare", "shardwise", "transformers", "trl"):
                seconds = _step_seconds(trainer, folder / f"{trainer}-{number}", folder, cache)
                rates.setdefault(trainer, []).append(ROWS * SEQ_LEN / seconds)
    rows = []
    for trainer, found in rates.items():
        share = statistics.median(own / bare for own, bare in zip(found, rates["bare"], strict=True))
        asked = trainer == "shardwise"
        rows.append({
            "trainer": trainer,
            "tokens_per_s": round(statistics.median(found)),
            "of_bare_loop": round(share, 3),
            "asked": f"at least {LEAST_SHARE}" if asked else "",
            "verdict": "" if not asked else "met" if share >= LEAST_SHARE else "MISSED",
        })  # fmt: skip
    return rows


def _job(folder: Path, out: Path) -> list[str]:
    """The words of the job, as key=value."""
    return [
        f"model.config={folder / 'model.json'}", "model.tokenizer=train", "data.train=python-stdlib", "data.eval=none",
        f"train.seq_len={SEQ_LEN}", f"train.tokens_per_step={ROWS * SEQ_LEN}", f"train.steps={NUM_STEPS}",
        "train.lr=1e-3", "checkpoint.every=1000 steps", f"pin.micro_batch={ROWS}", "pin.sharding=none",
        "pin.precision=fp32", f"extensions={out / 'clock.py'}",
    ]  # fmt: skip


def _prepared(folder: Path) -> str:
    """The folder of the rows that all are given."""
    from launch.plan_job import read_inputs
    from launch.prepare_data import prepare_data

    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "clock.py").write_text(_CLOCK.format(path=str(folder / "unused")))
    words = [word for word in _job(folder, folder) if not word.startswith("extensions")]
    inputs = read_inputs(None, words)
    profile = prepare_data(inputs.request, on_progress=lambda _: None)
    assert profile.cache_dir is not None
    return profile.cache_dir


def _step_seconds(trainer: str, out: Path, folder: Path, cache: str) -> float:
    """Median seconds from the end of one step to the end of the next."""
    out.mkdir()
    times = out / "times.txt"
    if trainer == "shardwise":
        (out / "clock.py").write_text(_CLOCK.format(path=str(times)))
        (out / "job.yaml").write_text("{}\n")
        words = [sys.executable, "-P", "-m", "launch.cli", "train", str(out / "job.yaml"), *_job(folder, out)]
        words += ["--run-dir", str(out / "run")]
    else:
        words = [sys.executable, __file__, trainer, cache, str(times)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "ignore"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{trainer} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    ends = [float(line) for line in times.read_text().split()]
    return statistics.median(after - before for before, after in pairwise(ends[SKIPPED:]))


def _batches(cache: str) -> list[list[list[int]]]:
    """The rows of every step, as lists of ids; full rows only, so that no trainer pads."""
    from trainer.runtime.token_rows import TokenRows

    rows = TokenRows.open(Path(cache), "train")
    full = [number for number in range(len(rows)) if rows.length(number) == SEQ_LEN][: NUM_STEPS * ROWS]
    ids = [rows.row(number).tolist() for number in full]
    return [ids[start : start + ROWS] for start in range(0, len(ids), ROWS)]


def _model():  # noqa: ANN202  # transformers' own
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))


def run_bare(cache: str, times: Path) -> None:
    """What one writes by hand."""
    import time

    import torch
    from transformers import get_cosine_schedule_with_warmup

    model = _model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, NUM_STEPS)
    for batch in _batches(cache):
        ids = torch.tensor(batch)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        float(loss)
        with times.open("a") as stream:
            stream.write(f"{time.monotonic()}\n")


def run_trainer(name: str, cache: str, times: Path) -> None:
    """transformers' Trainer, or TRL's SFTTrainer on top of it."""
    import time

    from datasets import Dataset
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            with times.open("a") as stream:
                stream.write(f"{time.monotonic()}\n")

    ids = [row for batch in _batches(cache) for row in batch]
    settings = {
        "output_dir": str(times.parent / "out"),
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
    _, chosen, cache_dir, times_path = sys.argv
    if chosen == "bare":
        run_bare(cache_dir, Path(times_path))
    else:
        run_trainer(chosen, cache_dir, Path(times_path))
