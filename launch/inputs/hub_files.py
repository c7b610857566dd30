"""A model's files from the Hugging Face hub: those already in the local cache, and a download of the rest.

The cache is read by its layout (`models--ORG--NAME/refs/REVISION` holds a commit, `snapshots/COMMIT/` its files), so
that a model that is here needs neither the network nor a library. Only a download imports huggingface_hub, which reads
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE itself. Pickled weights are never asked for.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from trainer.spec.errors import EnvironmentFaultError, InputError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
ANSWER_TIMEOUT_S = 4.0  # of the first question; the library's own waits and repetitions come to minutes
_LEFT_OUT = ("*/*", "consolidated*")  # other formats' folders, and a second copy of the weights


def hub_cache(cache_home: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The hub's cache: below `cache_home`, or where huggingface_hub would look."""
    if cache_home is not None:
        return cache_home / "hub"
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    if named := environment.get("HF_HOME"):
        return Path(named).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def find_snapshot(repository: str, *, revision: str | None, cache: Path) -> Path | None:
    """The folder of a revision's files that are here, None where there are none."""
    root = cache / f"models--{repository.replace('/', '--')}"
    name = revision or "main"
    try:
        commit = (root / "refs" / name).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = name
    snapshot = root / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def download_snapshot(
    repository: str,
    *,
    revision: str | None,
    cache: Path,
    setting: str,
    with_weights: bool,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Path:
    """Downloads config, tokenizer and, where asked for, weights; the folder that then holds them.

    `timeout_s` is of the first question.

    Raises InputError where the repository or revision does not exist or needs a token, EnvironmentFaultError where the
    hub cannot be reached; both say what to do next.
    """
    from huggingface_hub import HfApi, snapshot_download

    with (
        nullcontext() if with_weights else _without_progress_bars(),
        hub_errors_explained(repository, revision=revision, cache=cache, setting=setting, what="a model"),
    ):
        HfApi().repo_info(repository, revision=revision, timeout=timeout_s)
        folder = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            allow_patterns=[*_SMALL_FILES, *(_WEIGHT_FILES if with_weights else ())],
            ignore_patterns=list(_LEFT_OUT),
        )
    return Path(folder)


class RepositoryFiles(NamedTuple):
    """Files of a revision on the hub."""

    commit: str
    sizes: dict[str, int]  # bytes, by path


def list_snapshot(repository: str, *, revision: str | None, cache: Path, setting: str) -> RepositoryFiles:
    """What `download_snapshot` with weights would have in the cache; raises as it does."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    with hub_errors_explained(repository, revision=revision, cache=cache, setting=setting, what="a model"):
        described = HfApi().model_info(repository, revision=revision, timeout=ANSWER_TIMEOUT_S, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in described.siblings or ()}
    wanted = filter_repo_objects(sizes, allow_patterns=[*_SMALL_FILES, *_WEIGHT_FILES], ignore_patterns=list(_LEFT_OUT))
    assert described.sha is not None, "the hub answers with a commit"
    return RepositoryFiles(described.sha, {name: sizes[name] for name in wanted})


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is a revision of a repository in the hub's cache; its name is then the commit."""
    return folder.parent.name == "snapshots"


def download_code(repository: str, *, commit: str, cache: Path, setting: str) -> None:
    """Downloads the Python files of a model that a job trusts, beside its config of the same commit; runs none.

    Raises as `download_snapshot` does.
    """
    from huggingface_hub import snapshot_download

    with (
        _without_progress_bars(),
        hub_errors_explained(repository, revision=commit, cache=cache, setting=setting, what="a model"),
    ):
        snapshot_download(repository, revision=commit, cache_dir=cache, allow_patterns=["*.py"])


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            enable_progress_bars()


@contextmanager
def hub_errors_explained(
    repository: str, *, revision: str | None, cache: Path, setting: str, what: str, pages: str = ""
) -> Iterator[None]:
    """Turns what huggingface_hub raises inside into one line with the next step.

    `what` is "a model" or "a data set"; the hub has the pages of the latter below `datasets/`.
    """
    from huggingface_hub import errors

    transport_error = errors.HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            f"{setting}: {repository} is gated; ask for access at https://huggingface.co/{pages}{repository}, "
            "then run: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{setting}: {repository} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"{setting}: {repository} is neither a folder here nor {what} on the hub that you may see; check the "
            "name or, for a private one, run: hf auth login"
        ) from None
    except (transport_error, OSError) as error:
        raise EnvironmentFaultError(_unreachable(repository, setting=setting, error=error, cache=cache)) from error


def _unreachable(repository: str, *, setting: str, error: BaseException, cache: Path) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{setting}: {repository} cannot be downloaded into {cache}: {os.strerror(error.errno)}"
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the hub cannot be reached"
    return f"{setting}: {repository} is neither a folder here nor in {cache}, and {why}; name a local folder"
