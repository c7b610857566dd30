"""The schedule of a run (steps, warmup, learning rate, evaluations, checkpoints) and the widths of its rows.

Pure. The rate is a function of job, model and data, the rest of job and data alone, with one exception: a global batch
that the job does not set is a multiple of the number of ranks, so that none idles. Machines with 1, 2, 4, ... ranks
train the same steps as long as the batch has a sequence for each. The global batch is a number of examples (sequences,
or pairs of sequences under DPO); a stated one is rounded to the nearest, never below one.

Batch and length by default (`_RunKind`, one row a kind of run). A step has so many sequences that the run has
USUAL_STEPS steps, and with existing weights at most DEFAULT_STEP_TOKENS, Alpaca's 128 examples of 512 tokens: the less
data, the smaller the steps, down to one sequence, with which models train stably (arXiv:2507.07101). From scratch the
most is the optimum that Step Law measured, 0.58 x (tokens of the run)^0.571 tokens (arXiv:2503.04715), and at most
Llama 2's 4 million; neither it nor the critical batch depends on the size of the model (arXiv:1812.06162,
arXiv:2410.21676). Batches are powers of two. Data is repeated only as often as USUAL_STEPS steps need, and up to a
limit: repeated data gains less each time, up to four epochs lose little (Muennighoff et al. 2023, arXiv:2305.16264).

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
from shardwise.trainer.spec.data.objectives import OBJECTIVES, DefaultWarmup
from shardwise.trainer.spec.data.profile import BatchWidth, DataProfile, LengthHistogram, stream_note
from shardwise.trainer.spec.data.shapes import SHAPES, objective_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import Every, Warmup
from shardwise.trainer.spec.job.sections import DataFormat, Job, LossOn, Objective, TrainJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import ADAMW_RATES, Optimizer, PublishedRate, Rates, two_digits
from shardwise.trainer.spec.plan import Schedule
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import format_count


class DefaultRate(NamedTuple):
    """A learning rate and its source."""

    lr: float
    source: str


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
    facts = OBJECTIVES[objective]
    published = facts.adapter_rates if method.freezes_base else facts.rates
    if published:
        row = _scaled(published, rates, num_parameters, freezes_base=method.freezes_base)
        verb = f"{objective.upper()} of {method} adapters" if method.freezes_base else objective.upper()
    elif method.freezes_base:
        row, verb = _large_enough(rates.adapters, num_parameters), f"{method} adapters"
    elif is_from_scratch:
        row, verb = _large_enough(rates.from_scratch, num_parameters), "training from scratch"
    else:
        row, verb = _large_enough(rates.fine_tuning, num_parameters), "fine-tuning"
    return DefaultRate(row.lr, f"{verb} of {format_count(num_parameters)} parameters: {row.source}")


def _large_enough(rows: tuple[PublishedRate, ...], num_parameters: int) -> PublishedRate:
    return next(row for row in rows if num_parameters <= row.max_parameters)


def _scaled(rows: tuple[PublishedRate, ...], rates: Rates, num_parameters: int, *, freezes_base: bool) -> PublishedRate:
    """AdamW's rate for an objective, as much larger or smaller as the optimizer's rate for fine-tuning is."""
    published = _large_enough(rows, num_parameters)
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


_LENGTH_MARGIN = 2.0  # of the longest row, as its text may have far shorter tokens


def bytes_per_token(vocab_size: int) -> float:
    """Bytes of text in an average token of a vocabulary of this size."""
    return next(length for largest, length in _BYTES_PER_TOKEN if vocab_size <= largest)


LEAST_PACKED_ROWS = 256  # that packing leaves by default; of fewer, each conversation is a row of its own


def is_small(num_bytes: int, *, seq_len: int, vocab_size: int) -> bool:
    """True of text that would fill fewer than LEAST_PACKED_ROWS rows, too few for USUAL_STEPS steps."""
    return num_bytes < LEAST_PACKED_ROWS * seq_len * bytes_per_token(vocab_size)


def estimate_data(
    *,
    num_bytes: int,
    seq_len: int,
    vocab_size: int,
    eval_share: float | None,
    is_packed: bool = True,
    shape: DataFormat = DataFormat.TEXT,
    window_bytes: int | None = None,
    row_sizes: tuple[int, int | None] | None = None,
) -> DataProfile:
    """A profile of `num_bytes` of text, `eval_share` of it held out; preferences are pairs of rows, never packed.

    Of a stream, whose windows have `window_bytes`, that of the first window. `row_sizes` are the number of examples
    and the bytes of the longest, if they are counted: each is a row that is not packed, as wide as the mean on average.
    Without the longest, the number is of a sample, and the longest may have seq_len.
    """
    num_bytes = num_bytes if window_bytes is None else min(num_bytes, window_bytes)
    rows_per_example = SHAPES[shape].rows_per_example
    row_tokens = rows_per_example * seq_len
    length = bytes_per_token(vocab_size)
    num_tokens = int(num_bytes / length)
    num_eval_tokens = int(num_tokens * (eval_share or 0))
    num_train_tokens = num_tokens - num_eval_tokens
    longest, widths = seq_len, tuple[BatchWidth, ...]()
    mean: float | None = None
    if row_sizes is not None:
        num_rows, longest_bytes = row_sizes
        if longest_bytes is not None:
            longest = min(seq_len, math.ceil(_LENGTH_MARGIN * longest_bytes / length))
        row_tokens, mean = max(1, num_tokens // num_rows), min(float(longest), num_tokens / num_rows / rows_per_example)
        widths = (BatchWidth(micro_batch=1, mean_width=mean, mean_width_sorted=mean),)
    return DataProfile(
        source="estimated",
        format=shape,
        num_rows=max(1, num_train_tokens // row_tokens),
        num_tokens=num_train_tokens,
        longest_row=longest,
        batch_widths=widths,
        mean_cut_tokens=mean,
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


USUAL_STEPS = 300  # of a default run on few data; published: LIMA 469, Llama 2 chat 860, Alpaca 1,218
LEAST_STEPS = 100  # that remain where idle ranks make the default batch larger
DEFAULT_STEP_TOKENS = 65536  # of a step on much data, with existing weights
LARGEST_STEP_TOKENS = 4_000_000  # of a step from scratch: Llama 2 (arXiv:2307.09288)


class _RunKind(NamedTuple):
    """Defaults of one kind of run."""

    name: str
    max_epochs: int  # over data that give fewer than USUAL_STEPS steps
    epochs_source: str
    batch_source: str = "as much as Alpaca's 128 x 512 tokens"
    is_from_scratch: bool = False


_FROM_SCRATCH = _RunKind(
    "training from scratch", 4, "arXiv:2305.16264", batch_source="Step Law, arXiv:2503.04715", is_from_scratch=True
)
_KINDS = {
    objective: _RunKind(facts.run, facts.max_epochs, facts.epochs_source) for objective, facts in OBJECTIVES.items()
}


class _Length(NamedTuple):
    """Sequences of a step, number of steps, and the sources of both."""

    sequences: int
    num_steps: int
    batch_source: str
    length_source: str


def make_schedule(
    job: Job,
    data: DataProfile,
    shape: ModelShape,
    *,
    method: Method = Method.FULL,
    optimizer: Optimizer | None = None,
    num_ranks: int = 1,
) -> Schedule:
    """The schedule of `job` on `data`; InputError if a step is shorter than one sequence or the data is empty.

    The rate is that of `optimizer`, or before a strategy is chosen that of the pinned optimizer or AdamW.
    """
    train = job.train
    objective = objective_of(train.objective, data.format)
    length = _length(job, data, objective, num_ranks)
    num_steps = length.num_steps
    optimizer = optimizer or job.pin.optimizer or Optimizer.ADAMW
    lr, lr_source = _learning_rate(job, shape, method, optimizer, objective)
    warmup_steps, warmup_source = _warmup_steps(train, num_steps, OBJECTIVES[objective].warmup)
    evaluations = _eval_every(job, data, num_steps)
    checkpoints = _checkpoint_every(job, evaluations, num_steps)
    return Schedule(
        num_steps=num_steps,
        length_source=length.length_source,
        sequences_per_step=length.sequences,
        tokens_per_step=length.sequences * OBJECTIVES[objective].rows_per_example * train.seq_len,
        batch_source=length.batch_source,
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


def idle_run_warnings(job: Job, data: DataProfile, schedule: Schedule) -> tuple[str, ...]:
    """Sentences about a run that would change next to nothing, each with the setting that mends it."""
    return tuple(
        warning
        for warning in (
            _few_steps(job, data, schedule),
            _many_epochs(job, data, schedule),
            _long_warmup(job, schedule),
            _few_targets(job, data, schedule),
        )
        if warning is not None
    )


NO_STEPS, FEW_STEPS = 10, 50  # in which a model learns next to nothing, and little, at the usual rates
MANY_EPOCHS = 1000
FEW_TARGETS, FEW_TARGETS_SHARE = 1000, 0.01  # learned tokens of a run, and of all its tokens


def _few_steps(job: Job, data: DataProfile, schedule: Schedule) -> str | None:
    if schedule.num_steps >= FEW_STEPS:
        return None
    train, num_examples = job.train, schedule.num_steps * schedule.sequences_per_step
    if train.steps is not None:
        remedy = f"train.steps: {USUAL_STEPS}"
    elif train.tokens_per_step is not None and num_examples >= NO_STEPS:
        remedy = f"train.tokens_per_step: auto{'' if num_examples >= FEW_STEPS else ', and more data'}"
    elif (train.epochs or train.tokens) is not None and data.num_rows >= FEW_STEPS:
        remedy = "train.epochs: auto (and no train.tokens)"
    else:
        seq_len = max(8, _power_of_two(num_examples * min(train.seq_len, data.longest_row) / LEAST_STEPS))
        remedy = (
            f"train.seq_len: {seq_len}, or more data" if data.is_packed and seq_len < train.seq_len else "more data"
        )
    steps = "1 optimizer step" if schedule.num_steps == 1 else f"{schedule.num_steps} optimizer steps"
    effect = "next to nothing" if schedule.num_steps < NO_STEPS else "little"
    return f"{steps} of {schedule.tokens_per_step:,} tokens will change {effect}; remedy: {remedy}"


def _many_epochs(job: Job, data: DataProfile, schedule: Schedule) -> str | None:
    epochs = schedule.num_steps * schedule.sequences_per_step / max(1, data.num_rows)
    if epochs < MANY_EPOCHS or data.is_stream:
        return None
    setting = "steps" if job.train.steps is not None else "tokens" if job.train.tokens is not None else "epochs"
    fewer = "train.epochs: auto" if setting == "epochs" else f"no train.{setting}"
    return f"{epochs:,.0f} epochs: the model will learn its data by heart; remedy: {fewer}, or more data"


def _long_warmup(job: Job, schedule: Schedule) -> str | None:
    if job.train.warmup is None or 2 * schedule.warmup_steps <= schedule.num_steps:
        return None
    return (
        f"the learning rate rises in {schedule.warmup_steps} of {schedule.num_steps} steps and is too low in most of "
        "them; remedy: train.warmup: auto"
    )


def _few_targets(job: Job, data: DataProfile, schedule: Schedule) -> str | None:
    if data.num_targets is None or OBJECTIVES[objective_of(job.train.objective, data.format)].rows_per_example > 1:
        return None
    passes = max(1.0, schedule.num_steps * schedule.sequences_per_step / data.num_rows)  # few steps are another warning
    if data.num_targets * passes >= FEW_TARGETS and data.num_targets >= FEW_TARGETS_SHARE * data.num_tokens:
        return None
    remedy = "more data" if job.data.loss_on is LossOn.ALL else "data.loss_on: all, or the columns in data.fields"
    return (
        f"only {data.num_targets:,} of {data.num_tokens:,} tokens of an epoch are learned (data.loss_on: "
        f"{job.data.loss_on}); remedy: {remedy}"
    )


def _length(job: Job, data: DataProfile, objective: Objective, num_ranks: int) -> _Length:
    """Batch and number of steps: those of the job, or the defaults of its kind of run."""
    if data.num_rows < 1:
        raise InputError("data.train has no rows to train on")
    train, num_tokens = job.train, OBJECTIVES[objective].rows_per_example * job.train.seq_len
    kind = _FROM_SCRATCH if job.model.config is not None else _KINDS[objective]
    stated = None if train.tokens_per_step is None else sequences_per_step(train.tokens_per_step, num_tokens)
    learned_share = _tokens_per_row(train, data) / train.seq_len  # of a row; the rest is padding
    wanted = stated or _usual_batch(kind, data.num_rows, num_tokens, learned_share)
    epochs, source = _epochs(train, kind, min(kind.max_epochs, math.ceil(USUAL_STEPS * wanted / data.num_rows)))
    num_sequences = epochs * data.num_rows
    if train.tokens is not None:
        num_sequences = train.tokens / _tokens_per_row(train, data)
    elif data.is_stream and train.steps is not None:
        num_sequences = train.steps * DEFAULT_STEP_TOKENS / num_tokens
    if stated is not None:
        sequences, batch_source = stated, ""
    else:
        sequences, why = _default_batch(job, kind, num_sequences, num_tokens, learned_share, num_ranks)
        batch_source = f"default of {kind.name}: {why}"
    num_steps = max(1, math.ceil(num_sequences / sequences - 1e-9)) if train.steps is None else train.steps
    return _Length(sequences, num_steps, batch_source, source)


def _epochs(train: TrainJob, kind: _RunKind, default: int) -> tuple[float, str]:
    """Passes over the data, the most where the job states another length, and where the length is from."""
    if train.epochs is not None:
        return train.epochs, f"{train.epochs:g} epoch{'' if train.epochs == 1 else 's'}"
    if train.tokens is not None:
        return float(kind.max_epochs), "train.tokens of the job file"
    if train.steps is not None:
        return float(kind.max_epochs), "train.steps of the job file"
    if default == 1:
        return 1.0, f"1 epoch, as by default: {kind.epochs_source}"
    return float(default), f"{default} epochs, the default of {kind.name} on few data: {kind.epochs_source}"


def _usual_batch(kind: _RunKind, num_sequences: float, num_tokens: int, learned_share: float) -> float:
    """Sequences of a step on as many that all runs of this kind take, before few data make it smaller."""
    if not kind.is_from_scratch:
        return DEFAULT_STEP_TOKENS / num_tokens
    tokens: float = 0.58 * math.pow(num_sequences * num_tokens * learned_share, 0.571)
    return min(LARGEST_STEP_TOKENS, tokens) / (num_tokens * learned_share)


def _default_batch(
    job: Job, kind: _RunKind, num_sequences: float, num_tokens: int, learned_share: float, num_ranks: int
) -> tuple[int, str]:
    """Sequences, or pairs of them, of a step over all ranks, and why."""
    micro_batch = job.pin.micro_batch
    if micro_batch is not None and _updates_in_backward(job):
        return num_ranks * micro_batch, "one micro batch a rank, because gradients are not accumulated"
    usual = _usual_batch(kind, num_sequences, num_tokens, learned_share)
    if job.train.steps is not None:  # however many sequences the data would have
        usual = min(usual, DEFAULT_STEP_TOKENS / num_tokens)
    few = num_sequences / (job.train.steps or USUAL_STEPS)
    is_small = few < usual
    sequences = _power_of_two(few if is_small else usual)
    together = num_ranks * (micro_batch or 1)
    spread = max(1, round(sequences / together)) * together
    if spread > sequences and micro_batch is None and num_sequences / spread < LEAST_STEPS:
        return sequences, "small steps, because the data are few"
    if spread == together > sequences:
        each = "one" if micro_batch is None else "a micro batch"
        return spread, f"{each} for each of {num_ranks} ranks"
    return spread, "small steps, because the data are few" if is_small else kind.batch_source


def _power_of_two(number: float) -> int:
    """The largest power of two that is not above the number, and at least 1."""
    return 1 << max(0, math.floor(math.log2(max(1.0, number))))


def _updates_in_backward(job: Job) -> bool:
    pinned = job.pin.optimizer
    return job.pin.optimizer_in_backward or (pinned is not None and pinned.facts.updates_in_backward)


def sequences_per_step(tokens_per_step: int, num_tokens: int) -> int:
    """Examples of `num_tokens` each, rows of seq_len or pairs of them, in a stated global batch."""
    if tokens_per_step < num_tokens:
        raise InputError(
            f"train.tokens_per_step is {tokens_per_step}, less than the {num_tokens} tokens of one example "
            f"(a row of train.seq_len, or two in preferences): train.tokens_per_step: {num_tokens} or more, or auto"
        )
    return round(tokens_per_step / num_tokens)


def _tokens_per_row(train: TrainJob, data: DataProfile) -> float:
    """Tokens of an average row without padding."""
    mean = data.num_tokens / data.num_rows
    return min(float(train.seq_len), mean) if data.source == "estimated" else mean


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
    return usual_rate(job, shape, method, optimizer, objective)


def usual_rate(job: Job, shape: ModelShape, method: Method, optimizer: Optimizer, objective: Objective) -> DefaultRate:
    """The rate of a job that states none."""
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
