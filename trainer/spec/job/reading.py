"""Strict reading of a job file's tree into a `Job`: every problem at once, each on one line.

A line names the origin of the setting, its path, its value, what was expected and the nearest legal spelling:

    job.yaml: pin.micro_bach is not a setting; did you mean pin.micro_batch?
    job.yaml: train.method is "qlorra"; expected auto, full, galore, lora or qlora; did you mean qlora?

Nothing here reads a file or knows YAML: a tree is the result of a YAML or JSON reader. Several trees may be laid over
each other (`read_layers`); a later one that sets one of two settings that exclude each other (`train.steps` over
`train.epochs`) replaces both. Paths stay as typed and are relative to the working directory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.job.clashes import CLASHES
from shardwise.trainer.spec.job.fields import BY_PATH, EXCLUSIVE, FIELDS, SECTIONS, Field, children
from shardwise.trainer.spec.job.kinds import HintError, nearest, shown
from shardwise.trainer.spec.job.sections import Job

# Names of settings in other trainers; an unknown key is looked up here first.
OTHER_NAMES: Mapping[str, str] = {alias: entry.path for entry in FIELDS for alias in entry.aliases}


class Layer(NamedTuple):
    """One tree of settings, and the origin that its problems name; `allowed` limits it to some settings."""

    tree: Mapping[str, Any]
    origin: str
    allowed: tuple[str, ...] | None = None


class JobReading(NamedTuple):
    """The job, and for each setting that a layer states the origin of the layer that decided it."""

    job: Job
    sources: dict[str, str]


class _Found(Struct):
    """Result of the walk over one tree."""

    values: dict[str, Any] = {}
    problems: list[str] = []
    unreadable: set[str] = set()


def read_job(tree: Mapping[str, Any], *, origin: str) -> Job:
    """The job that a tree describes, defaults filled in; raises InputProblemsError with every problem."""
    return read_layers([Layer(tree, origin)], origin=origin).job


def read_layers(layers: Sequence[Layer], *, origin: str, checks_clashes: bool = True) -> JobReading:
    """The job that layers describe, each over those before it; `origin` is named for what no layer states.

    Raises InputProblemsError with every problem. `checks_clashes` is false if a layer could not be read: the settings
    that it may have held are then not reported as missing.
    """
    problems: list[str] = []
    unreadable: set[str] = set()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        found = _Found()
        _walk(layer.tree, "", layer, found)
        problems += [f"{layer.origin}: {problem}" for problem in found.problems]
        unreadable |= found.unreadable
        _lay_over(values, sources, found.values, layer.origin)
    job = _build(_with_one_length(values))
    for clash in CLASHES if checks_clashes else ():
        if not unreadable.intersection(clash.paths) and (sentence := clash.sentence(job)):
            stated = (sources[path] for path in clash.paths if path in sources)
            problems.append(f"{next(stated, origin)}: {sentence}")
    if problems:
        raise InputProblemsError(tuple(dict.fromkeys(problems)))
    return JobReading(job, sources)


def read_value(entry: Field, value: object) -> Any:  # noqa: ANN401 - each kind of setting has a type of its own
    """The setting's value; raises ValueError with one line that names the problem."""
    try:
        return entry.kind.read(value)
    except HintError as error:
        hint = f"; {error}"
    except ValueError:
        meant = nearest(value, entry.kind.choices) if isinstance(value, str) else None
        hint = f"; did you mean {meant}?" if meant else ""
    raise ValueError(f"{entry.path} is {shown(value)}; expected {entry.kind.expected}{hint}")


def _walk(tree: Mapping[Any, Any], section: str, layer: Layer, found: _Found) -> None:
    for key, value in tree.items():
        path = f"{section}.{key}" if section else str(key)
        if not isinstance(key, str) or not key or "." in key:
            found.problems.append(_odd_key(key, path))
        elif path not in BY_PATH and path not in SECTIONS:
            meant = _meant(section, key)
            found.unreadable.update(_settings_in(meant) if meant else ())
            found.problems.append(_unknown(path, section, meant))
        elif layer.allowed is not None and not _is_allowed(path, layer.allowed):
            found.problems.append(f"{path} belongs in a job file; this file may hold {', '.join(layer.allowed)}")
        elif path in BY_PATH:
            _read_field(BY_PATH[path], value, found)
        elif isinstance(value, Mapping):
            _walk(value, path, layer, found)
        elif value is not None:  # `pin:` with every line below it commented out is an empty section
            inside = children(path)
            found.unreadable.update(_settings_in(path))
            found.problems.append(f"{path} is {shown(value)}; expected settings of its own, such as {inside[0]}")


def _read_field(entry: Field, value: object, found: _Found) -> None:
    try:
        found.values[entry.path] = read_value(entry, value)
    except ValueError as error:
        found.problems.append(str(error))
        found.unreadable.add(entry.path)


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    """True of an allowed setting, of what is in an allowed section, and of a section with something allowed in it."""
    return any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in allowed)


def _odd_key(key: object, path: str) -> str:
    if path in BY_PATH:
        *outer, name = path.split(".")
        nested = "".join(f"{part}: {{" for part in outer) + f"{name}: ..." + "}" * len(outer)
        return f"{shown(key)} is not a setting; write it as {nested}"
    return f"{shown(key)} is not a setting; names of settings are text"


def _unknown(path: str, section: str, meant: str | None) -> str:
    named = path if path.isprintable() and len(path) <= 80 else shown(path)
    if meant:
        return f"{named} is not a setting; did you mean {meant}?"
    return f"{named} is not a setting; {section or 'a job'} has {', '.join(_names(children(section)))}"


def _meant(section: str, name: str) -> str | None:
    """The setting that was probably meant: by its name in another trainer, among siblings, or elsewhere."""
    if name.lower() in OTHER_NAMES:
        return OTHER_NAMES[name.lower()]
    siblings = {path.rpartition(".")[2]: path for path in children(section)}
    if near := nearest(name, tuple(siblings)):
        return siblings[near]
    everywhere = {path.rpartition(".")[2]: path for path in reversed((*BY_PATH, *filter(None, SECTIONS)))}
    near = nearest(name, tuple(everywhere))
    return everywhere[near] if near else None


def _settings_in(path: str) -> Iterator[str]:
    """The setting itself, or every setting of the section."""
    return (entry.path for entry in FIELDS if entry.path == path or entry.path.startswith(f"{path}."))


def _names(paths: Sequence[str]) -> Iterator[str]:
    return (path.rpartition(".")[2] for path in paths)


def _lay_over(values: dict[str, Any], sources: dict[str, str], upper: Mapping[str, Any], origin: str) -> None:
    for group in EXCLUSIVE:
        if any(upper.get(path) is not None for path in group):
            for path in group:
                values.pop(path, None)
                sources.pop(path, None)
    for path, value in upper.items():
        is_mapping = isinstance(value, dict) and path in values
        values[path] = {**values[path], **value} if is_mapping else value
        sources[path] = origin


def _with_one_length(values: Mapping[str, Any]) -> dict[str, Any]:
    """`train.epochs` has a default; a run that states steps or tokens does not have it."""
    has_other = any(values.get(path) is not None for path in ("train.steps", "train.tokens"))
    return {"train.epochs": None, **values} if has_other else dict(values)


def _build(values: Mapping[str, Any]) -> Job:
    arguments: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, value in values.items():
        section = path.rpartition(".")[0]
        attributes = BY_PATH[path].attributes
        several = value if len(attributes) > 1 else (value,)
        arguments[section].update(zip(attributes, several, strict=True))
    for section in sorted(SECTIONS, key=lambda name: name.count("."), reverse=True):
        outer, _, name = section.rpartition(".")
        if section and arguments[section]:
            arguments[outer][name] = SECTIONS[section](**arguments[section])
    return Job(**arguments[""])
