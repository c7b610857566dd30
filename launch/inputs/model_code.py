"""Looks at the code that comes with a model, without running it: which files would run, and what is in them.

config.json names two classes as `MODULE.CLASS` (`auto_map`, https://huggingface.co/docs/transformers/custom_models);
their files, and those that these import relatively, are what runs. Only syntax trees are read here. The key in the job
must name the repository or folder that the model is from: code that config.json takes from elsewhere never runs.
"""

import ast
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from launch.inputs.hub_files import HUB_ID, download_code, hub_cache, is_snapshot
from launch.inputs.model_files import ModelFiles
from trainer.spec.errors import InputError
from trainer.spec.job.sections import Job
from trainer.spec.model.code import ModelCode
from trainer.spec.plan import Plan

SETTING = "model.trust_remote_code"
_CONFIG, _MODEL = "AutoConfig", "AutoModelForCausalLM"


def offered_code(job: Job, config: Mapping[str, Any]) -> str | None:
    """What `model.trust_remote_code` would have to be for the code that a model brings to run; None if it has none."""
    return job.model.name or job.model.config if _MODEL in _auto_map(config) else None


def read_model_code(job: Job, model: ModelFiles, *, cache_home: Path | None = None) -> ModelCode | None:
    """The code that the job trusts, downloaded at the commit of the model's config; None where it trusts none.

    InputError where there is none, config.json takes it from another repository, or a file is missing or no Python.
    """
    repository = job.model.trust_remote_code
    if repository is None:
        return None
    classes = _auto_map(model.config)
    if _CONFIG not in classes or _MODEL not in classes:
        raise InputError(
            f"{SETTING}: {repository} brings no code for a causal language model (its config.json names none); "
            "leave the setting out"
        )
    if not isinstance(model.config.get("model_type"), str):
        raise InputError(f"{model.config_origin}: names no model_type, which code of its own needs too")
    modules = [_module_file(classes[name], model.config_origin) for name in (_CONFIG, _MODEL)]
    folder = Path(model.config_origin).parent
    is_from_hub = is_snapshot(folder) and HUB_ID.fullmatch(repository) is not None
    if is_from_hub and not all((folder / name).is_file() for name in modules):
        download_code(repository, commit=folder.name, cache=hub_cache(cache_home), setting=SETTING)
    return ModelCode(
        repository=repository,
        revision=folder.name if is_from_hub else None,
        folder=str(folder.absolute()),
        files={name: sha256(content).hexdigest() for name, content in _files(folder, modules).items()},
        config_class=classes[_CONFIG],
        model_class=classes[_MODEL],
    )


def keep_model_code(plan: Plan, run_dir: Path) -> Plan:
    """The plan with the run's own copy of its model's code; InputError where that changed since the plan was made."""
    code = plan.model_code
    if code is None:
        return plan
    digest = sha256("".join(f"{name} {code.files[name]}\n" for name in sorted(code.files)).encode()).hexdigest()
    kept = run_dir / "model_code" / digest[:8]
    try:
        for name, expected in code.files.items():
            source = kept / name if (kept / name).is_file() else Path(code.folder) / name
            content = source.read_bytes()
            if sha256(content).hexdigest() != expected:
                raise InputError(f"{SETTING}: {source} changed since the plan was made; start again")
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            (kept / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"{SETTING}: {error.filename} cannot be read or kept: {error.strerror}") from error
    return replace(plan, model_code=replace(code, folder=str(kept.absolute())))


def _auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("auto_map")
    if not isinstance(found, dict):
        return {}
    return {name: each for name, each in found.items() if isinstance(each, str)}


def _module_file(reference: str, origin: str) -> str:
    """The file of `MODULE.CLASS`; InputError where it is of another repository, or no such name."""
    other, dashes, own = reference.rpartition("--")
    if dashes:
        raise InputError(
            f"{origin}: takes its code from {other}, and {SETTING} is for a model's own; name a copy that holds "
            f"{own.partition('.')[0]}.py itself"
        )
    *module, name = reference.split(".")
    if not module or not all(part.isidentifier() for part in (*module, name)):
        raise InputError(f"{origin}: auto_map names {reference!r}, which is no MODULE.CLASS")
    return f"{'/'.join(module)}.py"


def _files(folder: Path, modules: list[str]) -> dict[str, bytes]:
    """The named files and, over as many steps as it takes, what they import relatively; by path below the folder."""
    found: dict[str, bytes] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = folder / name
        try:
            found[name] = path.read_bytes()
            tree = ast.parse(found[name], filename=str(path))
        except OSError as error:
            raise InputError(f"{SETTING}: {path} cannot be read: {error.strerror}") from error
        except (SyntaxError, ValueError) as error:
            raise InputError(f"{SETTING}: {path} is no Python that this version reads: {error}") from error
        waiting += [each for each in _imported(tree, name) if (folder / each).is_file()]
    return found


def _imported(tree: ast.Module, name: str) -> list[str]:
    """Files that the relative imports of a file could mean."""
    wanted: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= name.count("/") + 1:
            continue
        parts = name.split("/")[: -node.level]
        parts += node.module.split(".") if node.module else []
        wanted += _candidates(parts)
        for alias in node.names:
            wanted += _candidates([*parts, alias.name])
    return wanted


def _candidates(parts: list[str]) -> list[str]:
    path = "/".join(parts)
    return [f"{path}.py", f"{path}/__init__.py"] if path else []
