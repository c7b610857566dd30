"""What trainers are compared on: one model, one way to train it, one global batch; and all that a trainer is told.

Every trainer starts from the same folder of drawn weights and takes the same rows in the same order, the one in which
shardwise takes them. Rows are full, so that nobody pads.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.models import model_config
from trainer.spec.errors import InputError
from trainer.spec.value import Value

SEED = 0
LORA_RANK, LORA_ALPHA = 16, 32
BETAS = (0.9, 0.95)  # those of shardwise
TINY_STEPS = 8


class Contest(Value, frozen=True, kw_only=True):
    """One comparison; its name is its own."""

    name: str
    model: str  # a preset of trainer/presets
    method: str = "full"  # full, lora, qlora
    precision: str = "bf16"  # weights, state and computation; bf16-mixed: autocast, what is frozen in bf16
    checkpointing: str = "none"  # or full
    seq_len: int = 2048
    micro_batch: int = 4
    accumulation: int = 1
    lr: float = 1e-5
    num_steps: int = 16
    rounds: int = 1  # A B C, A B C: how often each runs from start to end
    takes_turns: bool = False  # then moreover step by step, where all fit on the card at once
    expected_s: float = 100.0  # of one trainer on a GPU, from start to end


CONTESTS = (
    Contest(
        name="1B, all parameters",
        model="llama-3.2-1b",
        accumulation=2,
        num_steps=24,
        takes_turns=True,
    ),
    Contest(
        name="8B, LoRA",
        model="llama-3.1-8b",
        method="lora",
        precision="bf16-mixed",
        checkpointing="full",
        lr=1e-4,
        num_steps=12,
        rounds=2,
        expected_s=180.0,
    ),
    Contest(
        name="8B, QLoRA",
        model="llama-3.1-8b",
        method="qlora",
        precision="bf16-mixed",
        checkpointing="full",
        lr=1e-4,
        num_steps=12,
        rounds=2,
        expected_s=180.0,
    ),
)


class PeerJob(NamedTuple):
    """What a trainer is told: paths of this machine, and the contest in numbers."""

    contest: Contest
    seq_len: int
    num_steps: int
    model: Path  # with weights
    model_with_tokenizer: Path  # the same weights, and a tokenizer, which most trainers insist on
    rows: Path  # lines of {"input_ids": [...], "labels": [...], "attention_mask": [...]}, in their order
    own_rows: Path  # as shardwise is given them: it makes the order itself
    folder: Path  # where the files of a trainer and what it writes go
    is_cuda: bool

    @property
    def sequences_per_step(self) -> int:
        return self.contest.micro_batch * self.contest.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len


def peer_job(bench: Bench, contest: Contest, folder: Path) -> PeerJob:
    """Makes model, tokenizer and rows where they are not there yet."""
    num_steps = TINY_STEPS if bench.is_tiny else contest.num_steps
    case = Case(
        name=contest.name,
        model=contest.model,
        seq_len=contest.seq_len,
        micro_batch=contest.micro_batch,
        accumulation=contest.accumulation,
        num_steps=num_steps,
    )
    seq_len, model = bench.seq_len_of(case), bench.model_of(contest.model)
    drawn = bench.rows_of(contest.model, seq_len, num_steps * case.sequences_per_step)
    folder.mkdir(parents=True, exist_ok=True)
    return PeerJob(
        contest=contest,
        seq_len=seq_len,
        num_steps=num_steps,
        model=model,
        model_with_tokenizer=_with_tokenizer(
            model, int(model_config(contest.model, is_tiny=bench.is_tiny)["vocab_size"])
        ),
        rows=_ordered_rows(bench, case, drawn),
        own_rows=drawn,
        folder=folder,
        is_cuda=bool(bench.hardware.gpus),
    )


def _with_tokenizer(model: Path, vocab_size: int) -> Path:
    """A folder beside the model's with links to its files and a tokenizer of one word a token: `t17` is token 17."""
    folder = model.with_name(f"{model.name}-with-tokenizer")
    if folder.is_dir():
        return folder
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file in model.iterdir():
        (partial / file.name).symlink_to(file)
    words = {f"t{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(partial)
    partial.rename(folder)
    return folder


def _ordered_rows(bench: Bench, case: Case, drawn: Path) -> Path:
    """The rows of `drawn` in the order in which shardwise takes them."""
    path = drawn.with_name(f"{drawn.stem}-by-{case.sequences_per_step}.jsonl")
    if path.is_file():
        return path
    numbers = list(_order(bench, case, drawn))
    lines = [json.loads(line)["input_ids"] for line in drawn.read_text().splitlines()]
    partial = path.with_suffix(".partial")
    with partial.open("w") as stream:
        for ids in (lines[number] for number in numbers):
            row: dict[str, Any] = {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}
            stream.write(json.dumps(row) + "\n")
    partial.rename(path)
    return path


def _order(bench: Bench, case: Case, drawn: Path) -> Iterator[int]:
    """Line numbers of `drawn`; InputError where the prepared rows are not those."""
    from trainer.runtime.token_rows import TokenRows

    case = replace(case, settings=data_of(drawn))
    _, profile = bench.inputs_of(case)
    assert profile.cache_dir is not None
    rows = TokenRows.open(Path(profile.cache_dir), "train")
    lines = {tuple(json.loads(line)["input_ids"]): number for number, line in enumerate(drawn.open())}
    order = rows.order(seed=SEED, sequences_per_step=case.sequences_per_step)
    for step in range(case.num_steps):
        for number in order.rows_of_step(step):
            found = lines.get(tuple(rows.row(number).tolist()))
            if found is None:
                raise InputError(f"{drawn.name}: row {number} of the prepared data is none of its lines")
            yield found


def data_of(rows: Path) -> dict[str, str]:
    """The settings of a job that learns these rows."""
    return {"data.train": str(rows), "data.format": "tokens", "data.eval": "none"}
