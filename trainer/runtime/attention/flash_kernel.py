"""Loads the kernel of the hub that flash runs where a job allows one, and reports what was loaded.

    python -m shardwise.trainer.runtime.attention.flash_kernel OWNER/flash-attn2@COMMIT

loads it in a process of its own before any rank starts (`launch.inputs.trusted_code`), fetched from the hub where it is
not in the cache. Ranks then load it from there, without the network.

transformers passes the name on, and the `kernels` package loads it: of the commit's files the one folder
`build/VARIANT/` that fits this torch, CUDA and CPU is downloaded, and its `__init__.py` is run. A publisher that the
hub does not trust is refused, except from the cache, where trust cannot be checked. LOCAL_KERNELS puts a folder in the
place of a repository without a message, so the kernel that ran is identified by the file of its functions.
"""

import inspect
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import constants
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.utils.import_utils import is_kernels_available

from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError
from shardwise.trainer.spec.packages import extra_line


class LoadedBuild(NamedTuple):
    """A loaded kernel: as a job names it, and which of its builds."""

    kernel: str  # OWNER/flash-attn2@COMMIT, or the file where that is not what was loaded
    variant: str  # such as torch213-cxx11-cu130-x86_64-linux


def is_hub_kernel(name: str) -> bool:
    """True for transformers' name of an attention that a kernel of the hub computes."""
    return "@" in name


def load_flash_kernel(name: str) -> LoadedBuild:
    """Loads OWNER/flash-attn2@COMMIT into transformers; once is enough.

    EnvironmentFaultError, with the next step, where it cannot be had or is not what was named.
    """
    if not is_kernels_available():
        raise EnvironmentFaultError(
            f"attention: {name} needs a version of kernels that transformers {version('transformers')} accepts, and "
            f"{_installed_kernels()} is installed here;\n"
            f"run this on every machine of the run, or give pin.attention=sdpa:\n{extra_line('hub-kernels')}"
        )
    try:
        lazy_import_flash_attention(name)
    except ValueError as error:  # transformers makes one of any error of the package
        raise EnvironmentFaultError(_load_error(name, str(error))) from error
    build = loaded_build(name)
    if build.kernel != name:
        raise EnvironmentFaultError(
            f"attention: the plan has {name}, and {build.kernel} was loaded;\nunset LOCAL_KERNELS"
        )
    others = json.loads((_folder(name) / "metadata.json").read_bytes()).get("kernel-depends")
    if others:
        raise EnvironmentFaultError(
            f"attention: {name} runs other kernels of the hub without fixing their commits: {json.dumps(others)};\n"
            "name another in model.flash_kernel, or give pin.attention=sdpa"
        )
    return build


def loaded_build(name: str) -> LoadedBuild:
    """The build that transformers has loaded by this name; it must be loaded."""
    folder = _folder(name)
    repository, _, commit = name.partition("@")
    cached = ("kernels--" + repository.replace("/", "--"), "snapshots", commit, "build", folder.name)
    return LoadedBuild(name if folder.parts[-len(cached) :] == cached else str(folder), folder.name)


def _folder(name: str) -> Path:
    """The folder of the build, which has its metadata in the folder of its modules or above it."""
    (_, varlen, *_), _ = lazy_import_flash_attention(name)
    modules = Path(inspect.getfile(inspect.unwrap(varlen))).parents
    return next(folder for folder in modules if (folder / "metadata.json").is_file())


def _installed_kernels() -> str:
    try:
        return version("kernels")
    except PackageNotFoundError:
        return "none"


def _load_error(name: str, error: str) -> str:
    """Message with the reason, from the first sentence of the package's error, and the next step."""
    prefix = f"An error occurred while trying to load from '{name.partition('@')[0]}': "
    reason = re.split(r" \(revision|\. |\n", error.removeprefix(prefix))[0]
    if "build variant" in reason:
        step = f"name a commit with a build for torch {torch.__version__} in model.flash_kernel"
    elif "trusted publisher" in reason:
        step = "name a kernel of a publisher that the hub trusts in model.flash_kernel"
    elif constants.HF_HUB_OFFLINE:
        command = f"HF_HUB_OFFLINE=0 python -m shardwise.trainer.runtime.attention.flash_kernel {name}"
        step = f"where there is a network, run: {command}\nwith the same HF_HOME"
    else:
        step = "check that the hub can be reached and that it has this commit (model.flash_kernel)"
    return f"attention: {name} cannot be loaded: {reason.rstrip(':.')};\n{step}, or give pin.attention=sdpa"


def main(arguments: Sequence[str]) -> int:
    """Loads the kernel that is named; the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m shardwise.trainer.runtime.attention.flash_kernel OWNER/flash-attn2@COMMIT\n")
        return ExitCode.INPUT
    try:
        build = load_flash_kernel(arguments[0])
    except ShardwiseError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{build.kernel}: {build.variant}\n")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
