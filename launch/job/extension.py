"""Looks at the file that `extensions` names without running it: which hooks it has, and whether they can be called.

Only its syntax tree is read, so that `plan` answers without torch and nothing of a user's code runs before `train`.
"""

import ast
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from trainer.spec.errors import InputError
from trainer.spec.messages.extension import ARGUMENTS, Extension, Hook
from trainer.spec.nearest import close_matches
from trainer.spec.plan import Plan


def read_extension(path_as_written: str) -> Extension:
    """The hooks of the file and the digest of its content.

    InputError for a file that is missing, no Python, without a hook, or with one that takes other arguments.
    """
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
    return Extension(path=str(path.absolute()), sha256=sha256(content).hexdigest(), hooks=hooks)


def keep_extension(plan: Plan, run_dir: Path) -> Plan:
    """The plan with the run's own copy of its extensions file, which its content names; InputError where it changed."""
    extension = plan.extension
    if extension is None:
        return plan
    source = Path(extension.path)
    kept = run_dir / "extensions" / f"{extension.sha256[:8]}-{source.name.removeprefix(f'{extension.sha256[:8]}-')}"
    try:
        content = kept.read_bytes() if kept.is_file() else source.read_bytes()
        if sha256(content).hexdigest() != extension.sha256:
            raise InputError(f"extensions: {source} changed since the plan was made; start again")
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(content)
    except OSError as error:
        raise InputError(f"extensions: {error.filename} cannot be read or kept: {error.strerror}") from error
    return replace(plan, extension=replace(extension, path=str(kept)))


def _check_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef, hook: Hook, path: str) -> None:
    where = f"extensions: {path}, line {function.lineno}: {hook}"
    if isinstance(function, ast.AsyncFunctionDef):
        raise InputError(f"{where} is async; write a plain function")
    arguments, wanted = function.args, ARGUMENTS[hook]
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    takes_more = arguments.vararg is not None or len(positional) >= len(wanted)
    has_keyword_only = any(default is None for default in arguments.kw_defaults)
    if required > len(wanted) or not takes_more or has_keyword_only:
        raise InputError(f"{where} must be callable as {hook}({', '.join(wanted)})")


def _hint(functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> str:
    meant = next((matches[0] for name in functions if (matches := close_matches(name, [*Hook]))), None)
    return f"; did you mean {meant}?" if meant else ""
