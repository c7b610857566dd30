"""The functions behind `import shardwise`: the same steps as the command line, with values instead of text.

A job is the path of a job file, the same settings as a dict, or the keywords `model`, `data`, `method`, `seq_len` and
`allow`. Results are values with documented fields, shown as the text of the command; a notebook shows the page of
`--html`, with the curve of the loss.
"""

import html
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from shardwise.launch.commands.convert import reply_to, run_export
from shardwise.launch.commands.data import data_lines, prepared_data
from shardwise.launch.commands.plan import is_job_file, machines, overrides_of, run_name
from shardwise.launch.commands.train import train as run_training
from shardwise.launch.job.layers import COMMAND_LINE, read_override
from shardwise.launch.options import ChatOptions, DataOptions, ExportOptions, PlanOptions, TrainOptions
from shardwise.launch.plan.gather import plan_inputs, profile_data
from shardwise.launch.show.recorded_run import read_recorded
from shardwise.launch.show.report import render_report
from shardwise.launch.terminal import Console
from shardwise.trainer.planning.explain.first_screen import first_screen, text_of
from shardwise.trainer.planning.explain.recommend import Recommendation
from shardwise.trainer.planning.page.html import fragment_html
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, InputProblemsError
from shardwise.trainer.spec.plan import MemoryEstimate, Plan, SpeedEstimate
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.units import parse_bytes

JobSource = str | Path | Mapping[str, Any]
_S = TypeVar("_S", bound=msgspec.Struct)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and speed of the chosen strategy of a job."""

    fits: bool
    strategy: str
    memory: MemoryEstimate
    speed: SpeedEstimate


class PlanResult(Plan, frozen=True, kw_only=True):
    """A plan; a notebook shows its first screen."""

    def __repr__(self) -> str:
        return text_of(first_screen(self))

    def _repr_html_(self) -> str:
        """Its page: the verdict, memory, speed and methods, and everything else folded."""
        from shardwise.trainer.planning.explain.plan_page import plan_page

        verdict, *_ = str(self).splitlines()
        return fragment_html(plan_page(self), title=verdict, shown=("memory", "speed", "methods"))


class RunResult(Report, frozen=True, kw_only=True):
    """The report of a run, its directory, and what would help the next run; a notebook shows `shardwise report`."""

    run_dir: str
    recommendations: tuple[Recommendation, ...] = ()

    def __repr__(self) -> str:
        return render_report(self, run_dir=Path(self.run_dir), recommended=self.recommendations)

    def _repr_html_(self) -> str:
        """Its page: figures and curves of the loss, and everything else folded; text if the directory is missing."""
        from shardwise.launch.show.run_page import run_page

        run = read_recorded(Path(self.run_dir))
        if run.report is None:
            return _preformatted(str(self))
        page = run_page(run)
        return fragment_html(page, title=page.title, shown=("end", "figures", "loss", "help", "sample"))


class DataResult(DataProfile, frozen=True, kw_only=True):
    """Prepared data; a notebook shows what `shardwise data` prints."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _preformatted(self.text)


def plan(
    job: JobSource | None = None,
    *overrides: str,
    model: str | None = None,
    data: str | Path | None = None,
    method: str | None = None,
    seq_len: int | None = None,
    allow: Sequence[str] = (),
    hardware: str | None = None,
    vram: str | int | None = None,
    gpus: tuple[int, ...] | None = None,
) -> PlanResult:
    """The plan of a job for this machine, or for `hardware` (a SPEC or a hardware.json).

    Raises NothingFitsError where no strategy fits, InputError where the job is wrong.
    """
    with _of_keywords(is_written=job is None), _named(job, model) as path:
        options = _options(path, overrides, data, method, seq_len, allow)
        options = replace(options, specs=() if hardware is None else (hardware,), vram_cap_bytes=_size(vram), gpus=gpus)
        ((_, inputs),) = machines(options)
        return _as(PlanResult, plan_inputs(inputs, profile_data(inputs)))


def estimate(job: JobSource, *overrides: str, hardware: str | None = None, vram: str | int | None = None) -> Estimate:
    """Predicted memory and speed of what `plan` would choose."""
    chosen = plan(job, *overrides, hardware=hardware, vram=vram).chosen
    return Estimate(fits=chosen.memory.fits, strategy=chosen.strategy.name, memory=chosen.memory, speed=chosen.speed)


def data(
    job: JobSource | None = None,
    *overrides: str,
    model: str | None = None,
    data: str | Path | None = None,
    seq_len: int | None = None,
) -> DataResult:
    """Prepares the data of a job, and describes it as the model will see it."""
    with _job_file(job, model, overrides, data, None, seq_len, ()) as (path, further):
        profile, resolved = prepared_data(DataOptions(path, further), Console(sys.stdout))
        lines = data_lines(profile, resolved, Console(sys.stdout))
        return _as(DataResult, profile, text="\n".join(lines))


def train(
    job: JobSource | None = None,
    *overrides: str,
    model: str | None = None,
    data: str | Path | None = None,
    method: str | None = None,
    seq_len: int | None = None,
    allow: Sequence[str] = (),
    vram: str | int | None = None,
    gpus: tuple[int, ...] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> RunResult:
    """Trains as `shardwise train` does, in processes of its own, and returns the report; progress is printed in lines.

    Raises EnvironmentFaultError where the run was stopped before it trained anything.
    """
    with _job_file(job, model, overrides, data, method, seq_len, allow) as (path, further):
        outcome = run_training(
            TrainOptions(
                job=path,
                overrides=further,
                gpus=gpus,
                vram_cap_bytes=_size(vram),
                run_dir=Path(run_dir) if run_dir is not None else None,
                resume=resume,
            ),
            Console(sys.stdout),
        )
    if outcome.report is None or outcome.run_dir is None:
        raise EnvironmentFaultError("the run was stopped before the first step")
    return _as(RunResult, outcome.report, run_dir=str(outcome.run_dir))


def report(run_dir: str | Path) -> RunResult:
    """The report of a run that has ended, with recommendations; InputError if it has none."""
    run = read_recorded(Path(run_dir))
    if run.report is None:
        raise InputError(f"{run_dir}: {run.problem}: the run has not ended, or was killed before it could")
    return _as(RunResult, run.report, run_dir=str(run_dir), recommendations=tuple(run.recommended))


def export(
    run: RunResult | str | Path,
    out: str | Path,
    *,
    merge: bool = False,
    format: str = "hf",  # noqa: A002  # the option's name
    quant: str | None = None,
    dtype: str | None = None,
    checkpoint: str | None = None,
    check: bool = True,
) -> Path:
    """Writes the folder `out` as `shardwise export` does, prints what was compared, and returns its path."""
    options = ExportOptions(
        run_dir=_run_dir(run), output=Path(out), merge=merge, format=format, quant=quant, dtype=dtype,
        checkpoint=checkpoint, check=check,
    )  # fmt: skip
    run_export(options, Console(sys.stdout))
    return Path(out)


def chat(
    run: RunResult | str | Path,
    question: str,
    *,
    system: str | None = None,
    temperature: float | None = None,
    max_new_tokens: int = 512,
    checkpoint: str | None = None,
) -> str:
    """The trained model's reply to one question; the model is loaded for this call alone."""
    options = ChatOptions(_run_dir(run), checkpoint, max_new_tokens, temperature=temperature, system=system)
    return reply_to((question,), options).text


def _run_dir(run: RunResult | str | Path) -> Path:
    return Path(run.run_dir if isinstance(run, RunResult) else run)


def _as(kind: type[_S], value: msgspec.Struct, **further: object) -> _S:
    """The value as one of its subclass."""
    return kind(**{name: getattr(value, name) for name in value.__struct_fields__}, **further)


def _preformatted(text: str) -> str:
    return f'<pre style="font-family: monospace">{html.escape(text)}</pre>'


def _options(
    job: Path,
    overrides: Sequence[str],
    data: str | Path | None,
    method: str | None,
    seq_len: int | None,
    allow: Sequence[str],
) -> PlanOptions:
    allowed = ",".join((allow,) if isinstance(allow, str) else allow) or None
    return PlanOptions(
        job, tuple(overrides), None if data is None else str(data), method=method, seq_len=seq_len, allow=allowed
    )


_KEYWORDS = {
    "model.name": "model", "model.config": "model", "data.train": "data", "train.method": "method",
    "train.seq_len": "seq_len", "allow": "allow",
}  # fmt: skip


@contextmanager
def _of_keywords(*, is_written: bool) -> Iterator[None]:
    """Problems of settings that a keyword stands for name the keyword, not a command line or a file written for it."""
    try:
        yield
    except InputProblemsError as error:
        raise InputProblemsError([_of_keyword(problem, is_written=is_written) for problem in error.problems]) from None


def _of_keyword(problem: str, *, is_written: bool) -> str:
    text = problem.partition(": ")[2] if is_written else problem.removeprefix(f"{COMMAND_LINE}: ")
    keyword = _KEYWORDS.get(text.split(" ")[0])
    return text if keyword is None else f"{keyword}: {text}"


@contextmanager
def _named(job: JobSource | None, model: str | None) -> Iterator[Path]:
    """The path of a job, or the name of a model; a dict is written as a file."""
    if (job is None) == (model is None):
        raise InputError('name either a job (a file or a dict) or a model, such as model="Qwen/Qwen2.5-0.5B"')
    if isinstance(job, Mapping):
        with _written("job", job) as path:
            yield path
    else:
        yield Path(job if job is not None else str(model))


@contextmanager
def _job_file(
    job: JobSource | None,
    model: str | None,
    overrides: Sequence[str],
    data: str | Path | None,
    method: str | None,
    seq_len: int | None,
    allow: Sequence[str],
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A job file and the overrides for it; a model is one with its settings."""
    with _of_keywords(is_written=job is None), _named(job, model) as path:
        options = _options(path, overrides, data, method, seq_len, allow)
        settings = tuple(overrides_of(options))
        if is_job_file(path) or path.suffix == ".json":
            yield path, settings
            return
        tree: dict[str, Any] = {}
        for each in settings:
            tree = _merged(tree, read_override(each))
        with _written(run_name(path), tree) as written:
            yield written, ()


@contextmanager
def _written(name: str, tree: Mapping[str, Any]) -> Iterator[Path]:
    """A job file of these settings, for as long as it is used; JSON is YAML."""
    with TemporaryDirectory(prefix="shardwise-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(tree)))
        yield path


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _merged(one[name], other[name]) for name in one.keys() & other.keys() if isinstance(one[name], dict)}
    return {**one, **other, **both}


def _size(vram: str | int | None) -> int | None:
    try:
        return None if vram is None else parse_bytes(vram)
    except ValueError as error:
        raise InputError(f"vram: {vram!r} is not {error}") from None
