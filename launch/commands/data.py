"""`shardwise data JOB`: prepares the data of a job and shows what the model will see of it, before anything is trained.

It counts what is held out, left out and cut, shows lengths as bars, and writes out the first example with the learned
tokens marked.
"""

import shutil
from collections.abc import Iterator

from shardwise.launch.inputs.prepare_data import prepare_data
from shardwise.launch.options import DataOptions
from shardwise.launch.plan.gather import check_inputs, profile_data, read_inputs, with_tokenizer
from shardwise.launch.terminal import Console
from shardwise.launch.worker import ask
from shardwise.trainer.spec.data.profile import DataProfile, LengthHistogram
from shardwise.trainer.spec.data.shapes import SHAPES, objective_of
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.job.sections import Job, LossOn
from shardwise.trainer.spec.messages.worker_requests import ExampleRequest, Lines
from shardwise.trainer.spec.units import format_count

_BAR = 40  # columns of the longest


def run_data(options: DataOptions, console: Console) -> ExitCode:
    """Prepares, or finds what was prepared, and describes it."""
    profile, job = prepared_data(options, console)
    for line in data_lines(profile, job, console):
        console.line(line)
    return ExitCode.DONE


def prepared_data(options: DataOptions, console: Console) -> tuple[DataProfile, Job]:
    """The prepared data of a job, checked as a plan checks them, and the job."""
    inputs = with_tokenizer(read_inputs(options.job, options.overrides, needs_costs=False))
    job, request = inputs.resolved.job, inputs.request
    check_inputs(inputs, profile_data(inputs))  # before anything is tokenised
    profile = prepare_data(request, on_progress=console.line)
    check_inputs(inputs, profile)
    return profile, job


def data_lines(profile: DataProfile, job: Job, console: Console) -> Iterator[str]:
    """Description of the data, and its first example, in the width of the console."""
    yield from describe_data(profile, job)
    yield ""
    yield "the first example, as the model will see it:"
    yield _first_example(profile, console)


def describe_data(profile: DataProfile, job: Job) -> Iterator[str]:
    """Description of the data, in lines."""
    rows, seq_len = f"{profile.num_rows:,}", job.train.seq_len
    objective = objective_of(job.train.objective, profile.format)
    where = " in the first window of a stream" if profile.is_stream else ""
    num_tokens = format_count(profile.num_tokens)
    yield f"{profile.num_documents:,} {SHAPES[profile.format].plural} to learn from{where}, {num_tokens} tokens"
    yield f"  objective    {objective}: {_learned_text(profile, job)}"
    if profile.is_packed:
        full = "" if profile.packing_efficiency is None else f", {profile.packing_efficiency:.1%} full"
        yield f"  rows         {rows} of at most {seq_len} tokens, whole documents packed together{full}"
    else:
        pairs = "pairs of rows" if SHAPES[profile.format].rows_per_example == 2 else "rows"
        yield f"  rows         {rows} {pairs}, the longest {profile.longest_row:,} tokens"
    held_out = f"{profile.num_eval_rows:,} rows, {format_count(profile.num_eval_tokens)} tokens"
    yield f"  held out     {held_out if profile.num_eval_rows else 'nothing'}"
    if profile.skipped_rows or profile.cut_rows:
        yield f"  left out     {profile.skipped_rows:,} bad rows; {profile.cut_rows:,} lost their end"
    for note in profile.notes:
        yield f"  note         {note}"
    if profile.documents is not None:
        yield ""
        yield "tokens of a document"
        yield from _bars(profile.documents)


def _learned_text(profile: DataProfile, job: Job) -> str:
    what = SHAPES[profile.format].learned if job.data.loss_on is LossOn.AUTO else f"loss on {job.data.loss_on}"
    if profile.num_targets is None or SHAPES[profile.format].rows_per_example == 2:
        return what
    span = "the window" if profile.is_stream else "an epoch"
    return f"{what}, {format_count(profile.num_targets)} tokens of {span} ({_share(profile):.0%})"


def _share(profile: DataProfile) -> float:
    return (profile.num_targets or 0) / max(1, profile.num_tokens)


def _bars(histogram: LengthHistogram) -> Iterator[str]:
    most = max(histogram.counts)
    lower = 0
    for upper, count in zip(histogram.edges, histogram.counts, strict=True):
        yield f"  {f'{lower + 1:,} to {upper:,}':>17}  {'#' * round(_BAR * count / most):<{_BAR}}  {count:,}"
        lower = upper


def _first_example(profile: DataProfile, console: Console) -> str:
    assert profile.cache_dir is not None
    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    request = ExampleRequest(cache_dir=profile.cache_dir, width=width, colour=console.is_terminal)
    shown = ask("shardwise.trainer.runtime.tools.show_data", request, Lines, subject="writing out the first example")
    return "\n".join(shown.lines)
