"""The command line of `shardwise`: each option is declared once, as an annotated field of its command's options.

A command module imports its class from here, because this module loads little: `shardwise plan --help` must not load
what a plan needs. `COMMANDS` names the function that runs a command; `launch.cli` imports it when the command is given.
Annotations are text until the parser of a command reads those of its class.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from shardwise.trainer.spec.errors import InputError, close_matches
from shardwise.trainer.spec.value import Struct  # and no other of msgspec before it

LADDER_STEPS = 6
PROFILE_STEPS = 8


class _Argument:
    """Arguments of `add_argument` for a field: the flags of an option (none for a positional), and further settings."""

    def __init__(self, *flags: str, **settings: Any) -> None:  # noqa: ANN401 - argparse's own
        self.flags, self.settings = flags, settings

    def add_to(self, parser: argparse.ArgumentParser, name: str, defaults: dict[str, Any]) -> None:
        if not self.flags:
            more = {"default": defaults[name]} if name in defaults else {}
            parser.add_argument(name, **more, **self.settings)
            return
        settings = {"dest": name, "default": argparse.SUPPRESS, "required": name not in defaults, **self.settings}
        if "action" not in settings and "choices" not in settings:
            settings.setdefault("metavar", self.flags[-1].lstrip("-").replace("-", "_").upper())
        parser.add_argument(*self.flags, **settings)


def _switch(flag: str, text: str | None = None, *, value: bool = True, short: tuple[str, ...] = ()) -> _Argument:
    action = "store_true" if value else "store_false"
    return _Argument(*short, flag, action=action, help=text) if text else _Argument(*short, flag, action=action)


def _gpu_list(text: str) -> tuple[int, ...]:
    try:
        indices = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU indices such as 0,1") from None
    if any(index < 0 for index in indices) or len(set(indices)) != len(indices):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different GPU indices such as 0,1")
    return indices


def _size(text: str) -> int:
    from shardwise.trainer.spec.units import MIB, parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive size")
    if size < MIB:
        raise argparse.ArgumentTypeError(f"{text!r} is {size} bytes; write the unit, as in 8GiB")
    return size


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature, a number of 0 or more")
    return number


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 1 to 65535")
    return int(text)


def _number(flag: str, text: str) -> _Argument:
    return _Argument(flag, type=_positive, metavar="N", help=text)


def _file(flag: str, text: str) -> _Argument:
    return _Argument(flag, type=Path, metavar="FILE", help=text)


def _text(flag: str, metavar: str, text: str) -> _Argument:
    return _Argument(flag, metavar=metavar, help=text)


_JOB = _Argument(type=Path, help="job file")
_Job = Annotated[Path, _JOB]
_Overrides = Annotated[Sequence[str], _Argument(nargs="*", metavar="key=value", help="e.g. train.lr=1e-4")]
_Gpus = Annotated[tuple[int, ...] | None, _Argument("--gpus", type=_gpu_list, help="indices, e.g. 0,1")]
_Vram = Annotated[int | None, _Argument("--vram", type=_size, help="cap of each device, e.g. 8GiB")]
_Json = Annotated[bool, _switch("--json")]
_JsonOnly = Annotated[bool, _switch("--json", "the figures on stdout, everything else on stderr")]
_RunDir = Annotated[Path | None, _Argument("--run-dir", type=Path, help="default: runs/<name>-<UTC time>")]
_Run = _Argument(metavar="RUN_DIR", type=Path)
_NodeRank = Annotated[
    int | None, _Argument("--node-rank", type=int, metavar="I", help="number of this machine, from 0")
]
_Head = Annotated[str | None, _text("--head", "HOST[:PORT]", "the machine of rank 0, as the others reach it")]
_Take = Annotated[int, _number("--take", "put the N-th candidate first")]
_TRIAL = _number("--trial", "run the N best for a few steps and choose the fastest")
_DTYPES = ("fp32", "bf16", "fp16")


def _checkpoint(default: str) -> _Argument:
    return _text("--checkpoint", "best|last|step-N", f"default: {default}")


class InitOptions(Struct, frozen=True):
    model: Annotated[str, _Argument("--model", help="hub id, folder or preset")]
    data: Annotated[str, _Argument("--data", help="file, folder or hub id")]
    output: Annotated[Path, _Argument("-o", "--output", type=Path, help="default: job.yaml")] = Path("job.yaml")


class ProbeOptions(Struct, frozen=True):
    measure: Annotated[bool, _switch("--measure", "time disks, memory and matrix products as well")] = False
    nodes: Annotated[int | None, _number("--nodes", "with --measure on each of N machines: the network")] = None
    node_rank: _NodeRank = None
    head: _Head = None
    gpus: _Gpus = None
    as_json: _Json = False
    output: Annotated[Path | None, _Argument("-o", "--output", type=Path, help="save it for --hardware FILE")] = None


class PlanOptions(Struct, frozen=True):
    """The options of settings (`model_settings`) apply over the job file, and key=value over them."""

    job: Annotated[Path, _Argument(type=Path, metavar="JOB|MODEL", help="job file, or a hub id, folder or preset")]
    overrides: _Overrides = ()
    data: Annotated[str | None, _text("--data", "DATA", "file, folder or hub id; default: 20M tokens are assumed")] = (
        None
    )
    method: Annotated[str | None, _text("--method", "M", "full, lora, qlora or auto")] = None
    seq_len: Annotated[int | None, _number("--seq-len", "tokens a row")] = None
    allow: Annotated[
        str | None, _text("--allow", "A,B", "further opt-ins, e.g. bf16_weights,optimizer_8bit; the job's stay")
    ] = None
    forbid: Annotated[str | None, _text("--forbid", "A,B", "opt-ins to take away from those of the job")] = None
    vram_cap_bytes: _Vram = None
    gpus: _Gpus = None
    specs: Annotated[
        Sequence[str],
        _Argument(
            "--hardware",
            action="append",
            metavar="FILE|SPEC",
            help='plan for another machine: 8xH100-SXM5-80GB, "rtx 4060"; repeatable',
        ),
    ] = ()
    verbose: Annotated[bool, _switch("--verbose", "every section of the plan", short=("-v",))] = False
    show: Annotated[
        str | None, _text("--show", "A,B", "these sections: choice, memory, speed, why, methods, opt-ins, notes, ...")
    ] = None
    top: Annotated[int, _Argument("--top", type=_positive, help="number of runners-up to show; default: 3")] = 3
    take: _Take = 1
    simulate: Annotated[bool, _switch("--simulate", "check the choice by an exact dry run; loads torch")] = False
    trial: Annotated[int | None, _TRIAL] = None
    longest_seq: Annotated[bool, _switch("--longest-seq", "the longest sequence that fits")] = False
    largest_batch: Annotated[bool, _switch("--largest-batch", "the largest micro batch that fits")] = False
    largest_model: Annotated[bool, _switch("--largest-model", "the largest preset that fits")] = False
    html: Annotated[Path | None, _file("--html", "the plan as one page with charts")] = None
    engine_files: Annotated[
        Path | None,
        _Argument("--engine-files", type=Path, metavar="FOLDER", help="write Accelerate's and DeepSpeed's files there"),
    ] = None
    partition: Annotated[
        str | None, _text("--partition", "P", "plan for nodes of a Slurm partition, from a login node")
    ] = None
    nodes: Annotated[
        int | None,
        _number("--nodes", "number of nodes; default: slurm.nodes of the job, else 1"),
    ] = None
    constraint: Annotated[str | None, _text("--constraint", "FEATURES", "nodes with these features, as for sbatch")] = (
        None
    )
    as_json: _Json = False


class DataOptions(Struct, frozen=True):
    job: _Job
    overrides: Annotated[Sequence[str], _Argument(nargs="*", metavar="key=value", help="e.g. data.loss_on=all")] = ()


class EstimateOptions(Struct, frozen=True):
    cases: Annotated[Path, _Argument(type=Path, metavar="CASES.jsonl", help="one JSON object a line; - reads stdin")]


class TrainOptions(Struct, frozen=True):
    job: Annotated[Path, _Argument(type=Path, help="job file or plan.json")]
    overrides: _Overrides = ()
    vram_cap_bytes: _Vram = None
    gpus: _Gpus = None
    spec: Annotated[str | None, _text("--hardware", "NxCPU", "so many ranks on the CPU of this machine")] = None
    run_dir: _RunDir = None
    resume: Annotated[bool, _switch("--resume", "continue the newest run of this name, or --run-dir")] = False
    dry_run: Annotated[
        bool, _switch("--dry-run", "start nothing; with --run-dir, write what starts the run by hand")
    ] = False
    take: Annotated[int, _number("--take", "run the N-th candidate of the plan")] = 1
    here: Annotated[bool, _switch("--here", "train on a Slurm login node nevertheless")] = False
    trial: Annotated[int | None, _TRIAL] = None
    nodes: Annotated[int | None, _number("--nodes", "number of machines, without Slurm")] = None
    node_rank: _NodeRank = None
    head: _Head = None
    as_json: Annotated[bool, _switch("--json", "the report on stdout, everything else on stderr")] = False


class SubmitOptions(Struct, frozen=True):
    """The settings of slurm.* apply over the job file and key=value (`slurm_settings`)."""

    job: _Job
    overrides: _Overrides = ()
    partition: Annotated[str | None, _text("--partition", "P", "default: the cluster's")] = None
    nodes: Annotated[int | None, _number("--nodes", "default: 1")] = None
    gpus: Annotated[int | None, _number("--gpus-per-node", "default: all that a node has")] = None
    time: Annotated[str | None, _text("--time", "T", "limit of one job; default: the prediction with a margin")] = None
    account: Annotated[str | None, _text("--account", "A", "account to charge")] = None
    qos: Annotated[str | None, _text("--qos", "Q", "quality of service")] = None
    constraint: Annotated[str | None, _text("--constraint", "C", "features that nodes must have")] = None
    reservation: Annotated[str | None, _text("--reservation", "R", "reservation to use")] = None
    mail: Annotated[str | None, _text("--mail", "ADDRESS", "is notified when the job ends")] = None
    container: Annotated[str | None, _text("--container-image", "IMAGE", "docker://NAME, a .sqsh or a .sif file")] = (
        None
    )
    chain: Annotated[
        int | None,
        _number("--chain", "number of jobs, each resuming the one before it"),
    ] = None
    spec: Annotated[
        str | None,
        _text("--hardware", "FILE|SPEC", "facts about the nodes that Slurm does not report"),
    ] = None
    run_dir: _RunDir = None
    sweeps: Annotated[
        Sequence[str],
        _Argument("--sweep", action="append", metavar="key=a,b", help="one run a value, as one array; repeatable"),
    ] = ()
    dry_run: Annotated[bool, _switch("--dry-run", "print the script; nothing is written or submitted")] = False
    as_json: Annotated[bool, _switch("--json", "the result as JSON on stdout, everything else on stderr")] = False

    @property
    def slurm_settings(self) -> dict[str, str | int | None]:
        """Settings of the job file that options state, by path; None: not given."""
        names = ("partition", "nodes", "gpus", "time", "account", "qos", "constraint", "reservation")
        return {f"slurm.{name}": getattr(self, name) for name in (*names, "mail", "container", "chain")}


class FetchOptions(Struct, frozen=True):
    job: _Job
    overrides: Annotated[
        Sequence[str], _Argument(nargs="*", metavar="key=value", help="e.g. data.streaming=false")
    ] = ()
    prepare: Annotated[bool, _switch("--no-prepare", "do not make the token cache", value=False)] = True


class StatusOptions(Struct, frozen=True):
    run: Annotated[
        str | None, _Argument(nargs="?", metavar="RUN|JOBID", help="default: your runs in ./runs and in the queue")
    ] = None
    as_json: _Json = False
    sync: Annotated[bool, _switch("--sync", "send what was written offline to wandb")] = False


class LogsOptions(Struct, frozen=True):
    run: Annotated[str | None, _Argument(nargs="?", metavar="RUN|JOBID", help="default: the newest run in ./runs")] = (
        None
    )
    rank: Annotated[int | None, _Argument("--rank", type=_count, metavar="N", help="the log of this rank")] = None
    attempt: Annotated[int | None, _number("--attempt", "default: the newest")] = None
    follow: Annotated[bool, _switch("--follow", "until the run ends, or Ctrl-C", short=("-f",))] = False
    num_lines: Annotated[int, _Argument("-n", "--lines", type=_count, metavar="N", help="default: 50")] = 50


class WatchOptions(Struct, frozen=True):
    run: Annotated[str, _Argument(metavar="RUN|JOBID", help="a run directory, or the job of one")]
    once: Annotated[bool, _switch("--once", "show it once and end")] = False
    as_json: Annotated[bool, _switch("--json", "a line for each new step and each change of state")] = False


class LadderOptions(Struct, frozen=True):
    job: _Job
    overrides: _Overrides = ()
    vram_cap_bytes: _Vram = None
    gpus: _Gpus = None
    rungs: Annotated[str | None, _text("--rungs", "A,B,C", "values of pins: fp32,bf16-mixed,full,chunked,lora")] = None
    num_steps: Annotated[int, _number("--steps", f"of each run; default: {LADDER_STEPS}")] = LADDER_STEPS
    csv: Annotated[Path | None, _file("--csv", "the figures as CSV")] = None
    html: Annotated[Path | None, _file("--html", "the table and charts as one page")] = None
    as_json: _JsonOnly = False


class ProfileOptions(Struct, frozen=True):
    job: _Job
    overrides: _Overrides = ()
    vram_cap_bytes: _Vram = None
    gpus: _Gpus = None
    out: Annotated[
        Path | None, _Argument("--out", type=Path, metavar="DIR", help="default: runs/<name>-profile-<UTC time>")
    ] = None
    num_steps: Annotated[int, _number("--steps", f"default: {PROFILE_STEPS}")] = PROFILE_STEPS
    only_time: Annotated[bool, _switch("--time", "time alone, extrapolated to the whole job")] = False
    as_json: _JsonOnly = False


class CancelOptions(Struct, frozen=True):
    run: Annotated[str, _Argument(metavar="RUN|JOBID", help="a run, a sweep, or a job of one")]
    now: Annotated[bool, _switch("--now", "at once, without a checkpoint")] = False


class DoctorOptions(Struct, frozen=True):
    job: Annotated[Path | None, _Argument(type=Path, nargs="?", help="job file: its needs are checked too")] = None
    overrides: Annotated[Sequence[str], _Argument(nargs="*", metavar="key=value", help="e.g. train.seq_len=8192")] = ()
    quick: Annotated[bool, _switch("--quick", "skip checks that take more than a second")] = False
    as_json: _Json = False


class CacheOptions(Struct, frozen=True):
    remove: Annotated[
        Sequence[str],
        _Argument("--rm", nargs="+", metavar="NAME", help="remove folders or entries, e.g. data operators/NAME"),
    ] = ()
    as_json: _Json = False


class ReportOptions(Struct, frozen=True):
    run_dirs: Annotated[
        Sequence[Path],
        _Argument(type=Path, nargs="+", metavar="RUN_DIR", help="several, or a sweep's, are shown side by side"),
    ]
    html: Annotated[Path | None, _file("--html", "the report as one page with charts")] = None
    share: Annotated[Path | None, _file("--share", "append an anonymous row of figures; nothing is sent")] = None
    as_json: _Json = False


class UiOptions(Struct, frozen=True):
    folder: Annotated[
        Path,
        _Argument(
            type=Path,
            nargs="?",
            metavar="FOLDER|FILE",
            help="runs, or one run; default: runs; a job or a config.json opens the plan explorer with it",
        ),
    ] = Path("runs")
    port: Annotated[
        int | None, _Argument("--port", type=_port, metavar="N", help="default: 8642, or a free one if that is in use")
    ] = None
    opens_browser: Annotated[bool, _switch("--no-browser", "only print the address", value=False)] = True
    allows_actions: Annotated[
        bool, _switch("--allow-actions", "pages may stop runs, ask models, start the job FILE")
    ] = False


class ExportOptions(Struct, frozen=True):
    run_dir: Annotated[Path, _Run]
    output: Annotated[Path, _Argument(type=Path, metavar="OUT")]
    merge: Annotated[bool, _switch("--merge", "merge adapters into their base: one whole model")] = False
    format: Annotated[
        str, _Argument("--format", choices=("hf", "onnx", "gguf"), help="hf: a Hugging Face folder, the default")
    ] = "hf"
    dtype: Annotated[
        str | None, _Argument("--dtype", choices=_DTYPES, help="default: as trained; of merged weights, the base's")
    ] = None
    quant: Annotated[
        str | None, _Argument("--quant", choices=("q8_0", "q4_0", "f16"), help="with --format gguf; default: q8_0")
    ] = None
    checkpoint: Annotated[str | None, _checkpoint("the last; of a job with eval.early_stop, the best")] = None
    push: Annotated[str | None, _text("--push", "USER/NAME", "upload it to the Hugging Face hub, private")] = None
    public: Annotated[bool, _switch("--public", "with --push: visible to all users")] = False
    check: Annotated[bool, _switch("--no-check", "do not load it again to compare its logits", value=False)] = True
    as_json: _Json = False


class ImportOptions(Struct, frozen=True):
    checkpoint: Annotated[Path, _Argument(type=Path, metavar="CHECKPOINT", help="the folder that was saved")]
    output: Annotated[Path, _Argument(type=Path, metavar="OUT")]
    kind: Annotated[
        str | None,
        _Argument(
            "--kind",
            choices=("huggingface", "trainer", "accelerate", "deepspeed", "dcp", "peft"),
            help="the library that wrote it; default: recognized by its files",
        ),
    ] = None
    config: Annotated[
        str | None,
        _text("--config", "FOLDER|HUB-ID|PRESET", "the model; default: CHECKPOINT/config.json"),
    ] = None
    base: Annotated[str | None, _text("--base", "FOLDER|HUB-ID", "the model that an adapter is merged into")] = None
    dtype: Annotated[str | None, _Argument("--dtype", choices=_DTYPES, help="default: as it was saved")] = None
    as_json: _Json = False


class ChatOptions(Struct, frozen=True):
    run_dir: Annotated[Path, _Run]
    checkpoint: Annotated[str | None, _checkpoint("the run's export, else as for export")] = None
    max_new_tokens: Annotated[int, _number("--max-new-tokens", "of a reply; default: 512")] = 512
    temperature: Annotated[
        float | None,
        _Argument("--temperature", type=_temperature, metavar="T", help="0 selects the likeliest token each time"),
    ] = None
    system: Annotated[str | None, _text("--system", "TEXT", "a system message for the chat template")] = None


class WorkspaceOptions(Struct, frozen=True):
    project: Annotated[str | None, _text("--project", "P", "default: shardwise, as of a job that names none")] = None
    entity: Annotated[
        str | None,
        _text("--entity", "E", "owner of the project; default: WANDB_ENTITY, else your own"),
    ] = None


class SchemaOptions(Struct, frozen=True):
    pass


class Command(Struct, frozen=True):
    """`run` is called with the options, a console on stdout, and, if `has_notes`, one on stderr.

    A command that `needs_output` ends if stdout is closed or full; others go on to their own end.
    """

    options: Any
    run: str  # module under shardwise.launch:function
    text: str
    has_notes: bool = False
    needs_output: bool = True


COMMANDS = {
    "init": Command(InitOptions, "commands.housekeeping:run_init", "write a commented job file", needs_output=False),
    "probe": Command(ProbeOptions, "commands.housekeeping:run_probe", "show what this machine offers"),
    "plan": Command(PlanOptions, "commands.plan:run_plan", "choose a strategy and explain it; nothing is started"),
    "data": Command(
        DataOptions, "commands.data:run_data", "prepare the data, show the first example as the model sees it"
    ),
    "estimate": Command(
        EstimateOptions, "commands.estimate:run_estimate", "memory and speed of cases that pin everything"
    ),
    "train": Command(
        TrainOptions, "commands.train:run_train", "plan, train, evaluate, export, report", needs_output=False
    ),
    "submit": Command(
        SubmitOptions,
        "commands.cluster:run_submit",
        "plan for a Slurm partition, write train.sbatch, submit it",
        has_notes=True,
        needs_output=False,
    ),
    "fetch": Command(
        FetchOptions,
        "commands.cluster:run_fetch",
        "download everything that a job needs from a network: weights, data, tokens",
        needs_output=False,
    ),
    "status": Command(
        StatusOptions, "commands.follow:run_status", "state of runs: queue, step, loss, speed, time left"
    ),
    "logs": Command(
        LogsOptions, "commands.follow:run_logs", "last lines that a run logged, and with -f new lines as well"
    ),
    "watch": Command(WatchOptions, "commands.follow:run_watch", "the live view of a run, from another shell"),
    "ladder": Command(
        LadderOptions,
        "commands.measure:run_ladder",
        "savings of each technique here, switched on one after the other",
        has_notes=True,
    ),
    "profile": Command(
        ProfileOptions,
        "commands.measure:run_profile",
        "memory and time of the parts of a step, and duration of the job",
        has_notes=True,
    ),
    "cancel": Command(
        CancelOptions,
        "commands.follow:run_cancel",
        "have a run save a checkpoint and end, with all of its jobs",
        needs_output=False,
    ),
    "doctor": Command(
        DoctorOptions, "doctor.command:run_doctor", "problems here that would make training fail or slow, with remedies"
    ),
    "cache": Command(
        CacheOptions,
        "commands.cache:run_cache",
        "list what is stored outside of runs, or remove what can be made again",
    ),
    "report": Command(ReportOptions, "commands.report:run_report", "predicted and measured figures of runs"),
    "ui": Command(
        UiOptions, "commands.ui.server:run_ui", "web pages on this machine: runs, live, compared, and a plan explorer"
    ),
    "export": Command(
        ExportOptions,
        "commands.convert:run_export",
        "write a folder that other libraries load, from a run",
        needs_output=False,
    ),
    "import": Command(
        ImportOptions,
        "commands.convert:run_import",
        "make a foreign checkpoint a folder to train from",
        needs_output=False,
    ),
    "chat": Command(ChatOptions, "commands.convert:run_chat", "chat with the model of a run"),
    "workspace": Command(
        WorkspaceOptions,
        "track.workspace:run_workspace",
        "save charts of memory and throughput in a wandb project",
        needs_output=False,
    ),
    "schema": Command(SchemaOptions, "commands.housekeeping:run_schema", "print the JSON Schema of the job file"),
}


REPLACED = {  # commands and options of the last version, and what replaces them
    **dict.fromkeys(
        ("cache --prune", "cache --older-than", "cache --dry-run"),
        "`shardwise cache` lists sizes and last use, and `shardwise cache --rm NAME ...` removes what it names",
    ),
    "workspace --json": "the package wandb-workspaces reads and changes a saved view",
}


GROUPS = {  # of `shardwise --help`, in the order of a first session
    "start": ("init", "data", "plan", "train", "submit", "fetch"),
    "watch": ("status", "watch", "logs", "ui", "cancel"),
    "results": ("report", "chat", "export", "import", "workspace"),
    "machine": ("doctor", "probe", "profile", "ladder", "estimate", "cache", "schema"),
}


class _HelpFormatter(argparse.HelpFormatter):
    """Commands in their groups."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        commands = {each.dest: each for each in action._get_subactions()}
        return "\n".join(self._format_group(title, [commands[name] for name in GROUPS[title]]) for title in GROUPS)

    def _format_group(self, title: str, commands: Iterable[argparse.Action]) -> str:
        heading = f"{' ' * self._current_indent}{title}\n"
        self._indent()
        lines = [super(_HelpFormatter, self)._format_action(each) for each in commands]
        self._dedent()
        return heading + "".join(lines)


class _Parser(argparse.ArgumentParser):
    """Errors as one line with exit code 2, and no abbreviated options."""

    def __init__(self, **kwargs: object) -> None:
        formatter = partial(argparse.HelpFormatter, width=80)  # of options that are only declared
        super().__init__(allow_abbrev=False, formatter_class=formatter, **kwargs)  # type: ignore[arg-type] # argparse's own, from add_parser

    def format_help(self) -> str:
        self.formatter_class = _HelpFormatter  # it reads the width of the terminal
        return super().format_help()

    @property
    def version(self) -> str:
        """The text of `--version`, which argparse reads when it prints it."""
        from shardwise.launch.probe.installed import installed_version

        return f"shardwise {installed_version('shardwise') or 'unknown'}"

    def error(self, message: str) -> None:  # type: ignore[override] # argparse declares NoReturn; raising is that
        raise InputError(f"{message}; see {self.prog} --help")


def parse_command_line(arguments: list[str]) -> tuple[Command, Any]:
    """The command and its options; raises InputError for unknown arguments.

    `key=value` may follow options, where argparse alone would refuse it.
    """
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and first[:1] not in ("", "-"):
        meant = close_matches(first, COMMANDS)
        if first in REPLACED:
            raise InputError(f"shardwise {first} is replaced: {REPLACED[first]}")
        hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(COMMANDS)}"
        raise InputError(f"{first[:60]} is no command; {hint}")
    found, rest = build_parser([first] if first in COMMANDS else COMMANDS).parse_known_args(arguments)
    given = vars(found)
    name = given.pop("command")
    unknown = [argument for argument in rest if argument.startswith("-") or "overrides" not in given]
    if unknown:
        for option in (f"{name} {argument.partition('=')[0]}" for argument in unknown):
            if option in REPLACED:
                raise InputError(f"shardwise {option} is replaced: {REPLACED[option]}")
        hint = _settings_meant(arguments, unknown) if "overrides" in given else ""
        raise InputError(f"unrecognized arguments: {' '.join(unknown)}; {hint or f'see shardwise {name} --help'}")
    if rest:
        given["overrides"] = [*given["overrides"], *rest]
    return COMMANDS[name], COMMANDS[name].options(**given)


def _settings_meant(arguments: Sequence[str], unknown: Sequence[str]) -> str:
    """Settings that unknown options stand for, as key=value; nothing if one of them has no such setting."""
    from shardwise.trainer.spec.job.fields import children
    from shardwise.trainer.spec.job.reading import meant_setting

    found = []
    for option in unknown:
        name, _, value = option.lstrip("-").partition("=")
        setting = meant_setting("", name.replace("-", "_"))
        if setting is None:
            return ""
        following = "".join(arguments[arguments.index(option) + 1 :][:1])
        value = value or (following if following and not following.startswith("-") else "...")
        setting = next(iter(children(setting)), setting)  # of a section, what it is about
        found.append(setting if "=" in setting else f"{setting}={value}")
    return f"did you mean {shlex.join(found)}?"


def build_parser(names: Iterable[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The command line with the commands of `names`; a start builds only its own."""
    parser = _Parser(
        prog="shardwise",
        description="Trains language models on the hardware that is available.",
        epilog="Exit codes: 0 done, 1 internal error, 2 input, 3 nothing fits, 4 environment, 5 out of memory, "
        "75 stopped to be requeued, 130 Ctrl-C, or a spent limit, after a saved checkpoint. --debug shows tracebacks.",
    )
    parser.add_argument("--version", action="version")
    commands = parser.add_subparsers(  # without `prog` it would query the width of the terminal
        dest="command", metavar="COMMAND", title="commands", required=True, parser_class=_Parser, prog=parser.prog
    )
    for name in names:
        command = COMMANDS[name]
        subparser = commands.add_parser(name, help=command.text)
        annotations = get_type_hints(command.options, include_extras=True)
        defaults = dict(zip(reversed(annotations), reversed(command.options.__struct_defaults__), strict=False))
        for field, annotation in annotations.items():
            annotation.__metadata__[0].add_to(subparser, field, defaults)
    return parser
