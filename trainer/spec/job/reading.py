"""Strict reading of a job file's tree into a `Job`: every problem at once, each on one line.

A line names the origin of the setting, its path, its value, what was expected and the nearest legal spelling:

    job.yaml: pin.micro_bach is not a setting; did you mean pin.micro_batch?
    job.yaml: train.method is "qlorra"; expected auto, full, galore, lora or qlora; did you mean qlora?

Nothing here reads a file or knows YAML: a tree is the result of a YAML or JSON reader. Several trees may be laid over
each other (`read_layers`); a later one that sets one of two settings that exclude each other (`train.steps` over
`train.epochs`) replaces both. Paths stay as typed and are relative to the working directory.

`CLASHES` are settings that exclude each other: one row a rule, with a sentence that names both and the remedy. Only
rules about the job alone are here; those about the machine, the model or the data belong to the planner or to the
readers of these. A rule is skipped if one of its settings could not be read, so that one mistake gives one line. A rule
sees values only: a written default, as in the resolved job.yaml, changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from shardwise.trainer.spec.data.objectives import OBJECTIVES
from shardwise.trainer.spec.data.shapes import SHAPES, Encoding, encoding_of, shapes_for
from shardwise.trainer.spec.engines import Offload, shardings_with
from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.job.fields import BY_PATH, EXCLUSIVE, FIELDS, SECTIONS, Field, children
from shardwise.trainer.spec.job.kinds import HintError, nearest, one_of, shown
from shardwise.trainer.spec.job.other_names import OTHER_NAMES
from shardwise.trainer.spec.job.sections import Allowance, BadRows, DataFormat, Job, LossOn
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision


class Change(StrEnum):
    """What the opt-ins (`allow`) of a layer do to those below it."""

    REPLACE = "replace"
    ADD = "add"  # an empty list replaces all the same: it allows nothing
    REMOVE = "remove"


class Layer(Struct, frozen=True):
    """One tree of settings, and the origin that its problems name; `allowed` limits it to some settings."""

    tree: Mapping[str, Any]
    origin: str
    allowed: tuple[str, ...] | None = None
    opt_ins: Change = Change.REPLACE


class JobReading(Struct, frozen=True):
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
        _lay_over(values, sources, found.values, layer)
    job = _build(values)
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
            meant = meant_setting(section, key)
            found.unreadable.update(_settings_in(meant.partition("=")[0]) if meant else ())
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


def meant_setting(section: str, name: str) -> str | None:
    """The setting that was probably meant, or with its value: by its name elsewhere, among siblings, or anywhere."""
    for known in (f"{section}.{name}".lower(), name.lower()):
        if known in OTHER_NAMES:
            return OTHER_NAMES[known]
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


def _lay_over(values: dict[str, Any], sources: dict[str, str], upper: Mapping[str, Any], layer: Layer) -> None:
    below = values.get("allow", Job().allow)
    for group in EXCLUSIVE:
        if any(upper.get(path) is not None for path in group):
            for path in group:
                values.pop(path, None)
                sources.pop(path, None)
    for path, value in upper.items():
        is_mapping = isinstance(value, dict) and path in values
        values[path] = {**values[path], **value} if is_mapping else value
        sources[path] = layer.origin
        if path == "allow":
            values[path] = _opt_ins(below, value, layer.opt_ins)


def _opt_ins(below: tuple[Allowance, ...], named: tuple[Allowance, ...], change: Change) -> tuple[Allowance, ...]:
    if change is Change.REMOVE:
        return tuple(each for each in below if each not in named)
    return tuple(dict.fromkeys((*below, *named))) if change is Change.ADD and named else named


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


GALORE_OPTIMIZERS = tuple(each for each in Optimizer if each.facts.runs_inside_galore)


class Clash(Struct, frozen=True):
    """A rule over `paths`; `sentence` returns None if the job satisfies it."""

    paths: tuple[str, ...]
    sentence: Callable[[Job], str | None]


def _model(job: Job) -> str | None:
    if job.model.name is None and job.model.config is None:
        return "model is missing; write model.name (weights to start from) or model.config (start from scratch)"
    if job.model.name is not None and job.model.config is not None:
        return "model.name and model.config exclude each other; name starts from weights, config from scratch"
    return None


def _train_missing(job: Job) -> str | None:
    if job.data.train:
        return None
    return "data.train is missing; write a file, a folder or a list of them (python-stdlib needs no file)"


def _tokenizer(job: Job) -> str | None:
    if job.model.config is not None and job.model.name is None and job.model.tokenizer is None:
        return (
            "model.tokenizer is missing; model.config starts from scratch and brings none: write train (makes one "
            "from the data), a folder or a hub id"
        )
    if job.model.name is not None and job.model.config is None and job.model.tokenizer == "train":
        return (
            "model.tokenizer: train and model.name exclude each other; weights work only with their own tokenizer: "
            "remove model.tokenizer"
        )
    return None


def _tokens_need_tokenizer(job: Job) -> str | None:
    if encoding_of(job.data.format) is not Encoding.TOKENS or job.model.tokenizer != "train":
        return None
    return "data.format: tokens and model.tokenizer: train exclude each other; name the one they were made with"


def _remote_code(job: Job) -> str | None:
    repository, model = job.model.trust_remote_code, job.model.name or job.model.config
    if repository is None or model is None or repository == model:
        return None
    return (
        f"model.trust_remote_code is {repository}, but the model is {model}; only the model's own code can be trusted"
    )


def _length_of_run(job: Job) -> str | None:
    stated = [name for name in ("epochs", "steps", "tokens") if getattr(job.train, name) is not None]
    if len(stated) < 2:
        return None
    return f"{one_of(tuple(f'train.{name}' for name in stated)).replace(' or ', ' and ')} exclude each other; keep one"


def _global_batch(job: Job) -> str | None:
    tokens, seq_len = job.train.tokens_per_step, job.train.seq_len
    if tokens is None or tokens % seq_len == 0:
        return None
    below, above = tokens // seq_len * seq_len, (tokens // seq_len + 1) * seq_len
    near = f"the nearest are {below} and {above}" if below else f"the least is {above}"
    return f"train.tokens_per_step is {tokens}, not a multiple of train.seq_len {seq_len}; {near}, or auto"


def _tokens_below_step(job: Job) -> str | None:
    if job.train.tokens is None or job.train.tokens >= (job.train.tokens_per_step or 0):
        return None
    return (
        f"train.tokens is {job.train.tokens}, less than the {job.train.tokens_per_step} of one step "
        "(train.tokens_per_step)"
    )


def _warmup(job: Job) -> str | None:
    warmup, steps = job.train.warmup.steps if job.train.warmup else None, job.train.steps
    if warmup is None or steps is None or warmup <= steps:
        return None
    return f"train.warmup is {warmup} steps, longer than the run of {steps} (train.steps)"


def _scratch_method(job: Job) -> str | None:
    method = job.train.method
    if method is None or not method.freezes_base or job.model.config is None:
        return None
    return (
        f"train.method: {method} and model.config exclude each other; {method} freezes weights that do not exist yet: "
        "write model.name, or train.method: full"
    )


def _scratch_objective(job: Job) -> str | None:
    objective, facts = job.train.objective, OBJECTIVES.get(job.train.objective)
    if facts is None or not facts.scores_initial_model or job.model.config is None:
        return None
    return (
        f"train.objective: {objective} and model.config exclude each other; it starts from a trained model: write "
        "model.name"
    )


def _objective_format(job: Job) -> str | None:
    objective = job.train.objective
    return _other_format(job, f"train.objective: {objective}", "learns from", shapes_for(objective))


def _loss_format(job: Job) -> str | None:
    choices = (LossOn.AUTO, LossOn.ALL)
    fitting = tuple(shape for shape, facts in SHAPES.items() if job.data.loss_on in (*choices, *facts.loss_on))
    return _other_format(job, f"data.loss_on: {job.data.loss_on}", "needs", fitting)


def _other_format(job: Job, what: str, verb: str, fitting: tuple[DataFormat, ...]) -> str | None:
    """The clash of a stated format that is not among the `fitting` ones."""
    if job.data.format is DataFormat.AUTO or job.data.format in fitting:
        return None
    return f"{what} and data.format: {job.data.format} exclude each other; it {verb} {one_of(fitting)}"


def _template_format(job: Job) -> str | None:
    if job.data.chat_template is None or encoding_of(job.data.format) in (None, Encoding.RENDERED):
        return None
    return f"data.chat_template and data.format: {job.data.format} exclude each other; remove the template"


def _streaming(job: Job) -> str | None:
    if not job.data.streaming or job.train.steps is not None or job.train.tokens is not None:
        return None
    return "data.streaming needs train.steps or train.tokens, because a stream has no length to count train.epochs in"


def _bad_rows_max(job: Job) -> str | None:
    if job.data.bad_rows_max == Job().data.bad_rows_max or job.data.bad_rows is BadRows.SKIP:
        return None
    return "data.bad_rows_max counts only with data.bad_rows: skip"


def _eval_leak(job: Job) -> str | None:
    if job.data.eval_source is None:
        return None
    scored = (job.data.eval_source, job.data.eval_subset, job.data.eval_split or "train")
    if scored not in {(entry.source, entry.subset, entry.split or "train") for entry in job.data.train}:
        return None
    return f"data.eval is {job.data.eval_source}, which is also learned (data.train); write a share such as 1%"


def _eval_off(job: Job) -> str | None:
    if job.data.eval_share is not None or job.data.eval_source is not None:
        return None
    wanting = [name for name in ("every", "early_stop") if getattr(job.eval, name) is not None]
    if not wanting:
        return None
    return f"eval.{wanting[0]} and data.eval: none exclude each other; write data.eval: 1%"


def _lora_targets(job: Job) -> str | None:
    targets = job.train.lora.targets
    if len(targets) == 1 or "all-linear" not in targets:
        return None
    return "train.lora.targets: all-linear includes every linear layer; remove the other names"


def _cost(job: Job) -> str | None:
    if job.limits.cost is None or job.price_per_gpu_hour is not None:
        return None
    return "limits.cost needs price_per_gpu_hour"


def _nvme_size(job: Job) -> str | None:
    if job.limits.nvme.size is None or job.limits.nvme.path is not None:
        return None
    return "limits.nvme.size needs limits.nvme.path, a folder on a local NVMe disk"


def _nvme_path(job: Job) -> str | None:
    if job.pin.offload is None or not job.pin.offload.uses_nvme or job.limits.nvme.path is not None:
        return None
    return f"pin.offload: {job.pin.offload} needs limits.nvme.path, a folder on a local NVMe disk"


def _offload_sharding(job: Job) -> str | None:
    offload, sharding = job.pin.offload, job.pin.sharding
    if offload is None or sharding is None or offload is Offload.NONE or offload in sharding.facts.offloads:
        return None
    return (
        f"pin.offload: {offload} and pin.sharding: {sharding} exclude each other; "
        f"it works with {one_of(shardings_with(offload))}"
    )


def _cpu_adam(job: Job) -> str | None:
    if job.pin.optimizer is None or not job.pin.optimizer.facts.updates_on_host:
        return None
    if job.pin.offload is Offload.NONE:
        return (
            "pin.optimizer: deepspeed_cpu_adam and pin.offload: none exclude each other; it updates state in host RAM"
        )
    if job.pin.sharding is not None and not job.pin.sharding.uses_deepspeed:
        return (
            f"pin.optimizer: deepspeed_cpu_adam and pin.sharding: {job.pin.sharding} exclude each other; "
            "it works with zero1, zero2 or zero3"
        )
    return None


def _fp8_recipe(job: Job) -> str | None:
    is_allowed = job.pin.precision is None and Allowance.FP8 in job.allow
    if job.pin.fp8_recipe is None or job.pin.precision is Precision.FP8 or is_allowed:
        return None
    return f"pin.fp8_recipe: {job.pin.fp8_recipe} needs allow: [fp8], or pin.precision: fp8"


def _galore_optimizer(job: Job) -> str | None:
    if job.train.method is not Method.GALORE or job.pin.optimizer in (None, *GALORE_OPTIMIZERS):
        return None
    return (
        f"train.method: galore and pin.optimizer: {job.pin.optimizer} exclude each other; "
        f"inside GaLore runs {one_of(GALORE_OPTIMIZERS)}"
    )


def _checkpointing_n(job: Job) -> str | None:
    if job.pin.checkpointing_n is None or job.pin.checkpointing is Checkpointing.EVERY_N:
        return None
    return f"pin.checkpointing_n: {job.pin.checkpointing_n} needs pin.checkpointing: every_n"


def _shard_group(job: Job) -> str | None:
    sharding = job.pin.sharding
    if job.pin.shard_group is None or sharding is None or sharding.facts.shards_within_group:
        return None
    return f"pin.shard_group: {job.pin.shard_group} needs pin.sharding: hsdp"


def _selective_offload(job: Job) -> str | None:
    """Activation offload moves what autograd saves, which excludes the activations of selective checkpointing."""
    if not job.pin.activation_offload or job.pin.checkpointing is not Checkpointing.SELECTIVE:
        return None
    return (
        "pin.activation_offload and pin.checkpointing: selective exclude each other; activations of selective stay on "
        "the device: write pin.checkpointing: full or none"
    )


def _micro_batch(job: Job) -> str | None:
    micro_batch, sequences = job.pin.micro_batch, (job.train.tokens_per_step or 0) // job.train.seq_len
    if micro_batch is None or sequences == 0 or sequences % micro_batch == 0:
        return None
    fitting = [size for size in range(1, min(sequences, 4096) + 1) if sequences % size == 0]
    closest = min(fitting, key=lambda size: abs(size - micro_batch))
    return (
        f"pin.micro_batch is {micro_batch}, which does not divide the {sequences} sequences of a step "
        f"(train.tokens_per_step / train.seq_len); the nearest that does is {closest}"
    )


def _update_in_backward(job: Job) -> str | None:
    """An update inside the backward pass cannot accumulate a second micro batch."""
    is_lomo = job.pin.optimizer is not None and job.pin.optimizer.facts.updates_in_backward
    is_one_rank = job.pin.sharding is not None and job.pin.sharding.facts.is_one_rank
    if not (job.pin.optimizer_in_backward or is_lomo) or job.pin.micro_batch is None or not is_one_rank:
        return None
    if job.train.tokens_per_step is None:
        return None  # the default is one micro batch then
    sequences = job.train.tokens_per_step // job.train.seq_len
    if job.pin.micro_batch >= sequences:
        return None
    what = f"pin.optimizer: {job.pin.optimizer}" if is_lomo else "pin.optimizer_in_backward"
    return (
        f"{what} does not accumulate gradients, but pin.micro_batch {job.pin.micro_batch} on one rank needs "
        f"{sequences // job.pin.micro_batch} micro batches a step; write pin.micro_batch: {sequences}"
    )


def _one_device(job: Job) -> str | None:
    sharding = job.pin.sharding
    if sharding is None or not sharding.facts.is_one_rank or job.slurm.nodes in (None, 1):
        return None
    return f"pin.sharding: none runs on one device, but slurm.nodes is {job.slurm.nodes}; write pin.sharding: ddp"


_STEP = ("train.tokens_per_step", "train.seq_len")

CLASHES: tuple[Clash, ...] = (
    Clash(("model.name", "model.config"), _model),
    Clash(("model.tokenizer", "model.name", "model.config"), _tokenizer),
    Clash(("data.format", "model.tokenizer"), _tokens_need_tokenizer),
    Clash(("model.trust_remote_code", "model.name", "model.config"), _remote_code),
    Clash(("data.train",), _train_missing),
    Clash(("data.eval", "data.train"), _eval_leak),
    Clash(("data.chat_template", "data.format"), _template_format),
    Clash(("data.loss_on", "data.format"), _loss_format),
    Clash(("data.bad_rows_max", "data.bad_rows"), _bad_rows_max),
    Clash(("data.streaming", "train.epochs", "train.steps", "train.tokens"), _streaming),
    Clash(("train.objective", "data.format"), _objective_format),
    Clash(("train.objective", "model.config"), _scratch_objective),
    Clash(("train.method", "model.config"), _scratch_method),
    Clash(_STEP, _global_batch),
    Clash(("train.epochs", "train.steps", "train.tokens"), _length_of_run),
    Clash(("train.tokens", "train.tokens_per_step"), _tokens_below_step),
    Clash(("train.warmup", "train.steps"), _warmup),
    Clash(("train.lora.targets",), _lora_targets),
    Clash(("limits.cost", "price_per_gpu_hour"), _cost),
    Clash(("limits.nvme.size", "limits.nvme.path"), _nvme_size),
    Clash(("pin.offload", "limits.nvme.path"), _nvme_path),
    Clash(("pin.offload", "pin.sharding"), _offload_sharding),
    Clash(("pin.optimizer", "pin.offload", "pin.sharding"), _cpu_adam),
    Clash(("pin.optimizer", "train.method"), _galore_optimizer),
    Clash(("pin.fp8_recipe", "pin.precision"), _fp8_recipe),
    Clash(("pin.checkpointing_n", "pin.checkpointing"), _checkpointing_n),
    Clash(("pin.shard_group", "pin.sharding"), _shard_group),
    Clash(("pin.activation_offload", "pin.checkpointing"), _selective_offload),
    Clash(("pin.micro_batch", *_STEP), _micro_batch),
    Clash(
        ("pin.micro_batch", "pin.optimizer", "pin.optimizer_in_backward", "pin.sharding", *_STEP), _update_in_backward
    ),
    Clash(("pin.sharding", "slurm.nodes"), _one_device),
    Clash(("eval.every", "eval.early_stop", "data.eval"), _eval_off),
)
