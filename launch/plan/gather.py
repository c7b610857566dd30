"""Collects the inputs of a plan from a job file and this machine, and makes the plan.

Nothing heavy is started here: data that was prepared before is found by its index, otherwise its size is estimated.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from shardwise.launch.inputs.data_files import (
    PYTHON_STDLIB,
    is_of_hub,
    list_files,
    refuse_first_row,
    row_sizes,
    sampled_row_sizes,
    shape_of_first_row,
    source_bytes,
)
from shardwise.launch.inputs.model_check import check_model
from shardwise.launch.inputs.model_files import (
    ModelFiles,
    chat_templates,
    download_model,
    download_tokenizer,
    read_model_config,
    refuse_frozen_rows,
)
from shardwise.launch.inputs.prepare_data import find_prepared
from shardwise.launch.inputs.trusted_code import offered_code, read_extension, read_model_code
from shardwise.launch.inputs.weight_files import packed_weights
from shardwise.launch.job import cache_home, config_home, site_config, state_home
from shardwise.launch.job.layers import ResolvedJob, read_job_layers
from shardwise.launch.plan.calibration_store import read_calibration
from shardwise.launch.probe.installed import installed_version
from shardwise.trainer.planning.planner import Extent, PlanOrder, check_job, make_plan, plan_on_enough_gpus
from shardwise.trainer.planning.schedule import DEFAULT_STEP_TOKENS, bytes_per_token, estimate_data, is_small
from shardwise.trainer.planning.tables.gpu_names import as_usual, hardware_from_spec
from shardwise.trainer.spec.data.profile import DataProfile, PrepareRequest
from shardwise.trainer.spec.data.shapes import TEMPLATE_TOKENS, Encoding, assumed_shape, check_shape, encoding_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Hardware, Host
from shardwise.trainer.spec.job.sections import Allowance, DataFormat, Job
from shardwise.trainer.spec.messages.extension import Extension, Hook
from shardwise.trainer.spec.model.readers import (
    admitted_types,
    config_positions,
    read_model_shape,
    supported_model_types,
)
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelCode, ModelShape
from shardwise.trainer.spec.packages import KERNEL_PACKAGES
from shardwise.trainer.spec.plan import Calibration, Fp8Gain, Plan, TrialResult
from shardwise.trainer.spec.strategy import Method, Precision

if TYPE_CHECKING:  # imported only for plans of a partition
    from shardwise.slurm.partition_hardware import PartitionHardware

RECORDED_LIBRARIES = (
    "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes", "galore-torch", "lion-pytorch",
    "flash-attn", "kernels", "transformer-engine", "torchao", "liger-kernel", "tokenizers", "safetensors",
    *KERNEL_PACKAGES,
)  # fmt: skip


class NodeOptions(NamedTuple):
    """Options of the command line that choose nodes of a Slurm partition."""

    partition: str | None = None
    num_nodes: int | None = None
    constraint: str | None = None


class PlanInputs(NamedTuple):
    """Everything but the data profile."""

    resolved: ResolvedJob
    model: ModelFiles
    shape: ModelShape
    hardware: Hardware
    request: PrepareRequest
    cache: Path  # of token caches and operators
    hub_home: Path | None  # Hugging Face's home folder if a config.yaml names one
    fp8_gain: Fp8Gain | None = None  # timed just now; None: what the cache holds
    model_code: ModelCode | None = None  # that the job trusts
    partition: "PartitionHardware | None" = None  # whose nodes `hardware` describes
    assumes_data: bool = False  # no data is named: `ASSUMED_TOKENS` are planned for


def read_inputs(
    job_path: Path | None,
    overrides: Sequence[str],
    *,
    gpus: tuple[int, ...] | None = None,
    vram_cap_bytes: int | None = None,
    hardware_spec: str | None = None,
    needs_costs: bool = True,
    machines: Hardware | None = None,
    nodes: NodeOptions | None = None,
    only_plans: bool = False,
    assumes_data: bool = False,
    traced: ModelShape | None = None,
    environment: Mapping[str, str] = os.environ,
) -> PlanInputs:
    """Reads the job, the model's config and the machine; every problem of the input shows here, before any work.

    With `only_plans` the model needs neither weights nor a tokenizer; with `assumes_data`, no data either.

    `machines` is the hardware of a run on several machines. With `nodes`, a partition is planned for if an option names
    nodes, or if this is a login node and the job names a partition.

    A model without a closed form is traced, or, without `needs_costs`, described. So is every model that brings
    code: from its own if the job trusts it, else from what transformers has for its type. `traced` is this model's
    shape for other rows or another card; its blocks are not traced again.
    """
    resolved, model, hub_home = read_model(
        job_path, overrides, only_plans=only_plans, assumes_data=assumes_data, environment=environment
    )
    if assumes_data:
        resolved = replace(resolved, job=replace(resolved.job, data=replace(resolved.job.data, train=())))
    job = resolved.job
    code = read_model_code(job, model, cache_home=hub_home)
    cache = cache_home(environment, configured=resolved.folders.get("cache"))
    cap = vram_cap_bytes if vram_cap_bytes is not None else job.limits.vram
    found = _read_nodes(nodes, job, hardware_spec, environment)
    if machines is None:
        partition = None if found is None else found.hardware
        hardware = read_machine(hardware_spec, gpus=gpus, vram_cap_bytes=cap, partition=partition)
    else:
        hardware = replace(machines, vram_cap_bytes=cap)
    likely = replace(job, data=replace(job.data, packing=_likely_packing(job, model, cache)))
    shape = _read_shape(likely, model, code, hardware=hardware, cache=cache, needs_costs=needs_costs, near=traced)
    request = make_request(
        job,
        shape=shape,
        tokenizer_path=model.tokenizer_path,
        cache_root=cache,
        hub_home=hub_home,
        only_plans=only_plans,
    )
    blocks = shape.traced
    is_other = likely.data.packing is False if request.packing is not False else blocks and blocks.separates_documents
    if blocks is not None and is_other:
        shape = _read_shape(_as_prepared(job, request), model, code, hardware=hardware, cache=cache, near=traced)
    refuse_untrainable(shape, model.config_origin)
    shape = _with_format(shape, model)
    check_model(job, model, shape, code, cache=cache)
    return PlanInputs(
        *(resolved, model, shape, hardware, request, cache, hub_home),
        model_code=code,
        partition=found,
        assumes_data=assumes_data,
    )


def read_model(
    job_path: Path | None,
    overrides: Sequence[str],
    *,
    only_plans: bool,
    assumes_data: bool,
    environment: Mapping[str, str] = os.environ,
) -> tuple[ResolvedJob, ModelFiles, Path | None]:
    """The job, the files of its model, and Hugging Face's home if a config.yaml names one; see `read_inputs`."""
    resolved = read_job_layers(
        job_path,
        overrides if not assumes_data else [f"data.train={PYTHON_STDLIB}", *overrides],  # in place of any data
        config_home=config_home(environment),
        site_config=site_config(environment),
    )
    named = resolved.folders.get("huggingface")
    hub_home = Path(named) if named else None
    model = read_model_config(
        resolved.job, cache_home=hub_home, only_plans=only_plans, prefers_table=only_plans and assumes_data
    )
    positions = config_positions(model.config, origin=model.config_origin)
    if positions is not None and positions < resolved.job.train.seq_len and "train.seq_len" not in resolved.sources:
        resolved = _with_length(resolved, positions)
    if model.weights is not None and model.weights.quant is not None:  # no other method trains on them
        train = replace(resolved.job.train, method=Method.QLORA)
        resolved = replace(resolved, job=replace(resolved.job, train=train))
    return resolved, model, hub_home


def _with_length(resolved: ResolvedJob, seq_len: int) -> ResolvedJob:
    """The job with rows of all positions of its model, which has fewer than the default."""
    train = replace(resolved.job.train, seq_len=seq_len)
    return replace(
        resolved,
        job=replace(resolved.job, train=train),
        tree={**resolved.tree, "train": {**resolved.tree["train"], "seq_len": seq_len}},
        sources={**resolved.sources, "train.seq_len": "positions of the model"},
    )


def _read_nodes(
    options: NodeOptions | None, job: Job, spec: str | None, environment: Mapping[str, str]
) -> "PartitionHardware | None":
    if options is None or not (any(options) or (job.slurm.partition is not None and spec is None)):
        return None
    from shardwise.launch.plan.partition import read_nodes_to_plan

    return read_nodes_to_plan(options, job, spec=spec, environment=environment)


def _read_shape(
    job: Job,
    model: ModelFiles,
    code: ModelCode | None,
    *,
    hardware: Hardware,
    cache: Path,
    needs_costs: bool = True,
    near: ModelShape | None = None,
) -> ModelShape:
    has_form = code is None and model.config.get("model_type") in admitted_types()
    if has_form or installed_version("torch") is None:
        return read_model_shape(model.config, origin=model.config_origin)
    from shardwise.launch.plan.trace import trace_request, traced_shape

    description = DescriptionRequest(
        model_config=model.config,
        origin=model.config_origin,
        model_code=code,
        offers_code_of=offered_code(job, model.config),
    )
    request = trace_request(description, job, hardware, needs_costs=needs_costs)
    if model.weights is not None and model.weights.quant is not None:
        request = replace(request, quant=model.weights.quant)
    if code is None and model.config.get("model_type") in supported_model_types():
        shape = read_model_shape(model.config, origin=model.config_origin)
        return replace(shape, traced=traced_shape(request, cache=cache, near=near).traced) if needs_costs else shape
    return traced_shape(request, cache=cache, near=near)


def _with_format(shape: ModelShape, model: ModelFiles) -> ModelShape:
    """The shape with the format of a base that stays in 4 bit, and how many weights its files hold so."""
    if model.weights is None or model.weights.quant is None:
        return shape
    num_packed = packed_weights(model.tensors) or None  # without any, all are quantised anew
    return replace(shape, quant=model.weights.quant, packed_linears=num_packed)


def with_job(inputs: PlanInputs, job: Job) -> PlanInputs:
    """The same inputs for another job on the same model and data; its blocks are traced as the job runs them."""
    resolved, shape = replace(inputs.resolved, job=job), inputs.shape
    if shape.traced is not None:
        whole, code = _as_prepared(job, inputs.request), inputs.model_code
        shape = _read_shape(whole, inputs.model, code, hardware=inputs.hardware, cache=inputs.cache)
        shape = _with_format(shape, inputs.model)
    return inputs._replace(resolved=resolved, shape=shape)


def _as_prepared(job: Job, request: PrepareRequest) -> Job:
    """The job, its rows packed as they will be: few conversations are not."""
    return replace(job, data=replace(job.data, packing=request.packing))


def with_weights(inputs: PlanInputs) -> PlanInputs:
    """The same inputs with the model's weights on this machine; downloads missing ones."""
    if not inputs.model.needs_download:
        return inputs
    job = inputs.resolved.job
    model = download_model(job, inputs.model, cache_home=inputs.hub_home)
    shape = inputs.shape
    if model.config != inputs.model.config:  # its files showed more of it
        shape = _read_shape(
            _as_prepared(job, inputs.request),
            model,
            inputs.model_code,
            hardware=inputs.hardware,
            cache=inputs.cache,
            needs_costs=shape.traced is not None,
        )
    shape = _with_format(shape, model)
    check_model(job, model, shape, inputs.model_code, cache=inputs.cache)
    return _with_request(inputs._replace(model=model, shape=shape))


def with_tokenizer(inputs: PlanInputs) -> PlanInputs:
    """The same inputs with the model's tokenizer on this machine; downloads a missing one."""
    model = download_tokenizer(inputs.resolved.job, inputs.model, cache_home=inputs.hub_home)
    return inputs if model is inputs.model else _with_request(inputs._replace(model=model))


def _with_request(inputs: PlanInputs) -> PlanInputs:
    """The same inputs, their data prepared with the tokenizer of their model."""
    request = make_request(
        inputs.resolved.job,
        shape=inputs.shape,
        tokenizer_path=inputs.model.tokenizer_path,
        cache_root=Path(inputs.request.cache_root),
        hub_home=inputs.hub_home,
    )
    return inputs._replace(request=request)


# Model types whose tokenizers transformers cuts by rules of its own instead of those in tokenizer.json (workaround W9).
OWN_TOKENIZER_RULES = ("qwen2",)
WINDOW_BYTES, WINDOW_STEPS, BYTES_OF_TOKEN = 64 << 20, 16, 4  # of a stream: the larger of 64 MiB and 16 steps of text


def make_request(
    job: Job,
    *,
    shape: ModelShape,
    tokenizer_path: str | None,
    cache_root: Path,
    hub_home: Path | None = None,
    only_plans: bool = False,
) -> PrepareRequest:
    """The request to prepare data for this job; InputError if no tokenizer is named and none can be made.

    With `only_plans` it may lack the tokenizer, and data.
    """
    if not job.data.train and not only_plans:
        raise InputError("data.train: the plan assumed its data; make one for yours: shardwise plan MODEL --data FILE")
    if job.model.tokenizer == "train" and shape.model_type in OWN_TOKENIZER_RULES:
        raise InputError(
            f'model.tokenizer: "train" cannot serve {shape.model_type}: transformers would read it back by other '
            "rules; name a folder that has a tokenizer, or another model type"
        )
    if job.model.tokenizer == "train" or (tokenizer_path is None and encoding_of(job.data.format) is Encoding.TOKENS):
        tokenizer = None
    elif tokenizer_path is not None or only_plans:
        tokenizer = tokenizer_path
    else:
        raise InputError(
            f"model.tokenizer: {job.model.name or job.model.config} brings no tokenizer; "
            'name a folder that has one, or "train" to make one from the data'
        )
    request = _request_of(job, vocab_size=shape.vocab_size, tokenizer=tokenizer, cache_root=cache_root)
    listed = list_files(replace(request, hub_home=None if hub_home is None else str(hub_home)))
    return replace(listed, packing=_packing(listed, shape))


def _request_of(job: Job, *, vocab_size: int, tokenizer: str | None = None, cache_root: Path) -> PrepareRequest:
    extension = _extension_of(job)
    return PrepareRequest(
        sources=job.data.train,
        eval_share=job.data.eval_share,
        eval_source=job.data.eval_source,
        eval_subset=job.data.eval_subset,
        eval_split=job.data.eval_split,
        format=job.data.format,
        fields=job.data.fields,
        packing=job.data.packing,
        bad_rows=job.data.bad_rows,
        bad_rows_max=job.data.bad_rows_max,
        seq_len=job.train.seq_len,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        cache_root=str(cache_root),
        chat_template=_absolute(job.data.chat_template),
        loss_on=job.data.loss_on,
        drop_copies=job.data.drop_copies,
        extension=extension if extension is not None and Hook.FORMAT_ROW in extension.hooks else None,
        window_bytes=_window_bytes(job) if job.data.streaming else None,
    )


def _likely_packing(job: Job, model: ModelFiles, cache: Path) -> bool | None:
    """The packing of the rows as far as it shows before the shape is known: its blocks are traced as they will run."""
    data, vocab_size = job.data, model.config.get("vocab_size")
    sources = [*(each.source for each in data.train), *filter(None, [data.eval_source])]
    if data.packing is not None or not isinstance(vocab_size, int) or any(is_of_hub(each) for each in sources):
        return data.packing
    try:
        listed = list_files(_request_of(job, vocab_size=vocab_size, cache_root=cache))
        return False if _is_too_small_to_pack(listed) else None
    except InputError:  # raised again behind the problems of the model
        return None


def _packing(listed: PrepareRequest, shape: ModelShape) -> bool | None:
    """The job's choice, or false by default where a model does not pack or the rows are few.

    InputError if the job packs rows for a model that was measured not to keep documents apart.
    """
    obstacle = shape.packing_obstacle
    if listed.packing and obstacle is not None and shape.is_packing_measured:
        raise InputError(f"data.packing: {shape.model_type} does not pack: {obstacle};\ngive data.packing=false")
    is_off = listed.packing is None and (obstacle is not None or _is_too_small_to_pack(listed))
    return False if is_off else listed.packing


def _is_too_small_to_pack(listed: PrepareRequest) -> bool:
    """True of few conversations, each of which is a row then."""
    if not is_small(source_bytes(listed), seq_len=listed.seq_len, vocab_size=listed.vocab_size):
        return False
    shape = shape_of_first_row(listed) if listed.format is DataFormat.AUTO else listed.format
    return shape is not None and encoding_of(shape) is Encoding.RENDERED


def _extension_of(job: Job) -> Extension | None:
    if job.extensions is None:
        return None
    return read_extension(job.extensions)


def _window_bytes(job: Job) -> int:
    """Text of a window: enough to shuffle in, and for what is left of its last step to be little."""
    return max(WINDOW_BYTES, WINDOW_STEPS * (job.train.tokens_per_step or DEFAULT_STEP_TOKENS) * BYTES_OF_TOKEN)


def _absolute(chat_template: str | None) -> str | None:
    """A file by its whole path; a name as it is."""
    if chat_template is None or not Path(chat_template).expanduser().is_file():
        return chat_template
    return str(Path(chat_template).expanduser().absolute())


def read_machine(
    spec: str | None,
    *,
    gpus: tuple[int, ...] | None = None,
    vram_cap_bytes: int | None = None,
    partition: Hardware | None = None,
) -> Hardware:
    """This machine, or the one that `--hardware` names: a file of `shardwise probe -o`, or a SPEC; or a partition's.

    `gpus` are indices in each node of any of them.
    """
    from shardwise.trainer.spec import codec

    if partition is not None:
        hardware = partition
    elif spec is None:
        from shardwise.launch.probe.machine import read_hardware

        return read_hardware(gpus=gpus, vram_cap_bytes=vram_cap_bytes)
    elif spec.endswith(".json"):
        hardware = replace(codec.read(Path(spec), Hardware), source=spec)
    else:
        hardware = as_usual(hardware_from_spec(spec, local_host=_read_local_host))
    hardware = hardware if gpus is None else _only(hardware, gpus)
    return replace(hardware, vram_cap_bytes=vram_cap_bytes)


def _read_local_host() -> Host:
    from shardwise.launch.probe.host import read_host

    return read_host()


def _only(hardware: Hardware, gpus: tuple[int, ...]) -> Hardware:
    from shardwise.launch.probe.gpus import select_gpus

    chosen, excluded = select_gpus(hardware.gpus, wanted=gpus)
    retained = {gpu.index for gpu in chosen}
    return replace(
        hardware,
        gpus=chosen,
        links=tuple(link for link in hardware.links if {link.a, link.b} <= retained),
        excluded=(*hardware.excluded, *excluded),
    )


ASSUMED_TOKENS = 20_000_000  # about 40,000 chats of 500 tokens


def profile_data(inputs: PlanInputs) -> DataProfile:
    """The prepared profile if the cache has it, else an estimate from file sizes; of assumed data, from its tokens."""
    vocab_size, num_bytes = inputs.shape.vocab_size, source_bytes(inputs.request)
    if inputs.assumes_data:
        num_bytes = round(ASSUMED_TOKENS * bytes_per_token(vocab_size))
    elif not inputs.model.needs_download:
        prepared = find_prepared(inputs.request)
        if prepared is not None:
            return prepared
    seq_len, shape = inputs.request.seq_len, _shape_unread(inputs)
    if not inputs.assumes_data:
        check_shape(shape, packing=inputs.request.packing, loss_on=inputs.request.loss_on)
        _refuse_template(inputs.request, shape)
    sizes = None
    if inputs.request.packing is False and encoding_of(shape) is Encoding.RENDERED and not inputs.assumes_data:
        is_counted = is_small(num_bytes, seq_len=seq_len, vocab_size=vocab_size)
        sizes = (row_sizes if is_counted else sampled_row_sizes)(inputs.request)
    profile = estimate_data(
        num_bytes=num_bytes,
        row_sizes=sizes,
        window_bytes=inputs.request.window_bytes,
        seq_len=seq_len,
        vocab_size=vocab_size,
        eval_share=inputs.request.eval_share,
        is_packed=inputs.request.packing is not False,
        shape=shape,
    )
    if not inputs.assumes_data:
        return profile
    note = f"no data is named: {ASSUMED_TOKENS // 10**6} million tokens are assumed; name yours with --data FILE"
    return replace(profile, notes=(note,))


def _shape_unread(inputs: PlanInputs) -> DataFormat:
    """Format of the rows: as the job states, as the first row suggests, or as the objective requires."""
    stated, objective = inputs.request.format, inputs.resolved.job.train.objective
    seen = None if inputs.assumes_data else refuse_first_row(inputs.request)
    return seen or assumed_shape(objective, stated)


def _refuse_template(request: PrepareRequest, shape: DataFormat) -> None:
    """InputError for chats without a chat template, or with one that is not there; of a local tokenizer alone."""
    folder = None if request.tokenizer is None else Path(request.tokenizer)
    if encoding_of(shape) is not Encoding.RENDERED or (folder is not None and not folder.is_dir()):
        return
    own, choice = frozenset[str]() if folder is None else chat_templates(folder), request.chat_template
    names = ", ".join([*TEMPLATE_TOKENS, *sorted(own - {"default", "tool_use"})])
    if choice is None and shape is DataFormat.CHAT and "default" not in own:
        raise InputError(
            "data.chat_template: the tokenizer has no chat template, and the rows hold messages;\n"
            f"name one ({names}) or a file"
        )
    if choice is not None and choice not in TEMPLATE_TOKENS and choice not in own and not Path(choice).is_file():
        raise InputError(f"data.chat_template: {choice} is no file and no template by that name;\nthere are {names}")


def check_inputs(inputs: PlanInputs, data: DataProfile) -> None:
    """InputError for what no machine can train: the checks that `init` and `data` share with every plan."""
    extension = inputs.request.extension
    check_job(inputs.resolved.job, inputs.shape, data, () if extension is None else extension.hooks)


def refuse_untrainable(shape: ModelShape, origin: str) -> None:
    """InputError for a model whose loss is more than the cross entropy that is computed here."""
    if shape.loss_obstacle is not None:
        raise InputError(f"{origin}: {shape.model_type} cannot be trained: {shape.loss_obstacle}")


def plan_inputs(
    inputs: PlanInputs,
    data: DataProfile,
    *,
    environment: Mapping[str, str] = os.environ,
    trials: tuple[TrialResult, ...] = (),
    extent: Extent = Extent.WHOLE,
) -> Plan:
    """The plan for these inputs."""
    calibration, versions = read_calibration_of(inputs, environment=environment)
    fp8_gain, ignored = _fp8_gain_of(inputs, versions)

    def plan_on(hardware: Hardware, *, extent: Extent, beats: PlanOrder | None = None) -> Plan:
        return make_plan(
            inputs.resolved.job,
            name=inputs.resolved.name,
            hardware=hardware,
            shape=inputs.shape,
            model_config=inputs.model.config,
            model_path=inputs.model.model_path,
            tokenizer_path=prepared_tokenizer(data) or inputs.model.tokenizer_path,
            data=data,
            calibration=calibration,
            versions=versions,
            trials=trials,
            fp8_gain=fp8_gain,
            extension=_extension_of(inputs.resolved.job),
            extent=extent,
            beats=beats,
        )

    plan = plan_on_enough_gpus(plan_on, inputs.hardware, extent=extent)
    refuse_frozen_rows(plan, inputs.model, inputs.resolved.job.data.chat_template)
    code = inputs.model_code
    more = (inputs.model.note, _missing_tokenizer(inputs, data), ignored)
    notes = (*plan.notes, *(note for note in more if note is not None))
    return replace(plan, model_code=code, notes=notes)


def _missing_tokenizer(inputs: PlanInputs, data: DataProfile) -> str | None:
    """A line for a model whose folder lacks the tokenizer that its data need; training refuses it."""
    model = inputs.resolved.job.model
    is_here = inputs.model.tokenizer_path is not None or prepared_tokenizer(data) is not None
    if is_here or model.tokenizer == "train" or encoding_of(data.format) is Encoding.TOKENS:
        return None
    return (
        f"{model.name or model.config} brings no tokenizer; training needs one: model.tokenizer=FOLDER, or "
        "model.tokenizer=train for a new model"
    )


def _fp8_gain_of(inputs: PlanInputs, versions: dict[str, str]) -> tuple[Fp8Gain | None, str | None]:
    """The timing for this job, and a line on a stored timing that could not be used; None if FP8 is not allowed."""
    job, hardware = inputs.resolved.job, inputs.hardware
    may_take_it = Allowance.FP8 in job.allow if job.pin.precision is None else job.pin.precision is Precision.FP8
    if inputs.fp8_gain is not None or not may_take_it or not hardware.gpus:
        return inputs.fp8_gain, None
    from shardwise.launch.plan.fp8 import fp8_key, read_fp8_gain

    return read_fp8_gain(inputs.cache, fp8_key(job, shape=inputs.shape, hardware=hardware, versions=versions))


def read_calibration_of(
    inputs: PlanInputs, *, environment: Mapping[str, str] = os.environ
) -> tuple[Calibration, dict[str, str]]:
    """Measurements of earlier runs on this machine, and the versions that a plan records."""
    versions = recorded_versions()
    home = state_home(environment)
    return read_calibration(home, inputs.hardware, torch=versions.get("torch", "none")), versions


def prepared_tokenizer(data: DataProfile) -> str | None:
    """The folder of the tokenizer the data was prepared with; None if there is none."""
    folder = Path(data.cache_dir) / "tokenizer" if data.cache_dir is not None else None
    return str(folder) if folder is not None and folder.is_dir() else None


def recorded_versions() -> dict[str, str]:
    """Versions of this program and of the libraries a run depends on, from package metadata."""
    found = {name: version for name in RECORDED_LIBRARIES if (version := installed_version(name)) is not None}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"shardwise": installed_version("shardwise") or "unknown", "python": python} | found
