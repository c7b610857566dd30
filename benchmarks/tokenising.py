"""Conversations per second from a file of chats to rows on disk, compared with only `datasets.map` on the same file.

shardwise reads, checks, splits by hash, renders, tokenises with a mask, packs and writes; `datasets` loads the JSON
lines and maps transformers' `apply_chat_template` over them, without a mask, a split or rows. Both start cold, with an
empty cache, on all cores, in separate processes, alternating.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_CHATS, ROUNDS, SEQ_LEN = 20_000, 3, 2048
_MAP = """
import os, sys
from datasets import load_dataset
from transformers import AutoTokenizer

chats, folder, template, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = open(template).read()
rows = load_dataset("json", data_files=chats, split="train", cache_dir=cache)
rows = rows.map(
    lambda batch: tokenizer.apply_chat_template(batch["messages"], return_dict=True),
    batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=rows.column_names,
)
assert len(rows) == {num_chats}, len(rows)
"""
_PREPARE = """
import sys
from pathlib import Path
from shardwise.launch.inputs.data_files import list_files
from shardwise.launch.inputs.prepare_data import prepare_data
from shardwise.trainer.spec.data.profile import PrepareRequest
from shardwise.trainer.spec import codec

request = list_files(codec.read(Path(sys.argv[1]), PrepareRequest))
profile = prepare_data(request, on_progress=lambda _: None)
assert profile.num_documents + profile.num_eval_rows >= {num_chats} * 0.98
"""


def bench_tokenising() -> list[dict[str, object]]:
    """Chats per second of each, and the ratio of ours to the other's in the same round."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        chats = folder / "chats.jsonl"
        _write_chats(chats)
        tokenizer = _make_tokenizer(folder, chats)
        rates: dict[str, list[float]] = {"datasets.map": [], "shardwise": []}
        for number in range(ROUNDS):
            cache = folder / f"cache-{number}"
            template = ROOT / "trainer" / "runtime" / "data" / "chat" / "templates" / "chatml.jinja"
            argv = ["-c", _MAP.replace("{num_chats}", str(NUM_CHATS)), chats, tokenizer, template, cache / "datasets"]
            rates["datasets.map"].append(NUM_CHATS / _seconds(argv))
            request = _write_request(folder / f"request-{number}.json", chats, tokenizer, cache / "shardwise")
            argv = ["-c", _PREPARE.replace("{num_chats}", str(NUM_CHATS)), request]
            rates["shardwise"].append(NUM_CHATS / _seconds(argv))
    ratios = [own / other for own, other in zip(rates["shardwise"], rates["datasets.map"], strict=True)]
    return [
        {
            "by": name,
            "chats_per_s": round(statistics.median(found)),
            "of_datasets_map": round(statistics.median(ratios), 2) if name == "shardwise" else 1.0,
        }
        for name, found in rates.items()
    ]


def _seconds(argv: list[object]) -> float:
    started = time.perf_counter()
    quiet = os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{argv[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return time.perf_counter() - started


def _write_chats(path: Path) -> None:
    """Conversations of two to eight turns over a small vocabulary, the same in every run."""
    draw = random.Random(0)
    words = [line.split()[0] for line in (ROOT / "README.md").read_text().splitlines() if line.split()]

    def say(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    with path.open("w") as stream:
        for _ in range(NUM_CHATS):
            turns = [
                {"role": role, "content": say(5, 60)}
                for _ in range(draw.randint(1, 4))
                for role in ("user", "assistant")
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")


def _make_tokenizer(folder: Path, chats: Path) -> Path:
    from tokenizers import AddedToken

    from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer

    trained = train_tokenizer(chats.read_text().splitlines()[:2000], vocab_size=4096)
    trained.tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    write_trained_tokenizer(trained, folder / "tokenizer")
    return folder / "tokenizer"


def _write_request(path: Path, chats: Path, tokenizer: Path, cache: Path) -> Path:
    from shardwise.launch.inputs.model_files import read_preset
    from shardwise.launch.plan.gather import make_request
    from shardwise.trainer.spec import codec
    from shardwise.trainer.spec.job.reading import read_job
    from shardwise.trainer.spec.model.readers import read_model_shape

    job = read_job(
        {
            "model": {"config": "tiny-llama", "tokenizer": str(tokenizer)},
            "data": {"train": str(chats), "eval": "1%", "format": "chat", "chat_template": "chatml"},
            "train": {"seq_len": SEQ_LEN},
        },
        origin="benchmark",
    )
    config = read_preset("tiny-llama") | {"vocab_size": 8192}
    shape = read_model_shape(config, origin="benchmark")
    codec.write(path, make_request(job, shape=shape, tokenizer_path=str(tokenizer), cache_root=cache))
    return path
