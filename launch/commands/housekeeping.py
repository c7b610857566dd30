"""`shardwise init`, `probe` and `schema`: a first job file, this machine, and the schema of the job file."""

import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from shardwise.launch.options import InitOptions, ProbeOptions, SchemaOptions
from shardwise.launch.terminal import Console, folded, terminal_columns
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.job.sections import DataFormat, Job

if TYPE_CHECKING:
    from shardwise.launch.probe.measure import Meeting


def run_init(options: InitOptions, console: Console) -> ExitCode:
    """Writes a commented job file that `plan` accepts; raises InputError for one that exists, and for bad input."""
    if options.output.exists():
        raise InputError(f"{options.output}: exists already; name another file with -o")
    model, data = look_at_model(options.model), look_at_data(options.data)
    text = job_template(model=options.model, data=options.data, model_facts=model, data_facts=data)
    found = _checked(text, options.output.name)
    try:
        with options.output.open("x") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{options.output}: exists already; name another file with -o") from None
    except OSError as error:
        raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    for line in found:
        console.line(line)
    console.line(f"wrote {options.output}; next: shardwise plan {options.output}")
    return ExitCode.DONE


def _checked(text: str, name: str) -> tuple[str, ...]:
    """Lines on what the job was found to be; InputError where `plan` would refuse it."""
    from tempfile import TemporaryDirectory

    from shardwise.launch.plan.gather import check_inputs, profile_data, read_inputs
    from shardwise.trainer.spec.data.shapes import SHAPES, objective_of
    from shardwise.trainer.spec.units import format_count

    with TemporaryDirectory(prefix="shardwise-") as folder:
        path = Path(folder, name).with_suffix(".yaml")
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        inputs = read_inputs(path, (), hardware_spec="1xCPU", only_plans=True, needs_costs=False)
    data, shape, job = profile_data(inputs), inputs.shape, inputs.resolved.job
    check_inputs(inputs, data)
    learned = f"{objective_of(job.train.objective, data.format)} on {SHAPES[data.format].plural}"
    template = f", chat template {job.data.chat_template}" if job.data.chat_template else ""
    positions = "" if shape.max_positions is None else f", {shape.max_positions:,} positions"
    return (
        f"model  {shape.model_type}, {format_count(shape.num_parameters)} parameters{positions}",
        f"data   {learned}{template}, about {format_count(data.num_tokens)} tokens; rows of {job.train.seq_len:,}",
    )


def run_probe(options: ProbeOptions, console: Console) -> ExitCode:
    """Prints the machine's hardware, and writes it for `--hardware FILE`."""
    from shardwise.launch.probe.machine import describe_hardware, read_hardware
    from shardwise.trainer.spec import codec

    meeting = _meeting(options)
    hardware = read_hardware(gpus=options.gpus, measure=options.measure)
    if meeting is not None:
        from shardwise.launch.probe.measure import with_network

        hardware = with_network(hardware, meeting)
        if meeting.node_rank > 0:
            console.line(f"machine {meeting.node_rank} of {meeting.num_nodes}: measured; machine 0 shows the figures")
            return ExitCode.DONE
    if options.output is not None:
        try:
            codec.write(options.output, hardware)
        except OSError as error:
            raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    if options.as_json:
        console.json(hardware)
    else:
        console.line(folded(describe_hardware(hardware), terminal_columns(console)))
    return ExitCode.DONE


def _meeting(options: ProbeOptions) -> "Meeting | None":
    """Where the machines of a probe on several meet: by options, or in a step of Slurm with a task on each."""
    is_alone = options.nodes is None and options.node_rank is None and options.head is None
    if is_alone and not options.measure:
        return None  # the usual probe starts without these modules

    from shardwise.launch.nodes.machines import DEFAULT_PORT, place_among
    from shardwise.launch.probe.measure import Meeting
    from shardwise.slurm.jobs import place_in_step

    place = place_among(nodes=options.nodes, node_rank=options.node_rank, head=options.head)
    if place is not None and not options.measure:
        raise InputError("--nodes: a probe of several machines measures the network between them; add --measure")
    if place is not None:
        return Meeting(place.num_nodes, place.node_rank, place.head.host, place.head.port or DEFAULT_PORT)
    step = place_in_step(os.environ) if options.measure else None
    return None if step is None else Meeting(*step, DEFAULT_PORT)


def run_schema(_options: SchemaOptions, console: Console) -> ExitCode:
    """Prints the JSON Schema of the job file."""
    from shardwise.trainer.spec.job.fields import job_json_schema

    console.json(job_json_schema())
    return ExitCode.DONE


class ModelFacts(NamedTuple):
    """Facts about a model that its job file follows; None: not known."""

    starts_from_scratch: bool = False
    max_positions: int | None = None
    vocab_size: int | None = None
    has_chat_template: bool | None = None
    has_tokenizer: bool = False
    problem: tuple[str, ...] = ()  # the reason, if the model could not be read


class DataFacts(NamedTuple):
    """Facts about data that its job file follows; None: not known."""

    shape: DataFormat | None = None  # of rows; None for text as well
    num_bytes: int | None = None
    num_rows: int | None = None  # of a few rows, which were counted
    longest_bytes: int | None = None  # of these
    problem: tuple[str, ...] = ()  # the reason, if the data could not be read


def look_at_model(model: str) -> ModelFacts:
    """The facts of a hub id, a folder, a config.json or a preset."""
    from shardwise.launch.inputs.model_files import chat_templates, preset_names, read_model_config, read_preset
    from shardwise.launch.inputs.weight_files import holds_weights
    from shardwise.trainer.spec.job.sections import ModelJob
    from shardwise.trainer.spec.model.readers import config_positions, config_vocabulary

    folder = Path(model).expanduser()
    is_shape = model in preset_names() and read_preset(model).get("_name_or_path") is None
    is_bare = model not in preset_names() and (folder / "config.json").is_file() and not holds_weights(folder)
    is_from_scratch = model.endswith(".json") or is_shape or is_bare
    try:
        named = ModelJob(config=model) if is_from_scratch else ModelJob(name=model)
        files = read_model_config(Job(model=named))
        positions, vocab_size = config_positions(files.config), config_vocabulary(files.config)
    except (InputError, EnvironmentFaultError) as error:
        return ModelFacts(is_from_scratch, problem=(str(error),))
    tokenizer = files.tokenizer_path
    has_template = False if is_from_scratch and tokenizer is None else None
    has_tokenizer = tokenizer is not None
    if tokenizer is not None and Path(tokenizer).is_dir():
        has_template = "default" in chat_templates(Path(tokenizer))
    return ModelFacts(is_from_scratch, positions, vocab_size, has_template, has_tokenizer)


MOST_READ_BYTES = 16 * 2**20  # of data whose rows are counted


def look_at_data(data: str) -> DataFacts:
    """The facts of a file, a folder or python-stdlib; a data set of the hub is not downloaded for them."""
    from shardwise.launch.inputs.data_files import is_of_hub, list_files, row_sizes, shape_of_first_row, source_bytes
    from shardwise.trainer.spec.data.profile import PrepareRequest
    from shardwise.trainer.spec.job.sources import DataSource

    if is_of_hub(data):
        return DataFacts()
    usual = Job().data
    request = PrepareRequest(
        sources=(DataSource(source=data),), eval_share=None, eval_source=None, format=DataFormat.AUTO, fields={},
        packing=None, bad_rows=usual.bad_rows, bad_rows_max=usual.bad_rows_max, seq_len=Job().train.seq_len,
        vocab_size=USUAL_VOCABULARY, tokenizer=None, cache_root="",
    )  # fmt: skip
    try:
        listed = list_files(request)
    except (InputError, EnvironmentFaultError) as error:
        return DataFacts(problem=(str(error),))
    num_bytes = source_bytes(listed)
    sizes = row_sizes(listed) if num_bytes <= MOST_READ_BYTES else None
    num_rows, longest = (None, None) if sizes is None else sizes
    return DataFacts(shape_of_first_row(listed), num_bytes, num_rows, longest)


USUAL_VOCABULARY = 32000  # of a model that could not be read


def job_template(*, model: str, data: str, model_facts: ModelFacts, data_facts: DataFacts) -> str:
    """A commented job for this model and this data: only what must be stated, or what differs from the defaults."""
    from shardwise.launch.job.yaml_text import write_scalar

    if model_facts.starts_from_scratch and model_facts.has_tokenizer:
        what, why = (
            {"config": model, "tokenizer": model},
            "from scratch, with its own tokenizer (name: starts from weights)",
        )
    elif model_facts.starts_from_scratch:
        what = {"config": model, "tokenizer": "train"}
        why = "from scratch, with a tokenizer made from the data (name: starts from weights)"
    else:
        what, why = {"name": model}, "weights to start from (config: starts from scratch)"
    data_settings: dict[str, object] = {"train": data}
    reasons = ["a file, a folder, or a list of {source: ..., weight: 1.0}"]
    for name, value, reason in (_chat_template(model_facts, data_facts), _held_out(data_facts)):
        if value:
            data_settings[name] = value
            reasons.append(f"{name}: {reason}")
    seq_len, of_length = _seq_len(model_facts, data_facts)
    lines = [("model", write_scalar(what), [why]), ("data", write_scalar(data_settings), reasons)]
    if seq_len != Job().train.seq_len:
        lines.append(("train", f"{{seq_len: {seq_len}}}", [of_length]))
    run_name = write_scalar(f"runs/{_run_name(model)}")
    lines.append(("output", run_name, ["each run gets a directory with this name and the time"]))
    return (
        "# A shardwise job. Every other setting has a default; `shardwise schema` lists them all.\n"
        "# Method, batch, epochs and learning rate follow the model, the data and the machine: `shardwise plan` with\n"
        "# this file shows them and their sources, `shardwise train` runs it.\n"
        + "".join(_commented(f"{name}: {value}", notes) for name, value, notes in lines)
    )


def _commented(line: str, notes: list[str]) -> str:
    return "".join(["\n", *(f"# {note}\n" for note in notes), f"{line}\n"])


def _chat_template(model: ModelFacts, data: DataFacts) -> tuple[str, str, str]:
    """`data.chat_template` of a model that brings none, for rows that hold messages."""
    if data.shape not in (DataFormat.CHAT, DataFormat.PREFERENCE) or model.has_chat_template is not False:
        return "chat_template", "", ""
    if model.starts_from_scratch:
        return "chat_template", "chatml", "the tokenizer has none"
    return "chat_template", "plain", "the tokenizer has none; this one needs no new tokens (chatml has two)"


FEW_ROWS, FEW_BYTES = 1000, 500_000  # of which the default share of held-out rows is too few to judge by


def _held_out(data: DataFacts) -> tuple[str, str, str]:
    is_small = data.num_bytes is not None and data.num_bytes < FEW_BYTES
    if data.num_rows >= FEW_ROWS if data.num_rows is not None else not is_small:
        return "eval", "", ""
    few = "so little text" if data.num_rows is None else f"{data.num_rows} rows"
    return "eval", "10%", f"the usual 1% of {few} is too little to judge a model by"


def _seq_len(model: ModelFacts, data: DataFacts) -> tuple[int, str]:
    """`train.seq_len` and why: long enough for the rows, short enough for the model and for some hundred steps."""
    from shardwise.trainer.planning.schedule import USUAL_STEPS, bytes_per_token

    seq_len, why = Job().train.seq_len, ""
    length = bytes_per_token(model.vocab_size or USUAL_VOCABULARY)
    longest = round((data.longest_bytes or 0) / length)
    num_tokens = None if data.num_bytes is None else round(data.num_bytes / length)
    if data.shape is not None and longest > seq_len:
        seq_len, why = 1 << (longest - 1).bit_length(), f"seq_len: the longest row has about {longest} tokens"
    elif data.shape in (None, DataFormat.TEXT) and num_tokens is not None:
        enough = max(SHORTEST, MOST_EPOCHS * num_tokens // USUAL_STEPS)
        if enough < seq_len:
            seq_len = 1 << enough.bit_length() - 1
            why = f"seq_len: shorter than usual, so that about {num_tokens} tokens of text give some hundred steps"
    if model.max_positions is not None and model.max_positions < seq_len:
        seq_len, why = model.max_positions, "seq_len: as many tokens as the model has positions"
    return seq_len, why


SHORTEST, MOST_EPOCHS = 64, 4


def _run_name(model: str) -> str:
    path = PurePath(model)
    stem = path.stem if path.suffix == ".json" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.").lower() or "job"
