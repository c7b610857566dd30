"""Rendering of `train.sbatch`: the options of a job as `#SBATCH` lines, then the program of its first node. Pure.

`#SBATCH` lines are read by sbatch, not by a shell. It splits them at white space, reads `#` as the start of a comment,
and supports quotes and backslashes. A value in double quotes with both escaped arrives unchanged (tested on Slurm 22.05
for every printable character), except control characters. In --output `%` begins a pattern, and a backslash switches
patterns off. Everything below is shell: each text goes through shlex.quote.
"""

import re
import shlex
import unicodedata
from collections.abc import Sequence

from shardwise.slurm.cluster import format_duration
from shardwise.slurm.job_script import Container, script_body
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.submission import SCRIPT_NAME
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value

MIN_WARNING_S = 120
EARLY_S = 60  # the resolution of Slurm's clock (man sbatch, --signal)
MARGIN_S = 60  # for ranks to agree, and for a slow file system
MAX_WARNING_S = 65535  # of --signal
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_LONG = re.compile(r"--([a-z][a-z0-9-]*)(?:[= ]\s*(.*))?", re.DOTALL)
_SHORT = re.compile(r"-([A-Za-z])\s*(.*)", re.DOTALL)
_OWN_OPTIONS = (
    "array", "wrap", "test-only", "wait", "parsable", "signal", "output", "open-mode", "ntasks-per-node", "ntasks",
    "nodes", "chdir",
)  # fmt: skip
_OWN_LETTERS = {"a": "array", "W": "wait", "o": "output", "n": "ntasks", "N": "nodes", "D": "chdir"}


class BatchJob(Value, frozen=True, kw_only=True):
    """One job, or an array of them, with the values of sbatch's options. Paths are absolute."""

    name: str
    summary: str  # for readers of the script
    written_by: str  # shardwise and its version
    run_dir: str  # of a sweep the folder that holds the points
    workdir: str  # in which the job file's relative paths begin
    program_dir: str  # of the interpreter and of shardwise
    num_nodes: int = 1
    gres: str | None = None  # of each node: gpu:h100:8
    uses_gres_option: bool = False  # --gres in place of --gpus-per-node
    num_cores: int | None = None
    memory_bytes: int | None = None
    uses_whole_nodes: bool = True
    time_limit_s: int | None = None
    warning_s: int = MIN_WARNING_S
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    mail: str | None = None
    comment: str | None = None
    requeue: bool = True
    num_points: int | None = None  # of a sweep
    extra: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    container: Container | None = None
    is_offline: bool = False
    scratch: str | None = None  # node-local


def warning_s(*, step_s: float, save_s: float, time_limit_s: int | None) -> int:
    """Seconds of warning before the time limit: for a step, a save and a margin, at most half of the limit."""
    wanted = max(MIN_WARNING_S, round(step_s + save_s + MARGIN_S + EARLY_S))
    limit = MAX_WARNING_S if time_limit_s is None else min(MAX_WARNING_S, time_limit_s // 2)
    return min(wanted, limit)


def render_script(job: BatchJob) -> str:
    """The text of `train.sbatch`; InputError for a value that cannot arrive as it is."""
    options = [f"#SBATCH {sbatch_line(option)}" for option in sbatch_options(job)]
    script = f"{job.run_dir}/{SCRIPT_NAME}"
    head = [
        "#!/bin/bash -l" if job.modules else "#!/bin/bash",  # a login shell knows `module`
        f"# {_one_line(job.name)}: {_one_line(job.summary)}",
        f"# Written by {job.written_by}, and yours to edit. Submitted again it goes on from the newest checkpoint:",
        f"#   sbatch {shlex.quote(script)}",
        "",
    ]
    body = script_body(
        run_dir=job.run_dir,
        workdir=job.workdir,
        script=script,
        program_dir=job.program_dir,
        is_array=job.num_points is not None,
        modules=job.modules,
        container=job.container,
        is_offline=job.is_offline,
        scratch=job.scratch,
    )
    return "\n".join([*head, *options, "", body])


def sbatch_options(job: BatchJob) -> list[str]:
    """The options of sbatch, unquoted."""
    stated = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "comment": job.comment,
        "mail-user": job.mail,
    }
    for name, value in stated.items():
        if value is not None:
            _refuse_control(value, f"--{name}")
    options = [f"--{name}={value}" for name, value in stated.items() if value is not None]
    options += ["--mail-type=END,FAIL,REQUEUE"] if job.mail is not None else []
    options += [f"--nodes={job.num_nodes}", "--ntasks-per-node=1", *_devices(job), *_share(job)]
    options += [f"--time={format_duration(job.time_limit_s)}"] if job.time_limit_s is not None else []
    options += [f"--signal=B:USR1@{job.warning_s}", "--requeue" if job.requeue else "--no-requeue"]
    options += [f"--array=1-{job.num_points}"] if job.num_points is not None else []
    return [*options, *_places(job), *_checked_extra(job.extra)]


def sbatch_line(option: str) -> str:
    """One option as the text of a `#SBATCH` line; InputError if it cannot be one."""
    name, equals, value = option.partition("=") if option.startswith("--") else (option[:2], "", option[2:])
    _refuse_control(option, name)
    if not value or _PLAIN.fullmatch(value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _devices(job: BatchJob) -> list[str]:
    if job.gres is None:
        return []
    return [f"--gres={job.gres}"] if job.uses_gres_option else [f"--gpus-per-node={job.gres.removeprefix('gpu:')}"]


def _share(job: BatchJob) -> list[str]:
    if job.uses_whole_nodes:
        return ["--exclusive", "--mem=0"]
    cores = [f"--cpus-per-task={job.num_cores}"] if job.num_cores is not None else []
    memory = [f"--mem={-(-job.memory_bytes // MIB)}M"] if job.memory_bytes is not None else []
    return [*cores, *memory]


def _places(job: BatchJob) -> list[str]:
    """Options for the working directory and the output of the job."""
    for path, name in ((job.run_dir, "the run directory"), (job.workdir, "the working directory")):
        _refuse_control(path, name)
    if "\\" in job.run_dir:
        raise InputError(f"{job.run_dir}: Slurm cannot write to a path with a backslash; choose another --run-dir")
    folder = job.run_dir.replace("%", "%%")
    file = f"{folder}/slurm-%j.out" if job.num_points is None else f"{folder}/point-%a/slurm-%A_%a.out"
    return [f"--chdir={job.workdir}", f"--output={file}", "--open-mode=append"]


def _checked_extra(extra: Sequence[str]) -> list[str]:
    """Each as `--name=value`, `--name` or `-xvalue`; InputError for other text and for options that shardwise sets."""
    options = []
    for text in extra:
        long, short = _LONG.fullmatch(text.strip()), _SHORT.fullmatch(text.strip())
        if long is None and short is None:
            raise InputError(f"slurm.extra: {text!r} is not an option of sbatch, such as --constraint=a100")
        name, value = (long or short).groups()  # type: ignore[union-attr] # one of them matched
        if long is not None:
            options.append(f"--{name}" if value is None else f"--{name}={value}")
        else:
            name, value = _OWN_LETTERS.get(name, name), f"-{name}{value}"
            options.append(value)
        if name in _OWN_OPTIONS:
            raise InputError(f"slurm.extra: {text}: shardwise sets --{name} itself; remove it")
    return options


def _refuse_control(text: str, name: str) -> None:
    """InputError for line breaks, other control characters, and bytes that are not UTF-8."""
    found = next((each for each in text if unicodedata.category(each) in ("Cc", "Cs")), None)
    if found is not None:
        raise InputError(f"{name}: {text!r} holds {found!r}; a line of a batch script can hold no such character")


def _one_line(text: str) -> str:
    """The text for a comment: characters that could end its line become spaces."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text)
