"""A model's folder with room for new tokens: made once in the cache, in a process that may load torch.

Which job needs one is known from its config and its tokenizer (`ModelFiles.new_rows`), so a plan counts the larger
embeddings before they are written.

Adapters leave the embeddings frozen: new rows would stay what they were drawn as, and the exported adapters would name
a base without them. So such a job is refused.
"""

import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from launch.inputs.model_files import ModelFiles
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from trainer.spec.model.shape import text_part
from trainer.spec.model.template_tokens import TEMPLATE_TOKENS
from trainer.spec.plan import Plan


def with_new_rows(files: ModelFiles, *, cache: Path, on_progress: Callable[[str], None]) -> ModelFiles:
    """The same model with embeddings as large as its config says; as it is where they are."""
    if not files.new_rows or files.model_path is None:
        return files
    num_rows = text_part(files.config)["vocab_size"]
    folder = cache / "models" / _key(Path(files.model_path), num_rows)
    if not (folder / "config.json").is_file():
        on_progress(f"making room for new tokens: {num_rows - files.new_rows:,} to {num_rows:,} rows of the embeddings")
        _grow(Path(files.model_path), num_rows, folder)
    return msgspec.structs.replace(files, model_path=str(folder), new_rows=0)


def kept_plan_with_new_rows(plan: Plan, *, cache: Path, on_progress: Callable[[str], None]) -> Plan:
    """A plan that was kept, on a folder whose embeddings are as large as the plan says; as it is where they are."""
    config = None if plan.model_path is None else Path(plan.model_path, "config.json")
    if config is None or not config.is_file():
        return plan
    held = text_part(msgspec.json.decode(config.read_bytes(), type=dict[str, Any])).get("vocab_size")
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
    """InputError where tokens are new to a model and the plan's method leaves its embeddings as they are.

    `files` are those before they got room; `template` is the job's data.chat_template.
    """
    method = plan.chosen.method
    if not files.new_rows or not method.freezes_base:
        return
    if TEMPLATE_TOKENS.get(template or ""):
        named, remedy = f"data.chat_template: {template}", "a template of plain text such as data.chat_template=plain"
    else:
        named, remedy = "model.tokenizer: it", "a tokenizer without tokens of its own"
    raise InputError(
        f"{named} brings tokens that are new to the model, and {method} leaves its embeddings as they are;\n"
        f"take train.method=full, or {remedy}"
    )


def _key(folder: Path, num_rows: int) -> str:
    key = blake2b(f"{folder}\0{num_rows}\n".encode(), digest_size=16)
    for path in sorted(folder.iterdir()):
        status = path.stat()
        key.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return key.hexdigest()


def _grow(folder: Path, num_rows: int, out: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "trainer.runtime.tools.grow_vocabulary",
        str(folder),
        str(num_rows),
        str(out),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
    if done.returncode == 0:
        return
    message = "\n".join([line for line in done.stderr.splitlines() if line.strip()][-3:]) or "no message"
    error = InputError if done.returncode == ExitCode.INPUT else EnvironmentFaultError
    raise error(f"model.name: its embeddings could not be made larger: {message}")
