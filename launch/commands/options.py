"""What may stand on the command line of `shardwise`: commands, options, the types of their values."""

import argparse
from pathlib import Path

from trainer.spec.errors import InputError

SUBMIT_SETTINGS = {  # options of submit, by name: the setting that each is, and its words
    "partition": ("slurm.partition", "P", "default: the cluster's"),
    "nodes": ("slurm.nodes", "N", "default: 1"),
    "gpus-per-node": ("slurm.gpus", "N", "default: all that a node has"),
    "time": ("slurm.time", "T", "of one job; default: what is predicted, with a margin"),
    "account": ("slurm.account", "A", "whom the job is charged to"),
    "qos": ("slurm.qos", "Q", "quality of service"),
    "constraint": ("slurm.constraint", "C", "features that nodes must have"),
    "reservation": ("slurm.reservation", "R", "nodes that were set aside"),
    "mail": ("slurm.mail", "ADDRESS", "told when the job ends"),
    "container-image": ("slurm.container", "IMAGE", "docker://NAME, a .sqsh or a .sif file"),
    "chain": ("slurm.chain", "N", "so many jobs, each going on where the one before it stopped"),
}


class _Parser(argparse.ArgumentParser):
    """Errors as one line with exit code 2, and no abbreviated options."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(allow_abbrev=False, **kwargs)  # type: ignore[arg-type] # argparse's own, from add_parser

    def error(self, message: str) -> None:  # type: ignore[override] # argparse says NoReturn; raising is that
        raise InputError(f"{message}; see {self.prog} --help")


def parse_words(words: list[str]) -> argparse.Namespace:
    """The command and its options; InputError for what is not understood.

    `key=value` words may stand after options, where argparse alone would refuse them.
    """
    options, rest = build_parser().parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        raise InputError(f"unrecognized arguments: {' '.join(unknown)}; see shardwise {options.command} --help")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="shardwise",
        description="Trains language models on whatever hardware is there.",
        epilog="Exit codes: 0 done, 1 internal error, 2 input, 3 nothing fits, 4 environment, 5 out of memory, "
        "75 stopped to be requeued, 130 Ctrl-C, or a spent limit, after a saved checkpoint. --debug shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"shardwise {_version()}")
    commands = parser.add_subparsers(  # without `prog` it would ask shutil how wide the terminal is
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser, prog=parser.prog
    )
    _add_init(commands.add_parser("init", help="write a commented job file"))
    _add_probe(commands.add_parser("probe", help="show what this machine offers"))
    _add_plan(commands.add_parser("plan", help="choose a strategy and say why; nothing is started"))
    _add_data(commands.add_parser("data", help="prepare the data, show the first example as the model sees it"))
    _add_estimate(commands.add_parser("estimate", help="memory and speed of cases that pin everything"))
    _add_train(commands.add_parser("train", help="plan, train, evaluate, export, report"))
    _add_submit(commands.add_parser("submit", help="plan for a Slurm partition, write train.sbatch, submit it"))
    _add_fetch(
        commands.add_parser("fetch", help="get everything that a job needs from a network: weights, data, tokens")
    )
    _add_status(commands.add_parser("status", help="how runs stand: queue, step, loss, speed, time left"))
    _add_logs(commands.add_parser("logs", help="what a run said last, and with -f what it says from now on"))
    _add_watch(commands.add_parser("watch", help="the live view of a run, from another shell"))
    _add_ladder(commands.add_parser("ladder", help="what each technique saves here, one switched on after the other"))
    _add_profile(commands.add_parser("profile", help="where memory and time of a step go, and how long the job takes"))
    _add_cancel(commands.add_parser("cancel", help="have a run save a checkpoint and end, with all of its jobs"))
    _add_doctor(commands.add_parser("doctor", help="what here would make training fail or slow, and what mends it"))
    _add_cache(commands.add_parser("cache", help="what is kept outside of runs, and freeing what can be made again"))
    _add_report(commands.add_parser("report", help="predicted beside measured"))
    _add_export(commands.add_parser("export", help="write a folder that others load, from a run"))
    _add_import(commands.add_parser("import", help="make a foreign checkpoint a folder to train from"))
    _add_chat(commands.add_parser("chat", help="talk to what a run trained"))
    _add_workspace(commands.add_parser("workspace", help="save charts of memory and throughput in a wandb project"))
    commands.add_parser("schema", help="print the JSON Schema of the job file")
    return parser


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="hub id, folder or preset")
    parser.add_argument("--data", required=True, help="file, folder or hub id")
    parser.add_argument("-o", "--output", type=Path, default=Path("job.yaml"), help="default: job.yaml")


def _add_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="time disks, memory and matrix products as well")
    parser.add_argument("--gpus", type=_gpu_list, help="indices, e.g. 0,1")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="keep it for --hardware FILE")


def _add_job(parser: argparse.ArgumentParser, *, also: str = "") -> None:
    parser.add_argument("job", type=Path, help=f"job file{also}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.lr=1e-4")
    parser.add_argument("--vram", type=_size, help="cap of each device, e.g. 8GiB")
    parser.add_argument("--gpus", type=_gpu_list, help="indices, e.g. 0,1")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. data.loss_on=all")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument(
        "--hardware",
        action="append",
        metavar="FILE|SPEC",
        help="plan for another machine: 8xH100-SXM5-80GB; repeatable",
    )
    parser.add_argument("--top", type=_positive, default=3, help="how many runners-up to show")
    parser.add_argument("--take", type=_positive, default=1, metavar="N", help="put the N-th candidate first")
    parser.add_argument("--simulate", action="store_true", help="check the choice by an exact dry run; loads torch")
    parser.add_argument("--trial", type=_positive, metavar="N", help="run the N best for a few steps, take the fastest")
    parser.add_argument("--longest-seq", action="store_true", help="the longest sequence that fits")
    parser.add_argument("--largest-batch", action="store_true", help="the largest micro batch that fits")
    parser.add_argument("--largest-model", action="store_true", help="the largest preset that fits")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the plan as one page with charts")
    parser.add_argument("--partition", metavar="P", help="plan for nodes of a Slurm partition, from a login node")
    parser.add_argument("--nodes", type=_positive, metavar="N", help="so many; default: slurm.nodes of the job, else 1")
    parser.add_argument("--constraint", metavar="FEATURES", help="nodes with these features, as for sbatch")
    parser.add_argument("--json", action="store_true")


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", type=Path, metavar="CASES.jsonl", help="one JSON object a line; - reads stdin")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_job(parser, also=" or plan.json")
    parser.add_argument("--run-dir", type=Path, help="default: runs/<name>-<UTC time>")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the newest run of this name, or with --run-dir"
    )
    parser.add_argument("--dry-run", action="store_true", help="write the run directory, start nothing")
    parser.add_argument("--take", type=_positive, default=1, metavar="N", help="run the N-th candidate of the plan")
    parser.add_argument("--here", action="store_true", help="train on a Slurm login node all the same")
    parser.add_argument("--trial", type=_positive, metavar="N", help="run the N best for a few steps, take the fastest")
    parser.add_argument("--nodes", type=_positive, metavar="N", help="several machines without Slurm: how many")
    parser.add_argument("--node-rank", type=int, metavar="I", help="which of them this one is, from 0")
    parser.add_argument("--head", metavar="HOST[:PORT]", help="the machine of rank 0, as the others reach it")
    parser.add_argument("--json", action="store_true", help="the report on stdout, everything else on stderr")


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.lr=1e-4")
    for name, (setting, metavar, says) in SUBMIT_SETTINGS.items():
        kind = _positive if metavar == "N" else str
        parser.add_argument(f"--{name}", type=kind, dest=setting, metavar=metavar, help=says)
    parser.add_argument("--hardware", metavar="FILE|SPEC", help="states what Slurm does not say of the nodes")
    parser.add_argument("--run-dir", type=Path, help="default: runs/<name>-<UTC time>")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="key=a,b", help="one run a value, as one array; repeatable"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script; nothing is written or submitted")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout, everything else on stderr")


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. data.streaming=false")
    parser.add_argument("--no-prepare", action="store_true", help="do not make the token cache")


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN|JOBID", help="default: your runs in ./runs and in the queue")
    parser.add_argument("--sync", action="store_true", help="send what was written offline to wandb")
    parser.add_argument("--json", action="store_true")


def _add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN|JOBID", help="default: the newest run in ./runs")
    parser.add_argument("--rank", type=_count, metavar="N", help="the log of this rank")
    parser.add_argument("--attempt", type=_positive, metavar="N", help="default: the newest")
    parser.add_argument("-f", "--follow", action="store_true", help="until the run ends, or Ctrl-C")
    parser.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="default: 50")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|JOBID", help="a run directory, or the job of one")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument("--json", action="store_true", help="a line for each new step and each change of state")


def _add_ladder(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument("--rungs", metavar="A,B,C", help="values of pins: fp32,bf16-mixed,full,chunked,lora")
    parser.add_argument("--steps", type=_positive, default=6, metavar="N", help="of each rung; default: 6")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the figures as CSV")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the table and charts as one page")
    parser.add_argument("--json", action="store_true", help="the figures on stdout, everything else on stderr")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/<name>-profile-<UTC time>")
    parser.add_argument("--steps", type=_positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--time", action="store_true", help="time alone, extrapolated to the whole job")
    parser.add_argument("--json", action="store_true", help="the figures on stdout, everything else on stderr")


def _add_cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|JOBID", help="a run, a sweep, or a job of one")
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, nargs="?", help="job file: what it needs is looked for too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.seq_len=8192")
    parser.add_argument("--quick", action="store_true", help="without what takes more than a second")
    parser.add_argument("--json", action="store_true")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prune", action="store_true", help="free what is stale and can be made again")
    parser.add_argument("--older-than", type=_count, metavar="DAYS", help="what was not used for so long; default: 30")
    parser.add_argument("--dry-run", action="store_true", help="with --prune: show it, free nothing")
    parser.add_argument("--json", action="store_true")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="several, or a sweep's, are shown side by side"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="the report as one page with charts")
    parser.add_argument("--json", action="store_true")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("output", type=Path, metavar="OUT")
    parser.add_argument("--merge", action="store_true", help="adapters merged into their base: one whole model")
    parser.add_argument("--format", choices=("hf", "onnx"), default="hf", help="hf: a Hugging Face folder")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="default: as trained; of merged weights, the base's"
    )
    _add_checkpoint(parser, default="the last; of a job with eval.early_stop, the best")
    parser.add_argument("--push", metavar="USER/NAME", help="upload it to the Hugging Face hub, private")
    parser.add_argument("--public", action="store_true", help="with --push: for everybody to see")
    parser.add_argument("--no-check", action="store_true", help="do not load it again to compare its logits")
    parser.add_argument("--json", action="store_true")


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder that was saved")
    parser.add_argument("output", type=Path, metavar="OUT")
    kinds = ("huggingface", "trainer", "accelerate", "deepspeed", "dcp", "peft")
    parser.add_argument("--kind", choices=kinds, help="what wrote it; default: told by its files")
    parser.add_argument("--config", metavar="FOLDER|HUB-ID|PRESET", help="the model; default: CHECKPOINT/config.json")
    parser.add_argument("--base", metavar="FOLDER|HUB-ID", help="the model that an adapter is merged into")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: as it was saved")
    parser.add_argument("--json", action="store_true")


def _add_workspace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", metavar="P", help="default: shardwise, as of a job that names none")
    parser.add_argument("--entity", metavar="E", help="whose project; default: WANDB_ENTITY, else your own")
    parser.add_argument("--json", action="store_true", help="print the view; nothing is asked or sent")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    _add_checkpoint(parser, default="the run's export, else as for export")
    parser.add_argument("--max-new-tokens", type=_positive, default=512, metavar="N", help="of an answer")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="0 takes the likeliest token each time")
    parser.add_argument("--system", metavar="TEXT", help="a system message for the chat template")


def _add_checkpoint(parser: argparse.ArgumentParser, *, default: str) -> None:
    parser.add_argument("--checkpoint", metavar="best|last|step-N", help=f"default: {default}")


def _version() -> str:
    from launch.probe.installed import installed_version

    return installed_version("shardwise") or "unknown"


def _gpu_list(text: str) -> tuple[int, ...]:
    try:
        indices = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU indices such as 0,1") from None
    if any(index < 0 for index in indices) or len(set(indices)) != len(indices):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different GPU indices such as 0,1")
    return indices


def _size(text: str) -> int:
    from trainer.spec.units import MIB, parse_bytes

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
