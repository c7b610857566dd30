"""The schedule of a run (steps, warmup, learning rate, evaluations, checkpoints) and the widths of its rows.

Pure. All but the rate is a function of the job and the data alone: two machines of any size train the same steps. The
global batch is a number of examples (sequences, or pairs of sequences under DPO); another number is rounded to the
nearest, never below one. One epoch is the default of every objective: repeated data gains less each time, though up to
four epochs lose little (Muennighoff et al. 2023, arXiv:2305.16264).

A learning rate that the job does not set is that of the optimizer, method and size (`spec.optimizers`). DPO's rates
are published for AdamW; another optimizer uses the same share of its own fine-tuning rate. GaLore has its own rates.

Rows: without packing a micro batch is padded to its longest row, so the longest row of the data decides memory, the
mean width decides speed, and padding is not learned. Packed rows are `seq_len` long, and so are rows that have not been
counted. Before tokenisation the number of tokens is estimated from the size of the files, at the
lengths of tokens below: within about 20 % for English prose and code; other scripts and numbers can be far shorter.
"""

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardwise.trainer.planning.configuration import PolicyChoices
from shardwise.trainer.spec.data.profile import BatchWidth, DataProfile, LengthHistogram, stream_note
from shardwise.trainer.spec.data.shapes import SHAPES, objective_of, rows_per_example
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import Every, Warmup
from shardwise.trainer.spec.job.sections import DataFormat, Job, Objective, TrainJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import ADAMW_RATES, Optimizer, PublishedRate, Rates, two_digits
from shardwise.trainer.spec.plan import Schedule
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import format_count


class DefaultRate(NamedTuple):
    """A learning rate and its source."""

    lr: float
    source: str


_ADAMW_DPO = (
    PublishedRate(3e9, 1e-6, "the default of TRL's DPOConfig"),
    PublishedRate(20e9, 5e-7, "Zephyr 7B (arXiv:2310.16944) and OLMo 7B (arXiv:2402.00838)"),
    PublishedRate(math.inf, 2e-7, "Tulu 3 70B (arXiv:2411.15124)"),
)
_ADAMW_DPO_ADAPTERS = (
    PublishedRate(math.inf, 5e-6, "Zephyr 7B with QLoRA, ten times its full rate (arXiv:2310.16944)"),
)


_GALORE_FROM_SCRATCH = (
    PublishedRate(2e9, 1e-2, "GaLore 60M to 1B (arXiv:2403.03507, app. C)"),
    PublishedRate(math.inf, 5e-3, "GaLore 7B (arXiv:2403.03507, sec. 5.2)"),
)
_GALORE = ADAMW_RATES._replace(from_scratch=_GALORE_FROM_SCRATCH)  # for every inner optimizer: none has relative rates


def default_rate(
    *,
    optimizer: Optimizer,
    method: Method,
    is_from_scratch: bool,
    num_parameters: int,
    objective: Objective = Objective.PRETRAIN,
) -> DefaultRate:
    """The rate of the first row that is large enough."""
    rates = _GALORE if method is Method.GALORE else optimizer.facts.rates
    if objective is Objective.DPO:
        row, verb = _dpo_row(rates, num_parameters, freezes_base=method.freezes_base), "DPO"
        verb = f"{verb} of {method} adapters" if method.freezes_base else verb
    elif method.freezes_base:
        row, verb = _large_enough(rates.adapters, num_parameters), f"{method} adapters"
    elif is_from_scratch:
        row, verb = _large_enough(rates.from_scratch, num_parameters), "training from scratch"
    else:
        row, verb = _large_enough(rates.fine_tuning, num_parameters), "fine-tuning"
    return DefaultRate(row.lr, f"{verb} of {format_count(num_parameters)} parameters: {row.source}")


def _large_enough(rows: tuple[PublishedRate, ...], num_parameters: int) -> PublishedRate:
    return next(row for row in rows if num_parameters <= row.max_parameters)


def _dpo_row(rates: Rates, num_parameters: int, *, freezes_base: bool) -> PublishedRate:
    published = _large_enough(_ADAMW_DPO_ADAPTERS if freezes_base else _ADAMW_DPO, num_parameters)
    own, adamw = (
        _large_enough(each.adapters if freezes_base else each.fine_tuning, num_parameters)
        for each in (rates, ADAMW_RATES)
    )
    if own.lr == adamw.lr:
        return published
    source = f"as AdamW's {published.lr:g} is of its fine-tuning rate {adamw.lr:g}: {published.source}"
    return published._replace(lr=two_digits(own.lr * published.lr / adamw.lr), source=source)


def shares_rate(optimizer: Optimizer, other: Optimizer) -> bool:
    """True if both use the same rates, so that a run may change from one to the other."""
    return optimizer.facts.rates is other.facts.rates


# (largest vocabulary, bytes of UTF-8 text a token). Small: byte-level BPEs trained on Python's standard library and
# measured on it (1k: 2.6, 2k: 3.0, 4k: 3.3). Larger: Llama 2's 32k and Llama 3's 128k on English, 3.17 and 3.94
# characters a token (arXiv:2407.21783, sec. 3.2).
_BYTES_PER_TOKEN = ((1024, 2.5), (4096, 3.1), (65536, 3.2), (math.inf, 3.9))


def bytes_per_token(vocab_size: int) -> float:
    """Bytes of text in an average token of a vocabulary of this size."""
    return next(length for largest, length in _BYTES_PER_TOKEN if vocab_size <= largest)


def estimate_data(
    *,
    num_bytes: int,
    seq_len: int,
    vocab_size: int,
    eval_share: float | None,
    is_packed: bool = True,
    shape: DataFormat = DataFormat.TEXT,
    window_bytes: int | None = None,
) -> DataProfile:
    """A profile of `num_bytes` of text, `eval_share` of it held out; preferences are pairs of rows, never packed.

    Of a stream, whose windows have `window_bytes`, that of the first window.
    """
    num_bytes = num_bytes if window_bytes is None else min(num_bytes, window_bytes)
    rows_per_example = SHAPES[shape].rows_per_example
    row_tokens = rows_per_example * seq_len
    length = bytes_per_token(vocab_size)
    num_tokens = int(num_bytes / length)
    num_eval_tokens = int(num_tokens * (eval_share or 0))
    num_train_tokens = num_tokens - num_eval_tokens
    return DataProfile(
        source="estimated",
        format=shape,
        num_rows=max(1, num_train_tokens // row_tokens),
        num_tokens=num_train_tokens,
        longest_row=seq_len,
        is_packed=is_packed and rows_per_example == 1,
        fingerprint="estimated",
        vocab_size=vocab_size,
        num_eval_rows=-(-num_eval_tokens // row_tokens),
        num_eval_tokens=num_eval_tokens,
        is_stream=window_bytes is not None,
        notes=(
            f"{num_bytes:,} bytes of text are counted as {num_tokens:,} tokens, {length} bytes each",
            *(() if window_bytes is None else (stream_note(window_bytes, eval_share=eval_share),)),
        ),
    )


# Batches are padded to a multiple of it where seq_len allows. No kernel that a rank runs is compiled for each width.
WIDTH_MULTIPLE = 8


def longest_row_decides(data: DataProfile) -> bool:
    """True if rows are padded and their lengths counted."""
    return not data.is_packed and bool(data.batch_widths)


def longest_width(data: DataProfile | None, *, seq_len: int) -> int:
    """Tokens of the widest row a micro batch can have."""
    if data is None or not longest_row_decides(data):
        return seq_len
    return min(seq_len, -(-data.longest_row // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def mean_width(data: DataProfile | None, micro_batch: int, *, seq_len: int) -> float:
    """Tokens of a row of an average micro batch, padding included."""
    if data is None or not longest_row_decides(data):
        return float(seq_len)
    return min(float(seq_len), widths_at(data, micro_batch).mean_width_sorted)  # the order of training


def row_policy(data: DataProfile | None, *, seq_len: int) -> PolicyChoices:
    """Facts about the rows that the data determines."""
    return PolicyChoices(
        rows_per_example=1 if data is None else SHAPES[data.format].rows_per_example,
        document_tokens=document_tokens(data, seq_len=seq_len),
    )


def document_tokens(data: DataProfile | None, *, seq_len: int) -> float | None:
    """Tokens of the document that an average token of packed rows is in; `seq_len` if they have not been counted.

    None if a row is one document. Longer documents are cut into whole rows and a rest.
    """
    if data is None or not data.is_packed:
        return None
    return float(seq_len) if data.documents is None else _mean_over_tokens(data.documents, seq_len)


@lru_cache(maxsize=16)
def _mean_over_tokens(documents: LengthHistogram, seq_len: int) -> float:
    tokens = squares = 0.0
    lowest = documents.edges[0] * 2 // 3  # two bins an octave
    for lower, upper, count in zip((lowest, *documents.edges), documents.edges, documents.counts, strict=False):
        whole, rest = divmod((lower + 1 + upper) / 2, seq_len)
        tokens += count * (whole * seq_len + rest)
        squares += count * (whole * seq_len**2 + rest**2)
    return squares / tokens if tokens else float(seq_len)


def padding_share(width: float, mean_tokens: float) -> float:
    """Share of padding in a batch whose rows have `mean_tokens` tokens on average."""
    return max(0.0, 1 - mean_tokens / width)


def widths_at(data: DataProfile, micro_batch: int) -> BatchWidth:
    """The widths of batches of `micro_batch`, interpolated between the counted sizes."""
    widths = data.batch_widths
    if micro_batch >= widths[-1].micro_batch:
        return widths[-1]
    lower, upper = next(pair for pair in pairwise(widths) if pair[0].micro_batch <= micro_batch < pair[1].micro_batch)
    share = micro_batch / lower.micro_batch - 1  # counted sizes double
    return BatchWidth(
        micro_batch=micro_batch,
        mean_width=lower.mean_width + share * (upper.mean_width - lower.mean_width),
        mean_width_sorted=lower.mean_width_sorted + share * (upper.mean_width_sorted - lower.mean_width_sorted),
    )


MAX_SAVING_SHARE = 0.03  # of the run's time, by default
EVALUATIONS_PER_RUN = 10  # by default
CHECKPOINT_EVERY_S = 1200.0  # by default: the most that a killed run loses


class DefaultWarmup(NamedTuple):
    """The share of a run in which the rate rises, and its source."""

    share: float
    source: str


_WARMUP = DefaultWarmup(0.03, "QLoRA, arXiv:2305.14314; OLMo 7B, arXiv:2402.00838")
_DPO_WARMUP = DefaultWarmup(0.10, "Zephyr 7B, arXiv:2310.16944; OLMo 7B, arXiv:2402.00838")


def make_schedule(
    job: Job,
    data: DataProfile,
    shape: ModelShape,
    *,
    method: Method = Method.FULL,
    optimizer: Optimizer | None = None,
) -> Schedule:
    """The schedule of `job` on `data`; InputError if a step is shorter than one sequence or the data is empty.

    The rate is that of `optimizer`, or before a strategy is chosen that of the pinned optimizer or AdamW.
    """
    train = job.train
    objective = objective_of(train.objective, data.format)
    num_rows = rows_per_example(objective)
    sequences = sequences_per_step(train, rows_per_example=num_rows)
    num_steps = _num_steps(train, data, sequences)
    optimizer = optimizer or job.pin.optimizer or Optimizer.ADAMW
    lr, lr_source = _learning_rate(job, shape, method, optimizer, objective)
    default_warmup = _DPO_WARMUP if objective is Objective.DPO else _WARMUP
    warmup_steps, warmup_source = _warmup_steps(train, num_steps, default_warmup)
    evaluations = _eval_every(job, data, num_steps)
    checkpoints = _checkpoint_every(job, evaluations, num_steps)
    return Schedule(
        num_steps=num_steps,
        length_source=_length_source(train),
        sequences_per_step=sequences,
        tokens_per_step=sequences * num_rows * train.seq_len,
        warmup_steps=warmup_steps,
        lr=lr,
        lr_source=lr_source,
        warmup_source=warmup_source,
        eval_every_steps=evaluations.steps,
        eval_every_s=evaluations.seconds,
        checkpoint_every_steps=checkpoints.steps,
        checkpoint_every_s=checkpoints.seconds,
        saving_max_share=MAX_SAVING_SHARE if job.checkpoint.every is None else None,
        rehearses_save=num_steps > 1,
    )


def sequences_per_step(train: TrainJob, *, rows_per_example: int = 1) -> int:
    """Sequences, or pairs of them, of one optimizer step over all ranks."""
    num_tokens = rows_per_example * train.seq_len
    if train.tokens_per_step < num_tokens:
        what = "one sequence" if rows_per_example == 1 else "one pair of sequences"
        raise InputError(
            f"train.tokens_per_step is {train.tokens_per_step} and {what} of train.seq_len {train.seq_len} "
            f"has {num_tokens} tokens; raise tokens_per_step to {num_tokens} or more"
        )
    return round(train.tokens_per_step / num_tokens)


def _num_steps(train: TrainJob, data: DataProfile, sequences: int) -> int:
    if data.num_rows < 1:
        raise InputError("data.train has no rows to train on")
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, math.ceil(train.tokens / (sequences * _tokens_per_row(train, data)) - 1e-9))
    epochs = 1.0 if train.epochs is None else train.epochs
    return max(1, math.ceil(epochs * data.num_rows / sequences - 1e-9))


def _length_source(train: TrainJob) -> str:
    if train.steps is not None:
        return "train.steps of the job file"
    if train.tokens is not None:
        return "train.tokens of the job file"
    epochs = 1.0 if train.epochs is None else train.epochs
    if epochs == 1:
        return "1 epoch, as by default: arXiv:2305.16264"
    return f"{epochs:g} epochs"


def _tokens_per_row(train: TrainJob, data: DataProfile) -> float:
    """Tokens of an average row without padding."""
    return float(train.seq_len) if data.source == "estimated" else data.num_tokens / data.num_rows


def _warmup_steps(train: TrainJob, num_steps: int, default: DefaultWarmup) -> tuple[int, str]:
    """Steps until the full rate, and where they are from; at least one step is left after them."""
    requested, source = train.warmup, "train.warmup of the job file"
    if requested is None:
        requested, source = Warmup(share=default.share), f"{default.share:.0%}: {default.source}"
    wanted = requested.steps if requested.steps is not None else round((requested.share or 0) * num_steps)
    return min(wanted, num_steps - 1), source


def _learning_rate(
    job: Job, shape: ModelShape, method: Method, optimizer: Optimizer, objective: Objective
) -> DefaultRate:
    if job.train.lr is not None:
        return DefaultRate(job.train.lr, "train.lr of the job file")
    return default_rate(
        optimizer=optimizer,
        method=method,
        is_from_scratch=job.model.config is not None,
        num_parameters=shape.num_parameters,
        objective=objective,
    )


def _eval_every(job: Job, data: DataProfile, num_steps: int) -> Every:
    if not data.num_eval_rows:
        return Every()
    return job.eval.every or Every(steps=max(1, num_steps // EVALUATIONS_PER_RUN))


def _checkpoint_every(job: Job, evaluations: Every, num_steps: int) -> Every:
    """Default: with every evaluation (so that the best model is saved), and at least every 20 minutes."""
    if job.checkpoint.every is not None:
        return job.checkpoint.every
    steps = evaluations.steps or max(1, num_steps // EVALUATIONS_PER_RUN)
    return Every(steps=steps, seconds=CHECKPOINT_EVERY_S)
