"""Files of a job's model (config, weights, tokenizer), checked before anything heavy starts.

`model.name` and `model.config` are looked up in this order: a folder with a config.json, a preset of that name, any
other folder or file on this machine, a hub id in the local cache, a hub id on the hub, a hub id in the package's own
table. Relative paths start at the working directory, `~` is the home folder; the result holds absolute ones.

The table, `trainer/presets/models.jsonl`, has a row for each shape of a well-known model: its name is a preset, and
`hub` lists the hub ids that share it, the base weights first. With `model.config` a preset starts from scratch; with
`model.name` it means those weights, and a plan needs no network.

A plan alone (`only_plans`) needs neither weights nor a tokenizer; a run does.

A tokenizer may have more tokens than the model has embeddings. `ModelFiles.new_rows` counts them, so that a plan knows
the larger embeddings before they are written: once, in the cache, by a process that may load torch. Adapters do not
train the embeddings, so the rows would stay untrained and the exported adapters would name a base without them; such a
job is refused.
"""

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from shardwise.launch.inputs.hub import download_snapshot, find_snapshot, hub_cache, is_hub_id
from shardwise.launch.inputs.weight_files import StoredTensor, check_weights, has_weights, holds_weights
from shardwise.trainer import FOLDER
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.shapes import TEMPLATE_TOKENS, Encoding, encoding_of
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, close_matches
from shardwise.trainer.spec.job.sections import Job, ModelJob
from shardwise.trainer.spec.model.config_json import read_config
from shardwise.trainer.spec.model.config_values import refuse_values
from shardwise.trainer.spec.model.stored import (
    WeightFormat,
    refuse_format,
    refuse_plain_weights,
    refuse_two_way,
    text_part,
    weight_format,
    without_format,
)
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.value import Value

ROWS_MULTIPLE = 64  # of an extended embedding: matrix units need it, and it costs next to nothing
_TABLE = FOLDER / "trainer" / "presets" / "models.jsonl"
_MIRRORS = ("unsloth", "nousresearch")  # owners that publish others' weights under the same names
_HEAD = ("lm_head.weight", "embed_out.weight")  # ends of its names
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_TOKENIZERS = ("tekken.json", "*tokenizer.model.*", "*.tiktoken", "tiktoken.model")  # forms that are not read


class ModelFiles(Value, frozen=True, kw_only=True):
    """Location of a model; `config` is that of its language model, without the format of its weights.

    `model_path` is None if the model starts from scratch. While `needs_download` is true, `model_path` and
    `tokenizer_path` are the hub id: enough for a plan; `download_model` gives the folders.
    """

    config: dict[str, Any]
    config_origin: str  # names the config in messages
    model_path: str | None
    tokenizer_path: str | None
    repository: str | None = None  # the hub id, if it is from the hub
    revision: str | None = None  # its commit, once known
    needs_download: bool = False
    new_rows: int = 0  # of the embeddings beyond those of the weights; `config` includes them
    new_tokens: int = 0  # of the template, unknown to the tokenizer: rows that no training has touched
    weights: WeightFormat | None = None  # if they are quantised
    tensors: dict[str, StoredTensor] = {}  # of the weights, if they are here
    note: str | None = None  # for the plan


class KnownModel(Value, frozen=True, kw_only=True):
    """A row of the table of models; `config` omits fields of config.json that have transformers' defaults."""

    name: str
    hub: tuple[str, ...]
    parameters: int | None = None  # as published with the weights; exact unless it ends in six zeros
    licence: str | None = None
    dtype: str = "bfloat16"  # of the published weights
    source: str
    config: dict[str, Any]


@cache
def known_models() -> tuple[KnownModel, ...]:
    """The rows of the table, sorted by name."""
    return tuple(msgspec.json.Decoder(KnownModel).decode_lines(_TABLE.read_bytes()))


@cache
def _models_by_name() -> dict[str, KnownModel]:
    """Rows by preset and by hub id, in lower case."""
    return {name.lower(): model for model in known_models() for name in (model.name, *model.hub)}


def find_known_model(name: str) -> KnownModel | None:
    """The row of a preset or of a hub id, or of a mirror of one; None if the table has none."""
    key = name.lower()
    found = _models_by_name().get(key)
    owner, _, own_name = key.partition("/")
    if found is not None or owner not in _MIRRORS:
        return found
    return next((model for known, model in _models_by_name().items() if known.partition("/")[2] == own_name), None)


def similar_model(name: str) -> str | None:
    """The preset or hub id of the table that `name` resembles most; None if none does, or if the table has it."""
    if find_known_model(name) is not None:
        return None
    hub = [name for model in known_models() for name in model.hub]
    by_key = {name.partition("/")[2].lower(): name for name in hub} | {name.lower(): name for name in hub}
    by_key |= {name: name for name in preset_names()}
    return next((by_key[key] for key in close_matches(name.lower(), by_key)), None)


def preset_names() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    return tuple(model.name for model in known_models())


def read_preset(name: str) -> dict[str, Any]:
    """The config.json of a preset; `_name_or_path` is the hub id of its weights, if it has some."""
    model = _models_by_name()[name]
    return ({"_name_or_path": model.hub[0]} if model.hub else {}) | model.config


def read_model_config(
    job: Job, *, cache_home: Path | None = None, only_plans: bool = False, prefers_table: bool = False
) -> ModelFiles:
    """The files of the job's model, with headers and counts checked; raises InputError.

    `cache_home` replaces the environment's Hugging Face home folder. Small files (config, tokenizer) of a hub id that
    is not here are downloaded, weights never: see `download_model`. With `only_plans` a folder needs no weights; with
    `prefers_table` the hub is not contacted for a hub id of the table, so that its tokenizer stays unknown.
    """
    cache = hub_cache(cache_home)
    if job.model.name is not None:
        files = _from_name(job, cache, only_plans=only_plans, prefers_table=prefers_table)
    else:
        assert job.model.config is not None, "read_job refuses a job without a model"
        files = _from_config(job, cache)
    files = _of_language_model(files, job)
    if job.model.tokenizer == "train":
        return msgspec.structs.replace(files, tokenizer_path=None)
    if job.model.tokenizer is not None:
        tokenizer_path = _tokenizer_folder(job.model.tokenizer, cache)
        files = msgspec.structs.replace(files, tokenizer_path=tokenizer_path)
    elif files.tokenizer_path is None and encoding_of(job.data.format) is not Encoding.TOKENS:
        _refuse_other_tokenizer(Path(files.config_origin))
    return _with_room(files, job.data.chat_template)


def find_config(name: str, *, cache_home: Path | None = None) -> ModelFiles:
    """Files of `model.config: name`, without a check that its vocabulary holds its tokenizer's tokens."""
    job = Job(model=ModelJob(config=name))
    return _of_language_model(_from_config(job, hub_cache(cache_home)), job)


def _of_language_model(files: ModelFiles, job: Job) -> ModelFiles:
    """The files as read, with the config of their language model; InputError if their weights cannot be its base.

    Code that comes with a model reads the whole config.
    """
    if job.model.trust_remote_code is not None:
        config = without_format(files.config)
    else:
        has_head = any(name.endswith(_HEAD) for name in files.tensors) if files.tensors else None
        config = text_part(files.config, has_head=has_head)
    refuse_values(config, origin=files.config_origin)
    refuse_two_way(config, origin=files.config_origin)
    weights = weight_format(files.config) if files.model_path is not None else None
    refuse_format(weights, origin=files.config_origin, method=job.train.method, source=_source_of(files))
    refuse_plain_weights(files.config, {each.dtype for each in files.tensors.values()}, origin=files.config_origin)
    notes = [note for note in (files.note, weights and weights.note) if note]
    return msgspec.structs.replace(files, config=dict(config), weights=weights, note="; ".join(notes) or None)


def _source_of(files: ModelFiles) -> str | None:
    """The hub id of the model that was quantised, as the card of its folder or its own name has it; None if neither."""
    card = Path(files.config_origin).with_name("README.md")
    with suppress(OSError):
        found = re.search(r"^base_model:\s*(?:-\s+)?[\"']?([\w.-]+/[\w.-]+)", card.read_text("utf-8", "replace"), re.M)
        if found is not None:
            return found[1]
    name = re.sub(r"-(bnb|unsloth|gptq|awq|fp8|[48]-?bit|int[48]|w\d+a\d+).*$", "", files.repository or "", flags=re.I)
    known = find_known_model(name)
    return known.hub[0] if known is not None and known.hub else None


def download_model(job: Job, files: ModelFiles, *, cache_home: Path | None = None) -> ModelFiles:
    """The same files, with the weights downloaded unless they are here."""
    if not files.needs_download:
        return files
    assert files.repository is not None
    folder = download_snapshot(
        files.repository,
        revision=job.model.revision or files.revision,
        cache=hub_cache(cache_home),
        setting="model.name",
        with_weights=True,
    )
    return read_model_config(job, cache_home=cache_home) if has_weights(folder) else _without_weights(folder)


def download_tokenizer(job: Job, files: ModelFiles, *, cache_home: Path | None = None) -> ModelFiles:
    """The same files with the folder of the tokenizer, where only a table has described a model of the hub so far."""
    if files.repository is None or files.tokenizer_path != files.repository:
        return files
    revision = job.model.revision or files.revision
    folder = _snapshot(files.repository, revision=revision, cache=hub_cache(cache_home), setting="model.name")
    return msgspec.structs.replace(files, tokenizer_path=_own_tokenizer(folder))


def _from_name(job: Job, cache: Path, *, only_plans: bool, prefers_table: bool) -> ModelFiles:
    name = job.model.name
    assert name is not None
    path = _path_of(name, setting="model.name")
    if name in preset_names() and not (path / "config.json").is_file():
        known = _models_by_name()[name]
        if not known.hub:
            raise InputError(f"model.name: {name} is a shape without weights; write model.config: {name}")
        return _from_hub(known.hub[0], job, cache, preset=known)
    if path.is_dir():
        return _from_folder(path, needs_weights=not only_plans)
    if path.exists():
        raise InputError(f"model.name: {name} is a file; name the folder that holds config.json and the weights")
    _refuse_unless_hub_id(name, setting="model.name")
    return _from_hub(name, job, cache, prefers_table=prefers_table)


def _from_config(job: Job, cache: Path) -> ModelFiles:
    name = job.model.config
    assert name is not None
    path = _path_of(name, setting="model.config")
    if name in preset_names() and not (path / "config.json").is_file():
        return ModelFiles(
            config=read_preset(name), config_origin=f"preset {name}", model_path=None, tokenizer_path=None
        )
    if path.is_file():
        return ModelFiles(config=read_config(path), config_origin=str(path), model_path=None, tokenizer_path=None)
    if not path.is_dir():
        _refuse_unless_hub_id(name, setting="model.config")
        try:
            path = _snapshot(name, revision=job.model.revision, cache=cache, setting="model.config")
        except (InputError, EnvironmentFaultError) as error:
            files = _instead_of_hub(name, job.model.revision, error)
            return msgspec.structs.replace(
                files, model_path=None, tokenizer_path=None, repository=None, needs_download=False
            )
    return ModelFiles(
        config=_read_config(path),
        config_origin=str(path / "config.json"),
        model_path=None,
        tokenizer_path=_own_tokenizer(path),
    )


def _from_folder(folder: Path, *, needs_weights: bool = True) -> ModelFiles:
    config, note, tensors = _read_config(folder), None, dict[str, StoredTensor]()
    _refuse_damaged(folder, ("generation_config.json",))
    if needs_weights or holds_weights(folder):
        tensors = dict(check_weights(folder))
    else:
        note = f"{folder} holds no weights; training needs them: model.safetensors"
    return ModelFiles(
        config=config,
        config_origin=str(folder / "config.json"),
        model_path=str(folder.absolute()),
        tokenizer_path=_own_tokenizer(folder),
        tensors=tensors,
        note=note,
    )


def _from_hub(
    repository: str, job: Job, cache: Path, *, preset: KnownModel | None = None, prefers_table: bool = False
) -> ModelFiles:
    revision = job.model.revision
    folder = find_snapshot(repository, revision=revision, cache=cache)
    if folder is None and preset is not None:
        return _to_download(preset, repository, origin=f"preset {preset.name}")
    if folder is None and prefers_table and (files := _from_table(repository, revision)) is not None:
        return files
    if folder is None:
        try:
            folder = _download_small(repository, revision=revision, cache=cache, setting="model.name")
        except (InputError, EnvironmentFaultError) as error:
            return _instead_of_hub(repository, revision, error)
    elif job.model.tokenizer is None and _own_tokenizer(folder) is None:
        with suppress(EnvironmentFaultError):  # without a network the job uses the local files
            folder = _download_small(repository, revision=revision, cache=cache, setting="model.name")
    if has_weights(folder):
        return msgspec.structs.replace(_from_folder(folder), repository=repository, revision=folder.name)
    return ModelFiles(
        config=_read_config(folder),
        config_origin=str(folder / "config.json"),
        model_path=repository,
        tokenizer_path=_own_tokenizer(folder),
        repository=repository,
        revision=folder.name,
        needs_download=True,
    )


def _instead_of_hub(repository: str, revision: str | None, error: InputError | EnvironmentFaultError) -> ModelFiles:
    """A hub id that could not be read from the hub, as the table has it; raises `error` if it has not."""
    files = _from_table(repository, revision)
    if files is None:
        raise error
    why = "the hub was not reached" if isinstance(error, EnvironmentFaultError) else str(error).partition(": ")[2]
    return msgspec.structs.replace(files, note=f"{files.note}: {why}")


def _from_table(repository: str, revision: str | None) -> ModelFiles | None:
    """A hub id as the table has it; None if it has not."""
    known = find_known_model(repository)
    if known is None or revision is not None:
        return None
    licence = f", licence {known.licence}" if known.licence is not None else ""
    note = f"shape of {repository} from the package's own table ({known.name}{licence})"
    return msgspec.structs.replace(
        _to_download(known, repository, origin=f"the package's table of models, {known.name}"), note=note
    )


def _to_download(known: KnownModel, repository: str, *, origin: str) -> ModelFiles:
    return ModelFiles(
        config=read_preset(known.name),
        config_origin=origin,
        model_path=repository,
        tokenizer_path=repository,
        repository=repository,
        needs_download=True,
    )


def _snapshot(repository: str, *, revision: str | None, cache: Path, setting: str) -> Path:
    folder = find_snapshot(repository, revision=revision, cache=cache)
    return folder or _download_small(repository, revision=revision, cache=cache, setting=setting)


def _download_small(repository: str, *, revision: str | None, cache: Path, setting: str) -> Path:
    return download_snapshot(
        repository, revision=revision, cache=cache, setting=setting, with_weights=False, similar=similar_model
    )


def _without_weights(folder: Path) -> ModelFiles:
    check_weights(folder)
    raise InputError(f"{folder}: the hub has no complete safetensors weights of this model")


def _tokenizer_folder(name: str, cache: Path) -> str:
    path = _path_of(name, setting="model.tokenizer")
    if path.is_dir():
        if _own_tokenizer(path) is None:
            raise InputError(
                f"model.tokenizer: {name} holds no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}"
            )
        return str(path.absolute())
    if path.exists():
        raise InputError(f"model.tokenizer: {name} is a file; name the folder it is in")
    _refuse_unless_hub_id(name, setting="model.tokenizer")
    folder = _snapshot(name, revision=None, cache=cache, setting="model.tokenizer")
    if _own_tokenizer(folder) is None:
        raise InputError(f"model.tokenizer: {name} has no tokenizer")
    return str(folder)


def _own_tokenizer(folder: Path) -> str | None:
    """The folder if it has a tokenizer; InputError if a file of settings next to it is no JSON object."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    _refuse_damaged(folder, _TOKENIZER_SETTINGS)
    return str(folder.absolute())


def _refuse_damaged(folder: Path, names: tuple[str, ...]) -> None:
    """InputError for a file of these names that is there and is no JSON object."""
    for name in names:
        if (folder / name).is_file():
            codec.read_object(folder / name)


def _with_room(files: ModelFiles, chat_template: str | None) -> ModelFiles:
    """The same, its config with a vocabulary that holds the tokens added to the tokenizer and those of the template.

    Raises InputError if the tokenizer is another model's, or the model starts from scratch with too small a vocab_size.
    """
    vocab_size = files.config.get("vocab_size")
    if files.tokenizer_path is None or not isinstance(vocab_size, int):
        return files
    tokens = read_tokens(Path(files.tokenizer_path))
    if tokens is None:
        return files
    missing = [token for token in TEMPLATE_TOKENS.get(chat_template or "", ()) if token not in tokens.texts]
    size = tokens.size + len(missing)
    files = msgspec.structs.replace(files, new_tokens=len(missing))
    if size <= vocab_size:
        return files
    if files.model_path is None or tokens.plain_size > vocab_size:
        remedy = (
            f"write vocab_size {size} into {files.config_origin}"
            if files.model_path is None
            else "give the model's own tokenizer"
        )
        with_template = f" with those of {chat_template}" if missing else ""
        raise InputError(
            f"model.tokenizer: {files.tokenizer_path} has {size} tokens{with_template}, the model's vocab_size is "
            f"{vocab_size}; {remedy}"
        )
    rounded = -(-size // ROWS_MULTIPLE) * ROWS_MULTIPLE
    return msgspec.structs.replace(files, config={**files.config, "vocab_size": rounded}, new_rows=rounded - vocab_size)


def _refuse_other_tokenizer(config: Path) -> None:
    """InputError for a tokenizer next to a config.json, in a form that is not read."""
    found = (path.name for pattern in _OTHER_TOKENIZERS for path in config.parent.glob(pattern))
    if config.is_file() and (name := next(found, None)) is not None:
        raise InputError(
            f"model.tokenizer: {config.parent} holds {name} alone, which is not read; name a folder or hub id that has "
            "the same tokenizer as tokenizer.json"
        )


def chat_templates(folder: Path) -> frozenset[str]:
    """Names of the chat templates of the tokenizer in a folder; `default` is the one it uses."""
    names = {path.stem for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        names.add("default")
    path = folder / "tokenizer_config.json"
    if names or not path.is_file():
        return frozenset(names)
    found = codec.read_object(path).get("chat_template")
    if isinstance(found, list):
        return frozenset(str(each.get("name")) for each in found if isinstance(each, dict))
    return frozenset() if found is None else frozenset({"default"})


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a tokenizer.json."""

    texts: frozenset[str]  # of all
    plain_size: int  # the largest id + 1 of those that were not added
    size: int  # of all


def read_tokens(folder: Path) -> Tokens | None:
    """The tokens of a folder's tokenizer.json; None if there is no such file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = codec.read_object(path)
    try:
        vocab = tokenizer["model"]["vocab"]
        ids = vocab if isinstance(vocab, dict) else {entry[0]: number for number, entry in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        plain_size = max((number for text, number in ids.items() if text not in added), default=-1) + 1
        return Tokens(frozenset((*ids, *added)), plain_size, max((*ids.values(), *added.values()), default=-1) + 1)
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(f"{path}: is not a tokenizer of the tokenizers library") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        base = codec.read_object(folder / "adapter_config.json").get("base_model_name_or_path") or "BASE"
        merged = folder.with_name(f"{folder.name}-merged")
        command = shlex.join(["shardwise", "import", str(folder), str(merged), "--base", str(base)])
        raise InputError(
            f"{folder}: holds adapters of {base}, not a whole model; merge them and name {merged}:\n{command}"
        )
    if not path.is_file():
        raise InputError(f"{folder}: holds no config.json; name the folder of a Hugging Face model")
    return read_config(path)


def _path_of(name: str, *, setting: str) -> Path:
    """The path of a name; raises InputError if the system does not permit a look."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except OSError as error:
        raise InputError(f"{setting}: {name} cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        raise InputError(f"{setting}: {name} names no folder: {error}") from error
    return path


def _refuse_unless_hub_id(name: str, *, setting: str) -> None:
    if is_hub_id(name) and ".." not in name:
        return
    meant = similar_model(name)
    hint = f"did you mean {meant}?" if meant else "docs/architectures.md lists the presets, such as llama-3.1-8b"
    raise InputError(f"{setting}: {name} is no folder here, no hub id (ORG/NAME) and no preset; {hint}")


def with_new_rows(files: ModelFiles, *, cache: Path, on_progress: Callable[[str], None]) -> ModelFiles:
    """The model with embeddings of the size of its config, extended if they are smaller."""
    if not files.new_rows or files.model_path is None:
        return files
    num_rows = files.config["vocab_size"]
    folder = cache / "models" / _key(Path(files.model_path), num_rows)
    if not (folder / "config.json").is_file():
        on_progress(f"making room for new tokens: {num_rows - files.new_rows:,} to {num_rows:,} rows of the embeddings")
        _extend_embeddings(Path(files.model_path), num_rows, folder)
    return msgspec.structs.replace(files, model_path=str(folder), new_rows=0)


def retained_plan_with_new_rows(plan: Plan, *, cache: Path, on_progress: Callable[[str], None]) -> Plan:
    """A stored plan, with the model's embeddings extended to the size in the plan if they are smaller."""
    config = None if plan.model_path is None else Path(plan.model_path, "config.json")
    if config is None or not config.is_file():
        return plan
    held = text_part(read_config(config)).get("vocab_size")
    num_rows = plan.model_config["vocab_size"]
    if not isinstance(held, int) or held >= num_rows:
        return plan
    files = ModelFiles(
        config=plan.model_config,
        config_origin=str(config),
        model_path=plan.model_path,
        tokenizer_path=plan.tokenizer_path,
        new_rows=num_rows - held,
    )
    refuse_frozen_rows(plan, files, plan.job.data.chat_template)
    return msgspec.structs.replace(
        plan, model_path=with_new_rows(files, cache=cache, on_progress=on_progress).model_path
    )


def refuse_frozen_rows(plan: Plan, files: ModelFiles, template: str | None) -> None:
    """Raises InputError if tokens are new to a model and the plan's method freezes its embeddings.

    `files` are those before the extension; `template` is the job's data.chat_template.
    """
    method = plan.chosen.method
    if not (files.new_rows or files.new_tokens) or not method.freezes_base:
        return
    if TEMPLATE_TOKENS.get(template or ""):
        named, remedy = f"data.chat_template: {template}", "a template of plain text such as data.chat_template=plain"
    else:
        named, remedy = "model.tokenizer: it", "a tokenizer without tokens of its own"
    raise InputError(
        f"{named} adds tokens that are new to the model, and {method} does not train its embeddings;\n"
        f"use train.method=full, or {remedy}"
    )


def _key(folder: Path, num_rows: int) -> str:
    from hashlib import blake2b  # loads OpenSSL

    key = blake2b(f"{folder}\0{num_rows}\n".encode(), digest_size=16)
    for path in sorted(folder.iterdir()):
        status = path.stat()
        key.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return key.hexdigest()


def _extend_embeddings(folder: Path, num_rows: int, out: Path) -> None:
    from shardwise.launch.worker import ask  # a plan that computes needs none of it
    from shardwise.trainer.spec.messages.worker_requests import ExtendVocabularyRequest, Lines

    request = ExtendVocabularyRequest(folder=str(folder), num_rows=num_rows, out=str(out))
    ask(
        "shardwise.trainer.runtime.tools.extend_vocabulary",
        request,
        Lines,
        subject="model.name: enlarging its embeddings",
    )
