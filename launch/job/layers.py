"""The job as four layers, each over the one before (site, person, job file, `key=value`), and the points of a sweep.

A site's file (`$SHARDWISE_SITE_CONFIG`) and a person's (`~/.config/shardwise/config.yaml`) hold settings of a machine
rather than of a job: `price_per_gpu_hour`, `log.wandb`, `log.notify`, `slurm` and, in a section that no job has,

    folders: {cache: /scratch/me/shardwise, huggingface: /shared/hf, scratch: /scratch/me}

Every problem of every layer is reported at once, under its file's name or `command line`. `--sweep key=a,b` gives every
combination of its values.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.launch.job.yaml_text import name_of_file, read_yaml, read_yaml_file, write_scalar
from shardwise.trainer.spec.errors import InputError, InputProblemsError, close_matches
from shardwise.trainer.spec.job.fields import BY_PATH, job_tree
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.job.reading import Change, Layer, read_layers
from shardwise.trainer.spec.job.sections import Job, without_url
from shardwise.trainer.spec.messages.submission import FILE_NAME as SUBMISSION_NAME
from shardwise.trainer.spec.value import Value

PERSONAL_SETTINGS = ("price_per_gpu_hour", "log.wandb", "log.notify", "slurm")
FOLDERS = ("cache", "huggingface", "scratch")
COMMAND_LINE = "command line"
REMOVED_OPT_INS = "allow-="  # begins an override
_STAMP = r"-\d{8}-\d{6}(-\d+)?$"  # of a run directory
DEFAULT = "default"
MOST_POINTS = 1000  # of an array under Slurm's default MaxArraySize 1001
_OPENING, _CLOSING = "[{(", "]})"


class ResolvedJob(Value, frozen=True, kw_only=True):
    """The job of a command, and the origin of each setting.

    `tree` is the job in the job file's spelling, complete. `sources` maps each written setting to its file, or to
    `command line`; the others have their default. `name` is the job file's, for the run directory.
    """

    job: Job
    tree: dict[str, Any]
    sources: dict[str, str]
    name: str
    folders: dict[str, str] = {}  # cache, huggingface, scratch: absolute, from a site's or a person's file


def read_job_layers(
    job_path: Path | None, overrides: Sequence[str], *, config_home: Path, site_config: Path | None
) -> ResolvedJob:
    """The job of a command; raises InputProblemsError with every problem of any layer.

    `config_home` is the folder of the person's config.yaml, which need not exist; `site_config` must, if it is given.
    Without a job file the overrides alone are the job.
    """
    problems: list[str] = []
    folders: dict[str, str] = {}
    layers = [_personal_layer(path, folders, problems) for path in _personal_files(config_home, site_config)]
    job_layer = None if job_path is None else _job_layer(job_path, config_home, problems)
    layers += [job_layer] if job_layer is not None else []
    layers += _override_layers(overrides, problems)
    origin = COMMAND_LINE if job_path is None else name_of_file(job_path)
    # Settings of an unreadable job file are not missing.
    checks_clashes = job_path is None or job_layer is not None
    try:
        reading = read_layers(layers, origin=origin, checks_clashes=checks_clashes)
    except InputProblemsError as error:
        raise InputProblemsError((*problems, *error.problems)) from None
    if problems:
        raise InputProblemsError(problems)
    return ResolvedJob(
        job=reading.job,
        tree=job_tree(reading.job),
        sources=reading.sources,
        name=_name_of_job(job_path),
        folders=folders,
    )


def read_personal_folders(*, config_home: Path, site_config: Path | None) -> dict[str, str]:
    """Folders of a site's and a person's file, for a command without a job; raises InputProblemsError."""
    problems: list[str] = []
    folders: dict[str, str] = {}
    for path in _personal_files(config_home, site_config):
        _personal_layer(path, folders, problems)
    if problems:
        raise InputProblemsError(problems)
    return folders


def render_resolved(resolved: ResolvedJob, *, has_url: bool = True) -> str:
    """The run directory's job.yaml: every setting with its origin; reads back to the same job.

    Without `has_url` it has the host of a literal `log.notify` alone: such a file is not for another start of the run.
    """
    lines = ["# The job as it ran: every setting, and where its value is from."]
    tree = resolved.tree if has_url else job_tree(without_url(resolved.job))
    _render_section(tree, "", resolved.sources, lines)
    return "\n".join(lines) + "\n"


def _personal_files(config_home: Path, site_config: Path | None) -> list[Path]:
    person = config_home / "config.yaml"
    try:
        has_person = person.exists()
    except OSError:  # no permission: reading it reports the reason
        has_person = True
    return [*([site_config] if site_config is not None else []), *([person] if has_person else [])]


def _personal_layer(path: Path, folders: dict[str, str], problems: list[str]) -> Layer:
    origin = name_of_file(path)
    tree = dict(_read_tree(path, problems) or {})
    named = tree.pop("folders", None) or {}
    if not isinstance(named, Mapping):
        problems.append(f"{origin}: folders is {shown(named)}; expected folders: {{cache: /a/folder}}")
        named = {}
    for name, folder in named.items():
        problem = _folder_problem(name, folder)
        if problem is None:
            folders[name] = str(Path(folder).expanduser())
        else:
            problems.append(f"{origin}: {problem}")
    return Layer(tree, origin, allowed=(*PERSONAL_SETTINGS, "folders"))


def _folder_problem(name: object, folder: object) -> str | None:
    if name not in FOLDERS:
        meant = close_matches(str(name), FOLDERS)
        hint = f"did you mean folders.{meant[0]}?" if meant else f"folders has {', '.join(FOLDERS)}"
        return f"folders.{name} is not a setting; {hint}"
    if not isinstance(folder, str) or not folder.startswith(("/", "~/")):
        return f'folders.{name} is {shown(folder)}; expected a folder that begins with "/" or "~/"'
    return None


def _job_layer(path: Path, config_home: Path, problems: list[str]) -> Layer | None:
    kind = _OTHER_FILES.get(path.suffix.lower()) if path.is_file() else None
    if kind is not None:
        problems.append(f"{name_of_file(path)}: {kind.format(data=shlex.quote(str(path)))}")
        return None
    readable = _read_tree(path, problems, is_job=True)
    if readable is None:
        return None
    tree = dict(readable)
    other = _other_trainer(tree)
    if other is not None:
        problems.append(f"{name_of_file(path)}: {other}")
        return None
    if tree.pop("folders", None) is not None:
        problems.append(f"{name_of_file(path)}: folders belongs in {config_home / 'config.yaml'}, not in a job")
    return Layer(tree, name_of_file(path))


_IS_DATA = "is data, not a job; shardwise init --model MODEL --data {data} writes a job"
_OTHER_FILES = {
    **dict.fromkeys((".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst"), _IS_DATA),
    **dict.fromkeys(
        (".py", ".ipynb", ".sh"),
        "is a script, not a job; shardwise plan MODEL plans for one (docs/guide/own-script.md), and "
        "shardwise init --model MODEL --data FILE writes a job",
    ),
    ".safetensors": "is a file of weights, not a job; shardwise plan FOLDER plans for its model",
}
# Keys of a configuration, the first for the model, the second for the data, by trainer.
_OTHER_TRAINERS = {
    "Axolotl": ("base_model", "datasets", ("adapter", "sequence_len", "micro_batch_size", "sample_packing")),
    "LLaMA-Factory": ("model_name_or_path", "dataset", ("stage", "finetuning_type", "cutoff_len", "template")),
    "TRL": ("model_name_or_path", "dataset_name", ("trl_version", "max_length", "use_peft", "learning_rate")),
}


def _other_trainer(tree: Mapping[str, Any]) -> str | None:
    """A sentence on a configuration of another trainer, with the command that writes the job for its model and data."""
    for trainer, (model, data, further) in _OTHER_TRAINERS.items():
        if model in tree and (data in tree or not tree.keys().isdisjoint(further)):
            rows = tree.get(data)
            first = rows[0] if isinstance(rows, list) and rows else rows
            path = first.get("path") if isinstance(first, Mapping) else first
            names = [
                str(each) if isinstance(each, str) and each else name
                for each, name in ((tree[model], "MODEL"), (path, "FILE"))
            ]
            command = shlex.join(["shardwise", "init", "--model", names[0], "--data", names[1]])
            return f"is a configuration of {trainer}, not a job; {command} writes a job for its model and data"
    return None


def _read_tree(path: Path, problems: list[str], *, is_job: bool = False) -> Mapping[str, Any] | None:
    """The settings in a file; None, and another problem, if it cannot be read."""
    try:
        tree = read_yaml_file(path)
    except InputError as error:
        problems.append(str(error))
        return None
    if isinstance(tree, Mapping):
        return tree
    if tree is None and not is_job:
        return {}
    wrong = "is empty" if tree is None else f"holds {shown(tree)}, not settings"
    problems.append(f"{name_of_file(path)}: {wrong}; shardwise init --model MODEL --data FILE writes a job")
    return None


def _override_layers(overrides: Sequence[str], problems: list[str]) -> list[Layer]:
    layers = []
    for override in overrides:
        try:
            removes = override.startswith(REMOVED_OPT_INS)
            tree = read_override(override.replace("-=", "=", 1) if removes else override)
            layers.append(Layer(tree, COMMAND_LINE, opt_ins=Change.REMOVE if removes else Change.ADD))
        except InputError as error:
            problems.append(str(error))
    return layers


def read_override(override: str) -> dict[str, Any]:
    """`train.lr=1e-4` as the settings {train: {lr: ...}}; InputError for what is not key=value."""
    path, equals, value_text = (part.strip() for part in override.partition("="))
    if not path or not equals or not value_text:
        raise InputError(f"{COMMAND_LINE}: {shown(override)} is not key=value, such as train.lr=1e-4")
    *outer, last = path.split(".")
    tree: dict[str, Any] = {last: _override_value(path, value_text)}
    for name in reversed(outer):
        tree = {name: tree}
    return tree


def _override_value(path: str, value_text: str) -> object:
    """The value as YAML reads it, or as typed if any text is legal, so that `0123` keeps its zero."""
    if path not in BY_PATH or not BY_PATH[path].kind.is_text:
        return read_yaml(value_text, origin=f"{COMMAND_LINE}: {path}")
    literals: Mapping[str, object] = {"null": None, "~": None, "true": True, "false": False}
    if value_text in literals:
        return literals[value_text]
    if value_text[0] not in "[{\"'":
        return value_text
    try:
        return read_yaml(value_text, origin=COMMAND_LINE)
    except InputError:
        return value_text


def _name_of_job(path: Path | None) -> str:
    """The file's name; for the job.yaml of a submitted run that of the run, without its time."""
    stem = "job" if path is None else path.stem
    if path is not None and (path.parent / SUBMISSION_NAME).is_file():
        folder = path.absolute().parent
        is_point = (folder.parent / SUBMISSION_NAME).is_file()
        run = folder.parent if is_point else folder
        stem = re.sub(_STAMP, "", run.name) + (f"-{folder.name}" if is_point else "")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "job"


def _render_section(tree: Mapping[str, Any], section: str, sources: Mapping[str, str], lines: list[str]) -> None:
    indent = "  " * (section.count(".") + 1 if section else 0)
    for name, value in tree.items():
        path = f"{section}.{name}" if section else name
        if path not in BY_PATH:
            lines.append(f"{indent}{name}:")
            _render_section(value, path, sources, lines)
        else:
            setting = f"{indent}{name}: {write_scalar(value)}"
            lines.append(f"{setting:<60}  # from: {sources.get(path, DEFAULT)}")


def sweep_points(sweeps: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The overrides of each point, one empty point without a sweep; the last sweep varies fastest."""
    choices = [_choices(sweep) for sweep in sweeps]
    keys = [each[0].partition("=")[0] for each in choices]
    double = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if double is not None:
        raise InputError(f"--sweep {double}: is swept twice; give all of its values at once: --sweep {double}=a,b,c")
    points = tuple(itertools.product(*choices))
    if len(points) > MOST_POINTS:
        raise InputError(f"--sweep: {len(points)} points; an array holds {MOST_POINTS} at most")
    return points


def _choices(sweep: str) -> list[str]:
    key, equals, values = (part.strip() for part in sweep.partition("="))
    found = [value.strip() for value in _parts(values)]
    if not key or not equals or not all(found):
        raise InputError(f"--sweep {sweep!r}: expected key=a,b, such as train.lr=1e-4,3e-4")
    if key.split(".")[0] in ("slurm", "output"):
        raise InputError(
            f"--sweep {key}: every point is a task of one array, so {key.split('.')[0]} is the same for all"
        )
    if len(set(found)) < len(found):
        raise InputError(f"--sweep {sweep}: a value appears twice")
    return [f"{key}={value}" for value in found]


def _parts(text: str) -> Iterator[str]:
    """The text split at commas, except those in brackets or quotes."""
    depth, quote, begin = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "," and not depth:
            yield text[begin:place]
            begin = place + 1
        depth += (letter in _OPENING) - (letter in _CLOSING) if not quote else 0
    yield text[begin:]
