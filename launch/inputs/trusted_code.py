"""Code that a job allows to run: an extensions file, that of its model, and a FlashAttention kernel of the hub.

Of the extensions file only the syntax tree is read here, so that `plan` needs no torch and runs no user code.

The model's code is inspected here, not run. config.json names two classes as `MODULE.CLASS` (`auto_map`,
https://huggingface.co/docs/transformers/custom_models); their files, and those that these import relatively, are the
code that runs. Only their syntax trees are read. `model.trust_remote_code` must name the repository or folder of the
model: code that config.json loads from another repository never runs.

A kernel is loaded once before any rank starts, in a process of its own (`trainer.runtime.attention.flash_kernel`),
because only torch knows which build fits: from the cache, else from the hub unless HF_HUB_OFFLINE is set. The ranks
start with HF_HUB_OFFLINE set (`launch.engine.launcher`) and download nothing.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shardwise.launch.inputs.hub import download_code, hub_cache, is_hub_id, is_offline, is_snapshot, repository_folder
from shardwise.launch.inputs.model_files import ModelFiles
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, close_matches
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.extension import ARGUMENTS, Extension, Hook
from shardwise.trainer.spec.model.shape import ModelCode
from shardwise.trainer.spec.plan import Plan

if TYPE_CHECKING:  # few jobs bring code, and loading it costs milliseconds
    import ast

SETTING = "model.trust_remote_code"
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_CONFIG, _MODEL = "AutoConfig", "AutoModelForCausalLM"


def offered_code(job: Job, config: Mapping[str, Any]) -> str | None:
    """The value of `model.trust_remote_code` that lets the code of a model run; None if it has none."""
    return job.model.name or job.model.config if _MODEL in _auto_map(config) else None


def read_model_code(job: Job, model: ModelFiles, *, cache_home: Path | None = None) -> ModelCode | None:
    """The code that the job trusts, downloaded at the commit of the model's config; None if it trusts none.

    Raises InputError if there is no code, config.json loads it from another repository, or a file is missing or is not
    Python.
    """
    repository = job.model.trust_remote_code
    if repository is None:
        return None
    classes = _auto_map(model.config)
    if _CONFIG not in classes or _MODEL not in classes:
        raise InputError(
            f"{SETTING}: {repository} brings no code for a causal language model (its config.json names none); "
            "remove the setting"
        )
    if not isinstance(model.config.get("model_type"), str):
        raise InputError(f"{model.config_origin}: names no model_type, which code of its own needs too")
    modules = [_module_file(classes[name], model.config_origin) for name in (_CONFIG, _MODEL)]
    folder = Path(model.config_origin).parent
    is_from_hub = is_snapshot(folder) and is_hub_id(repository)
    if is_from_hub and not all((folder / name).is_file() for name in modules):
        download_code(repository, commit=folder.name, cache=hub_cache(cache_home), setting=SETTING)
    return ModelCode(
        repository=repository,
        revision=folder.name if is_from_hub else None,
        folder=str(folder.absolute()),
        files={name: _sha256(content) for name, content in _files(folder, modules).items()},
        config_class=classes[_CONFIG],
        model_class=classes[_MODEL],
    )


def keep_model_code(plan: Plan, run_dir: Path) -> Plan:
    """The plan with the run's own copy of its model's code; raises InputError if that changed since the plan."""
    code = plan.model_code
    if code is None:
        return plan
    digest = _sha256("".join(f"{name} {code.files[name]}\n" for name in sorted(code.files)).encode())
    retained = run_dir / "model_code" / digest[:8]
    try:
        for name, expected in code.files.items():
            source = retained / name if (retained / name).is_file() else Path(code.folder) / name
            content = source.read_bytes()
            if _sha256(content) != expected:
                raise InputError(f"{SETTING}: {source} changed since the plan was made; start again")
            (retained / name).parent.mkdir(parents=True, exist_ok=True)
            (retained / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"{SETTING}: {error.filename} cannot be read or copied: {error.strerror}") from error
    return replace(plan, model_code=replace(code, folder=str(retained.absolute())))


def _auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("auto_map")
    if not isinstance(found, dict):
        return {}
    return {name: each for name, each in found.items() if isinstance(each, str)}


def _module_file(reference: str, origin: str) -> str:
    """The file of `MODULE.CLASS`; raises InputError for another repository or an invalid name."""
    other, dashes, own = reference.rpartition("--")
    if dashes:
        raise InputError(
            f"{origin}: loads its code from {other}, and {SETTING} is for a model's own; name a copy that holds "
            f"{own.partition('.')[0]}.py itself"
        )
    *module, name = reference.split(".")
    if not module or not all(part.isidentifier() for part in (*module, name)):
        raise InputError(f"{origin}: auto_map names {reference!r}, which is no MODULE.CLASS")
    return f"{'/'.join(module)}.py"


def _files(folder: Path, modules: list[str]) -> dict[str, bytes]:
    """Content of the named files and of their relative imports, transitively, by path below the folder."""
    found: dict[str, bytes] = {}
    import ast

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


def _imported(tree: "ast.Module", name: str) -> list[str]:
    """Files that the relative imports of a file could mean."""
    import ast

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


def fetch_flash_kernel(
    plan: Plan,
    *,
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    python: str = sys.executable,
) -> None:
    """Loads the kernel of the plan, if it has one, once on this machine, so that the cache holds it.

    Raises EnvironmentFaultError, with the next step, if that fails. Ends early once `should_stop` is true.
    """
    kernel = kernel_of(plan)
    problem = None if kernel is None else load_kernel(kernel, on_progress, should_stop, python)
    if problem is not None:
        raise EnvironmentFaultError(problem)


def kernel_of(plan: Plan) -> str | None:
    """The kernel that the plan, or one of its fallbacks, runs."""
    return next((each.flash_kernel for each in (plan.chosen, *plan.fallbacks) if each.flash_kernel), None)


def load_kernel(
    kernel: str,
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    python: str = sys.executable,
) -> str | None:
    """Loads a kernel once, downloaded if the cache lacks it; returns the reason if it cannot be loaded."""
    problem = _load(kernel, python, _OFFLINE, should_stop)
    if problem is not None and not is_offline() and not should_stop():
        on_progress(f"fetching {kernel}, once for this machine")
        problem = _load(kernel, python, {}, should_stop)
    return problem


def has_kernel(kernel: str, environment: Mapping[str, str] = os.environ) -> bool:
    """True if the cache has a build of the kernel; only torch knows if that fits this machine."""
    named = environment.get("HF_KERNELS_CACHE") or environment.get("KERNELS_CACHE")
    cache = Path(named).expanduser() if named else hub_cache(None, environment)
    repository, _, commit = kernel.partition("@")
    builds = repository_folder(cache, repository, kind="kernels") / "snapshots" / commit / "build"
    return builds.is_dir() and any(builds.iterdir())


def _load(kernel: str, python: str, settings: dict[str, str], should_stop: Callable[[], bool]) -> str | None:
    """The error message of the process; None if it loaded the kernel or was stopped."""
    from subprocess import DEVNULL  # here, as the others: a plan needs none of them
    from tempfile import TemporaryFile

    from shardwise.launch.worker import run

    environment = os.environ | {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"} | settings
    with TemporaryFile() as errors:
        code = run(
            "shardwise.trainer.runtime.attention.flash_kernel",
            kernel,
            output=DEVNULL,
            errors=errors,
            environment=environment,
            should_stop=should_stop,
            python=python,
        )
        if not code:
            return None
        errors.seek(0)
        lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    starts = [
        number for number, line in enumerate(lines) if line.startswith("attention: ")
    ]  # after messages of libraries
    if starts:
        return "\n".join(lines[starts[-1] :])
    return "\n".join([f"attention: loading {kernel} ended with code {code}", *lines[-2:]])


def read_extension(path_as_written: str) -> Extension:
    """The hooks of the file and the digest of its content.

    Raises InputError for a file that is missing, not Python, without a hook, or has a hook with other arguments.
    """
    import ast

    path = Path(path_as_written).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"extensions: {path_as_written} cannot be read: {error.strerror}") from error
    try:
        tree = ast.parse(content, filename=str(path))
    except (SyntaxError, ValueError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise InputError(
            f"extensions: {path_as_written} is no Python that this version reads{place}: {error}"
        ) from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    hooks = tuple(hook for hook in Hook if hook in functions)
    if not hooks:
        raise InputError(f"extensions: {path_as_written} defines none of {', '.join(Hook)}{_hint(functions)}")
    for hook in hooks:
        _check_arguments(functions[hook], hook, path_as_written)
    return Extension(path=str(path.absolute()), sha256=_sha256(content), hooks=hooks)


def keep_extension(plan: Plan, run_dir: Path) -> Plan:
    """The plan with the run's own copy of its extensions file, named by its digest; raises InputError if it changed."""
    extension = plan.extension
    if extension is None:
        return plan
    source = Path(extension.path)
    retained = run_dir / "extensions" / f"{extension.sha256[:8]}-{source.name.removeprefix(f'{extension.sha256[:8]}-')}"
    try:
        content = retained.read_bytes() if retained.is_file() else source.read_bytes()
        if _sha256(content) != extension.sha256:
            raise InputError(f"extensions: {source} changed since the plan was made; start again")
        retained.parent.mkdir(exist_ok=True)
        retained.write_bytes(content)
    except OSError as error:
        raise InputError(f"extensions: {error.filename} cannot be read or copied: {error.strerror}") from error
    return replace(plan, extension=replace(extension, path=str(retained)))


def _check_arguments(function: "ast.FunctionDef | ast.AsyncFunctionDef", hook: Hook, path: str) -> None:
    import ast

    where = f"extensions: {path}, line {function.lineno}: {hook}"
    if isinstance(function, ast.AsyncFunctionDef):
        raise InputError(f"{where} is async; write a plain function")
    arguments, wanted = function.args, ARGUMENTS[hook]
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    accepts_more = arguments.vararg is not None or len(positional) >= len(wanted)
    has_keyword_only = any(default is None for default in arguments.kw_defaults)
    if required > len(wanted) or not accepts_more or has_keyword_only:
        raise InputError(f"{where} must be callable as {hook}({', '.join(wanted)})")


def _hint(functions: "dict[str, ast.FunctionDef | ast.AsyncFunctionDef]") -> str:
    meant = next((matches[0] for name in functions if (matches := close_matches(name, [*Hook]))), None)
    return f"; did you mean {meant}?" if meant else ""


def _sha256(content: bytes) -> str:
    """The digest as hexadecimal digits."""
    from hashlib import sha256  # loads OpenSSL

    return sha256(content).hexdigest()
