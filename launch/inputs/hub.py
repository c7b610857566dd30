"""Models on the Hugging Face hub: files in the local cache, downloads, and the upload of an exported folder.

The cache is read and filled by huggingface_hub, which reads HF_TOKEN, the login stored by `hf auth login`, HF_ENDPOINT
and HF_HUB_OFFLINE itself. Its import takes 0.1 to 0.3 s, so only what needs it imports it: never a job without a
name on the hub, nor one of which the cache has nothing. A model that is here needs no network. Pickled weights are
never downloaded. A new repository is private unless `--public` is given; an existing one of another visibility is
refused.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec import Struct

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

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
REPLY_TIMEOUT_S = 4.0  # of the first request; the library's own timeouts and retries add up to minutes
_EXCLUDED = ("*/*", "consolidated*")  # other formats' folders, and a second copy of the weights
_MAY_WRITE = ("admin", "write", "contributor")  # roles in an organisation
_LOG_IN = "log in with: hf auth login (a token with write access), or set HF_TOKEN"


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


def is_hub_id(name: str) -> bool:
    """True of `ORG/NAME`."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE is set, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def repository_folder(cache: Path, repository: str, *, kind: str = "models") -> Path:
    """The folder of a repository in the cache; `kind` is models, datasets or kernels."""
    return cache / f"{kind}--{repository.replace('/', '--')}"


def find_snapshot(repository: str, *, revision: str | None, cache: Path) -> Path | None:
    """The folder of a revision's files in the cache, None if there are none."""
    if not repository_folder(cache, repository).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json", cache_dir=cache, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def download_snapshot(
    repository: str,
    *,
    revision: str | None,
    cache: Path,
    setting: str,
    with_weights: bool,
    timeout_s: float = REPLY_TIMEOUT_S,
    similar: Callable[[str], str | None] = lambda _: None,
) -> Path:
    """Downloads config, tokenizer and, on request, weights; returns their folder. `timeout_s` limits the first request.

    `similar` returns a known name that resembles one that is not found.

    Raises InputError if the repository or revision does not exist or needs a token, EnvironmentFaultError if the hub
    cannot be reached; both name the next step.
    """
    if is_offline():  # the library would report the same after its import
        raise EnvironmentFaultError(_unreachable(repository, setting=setting, cache=cache, similar=similar))
    from huggingface_hub import HfApi, snapshot_download

    with (
        nullcontext() if with_weights else without_progress_bars(),
        hub_errors_explained(
            repository, revision=revision, cache=cache, setting=setting, what="a model", similar=similar
        ),
    ):
        HfApi().repo_info(repository, revision=revision, timeout=timeout_s)
        folder = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            allow_patterns=[*_SMALL_FILES, *(_WEIGHT_FILES if with_weights else ())],
            ignore_patterns=list(_EXCLUDED),
        )
    return Path(folder)


def missing_files(repository: str, *, revision: str | None, cache: Path, setting: str) -> dict[str, int]:
    """Bytes of each file that `download_snapshot` with weights would download, by name; raises the same errors."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    with hub_errors_explained(repository, revision=revision, cache=cache, setting=setting, what="a model"):
        described = HfApi().model_info(repository, revision=revision, timeout=REPLY_TIMEOUT_S, files_metadata=True)
    assert described.sha is not None, "the hub returns a commit"
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in described.siblings or ()}
    wanted = filter_repo_objects(sizes, allow_patterns=[*_SMALL_FILES, *_WEIGHT_FILES], ignore_patterns=list(_EXCLUDED))
    return {
        name: sizes[name]
        for name in wanted
        if not isinstance(try_to_load_from_cache(repository, name, cache_dir=cache, revision=described.sha), str)
    }


def is_snapshot(folder: Path) -> bool:
    """True if a folder is a revision of a repository in the hub's cache; its name is then the commit."""
    return folder.parent.name == "snapshots"


def download_code(repository: str, *, commit: str, cache: Path, setting: str) -> None:
    """Downloads the Python files of a model that a job trusts, of the commit of its config; runs none.

    Raises the errors of `download_snapshot`.
    """
    from huggingface_hub import snapshot_download

    with (
        without_progress_bars(),
        hub_errors_explained(repository, revision=commit, cache=cache, setting=setting, what="a model"),
    ):
        snapshot_download(repository, revision=commit, cache_dir=cache, allow_patterns=["*.py"])


@contextmanager
def without_progress_bars() -> Iterator[None]:
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
    repository: str,
    *,
    revision: str | None,
    cache: Path,
    setting: str,
    what: str,
    pages: str = "",
    similar: Callable[[str], str | None] = lambda _: None,
) -> Iterator[None]:
    """Turns the errors of huggingface_hub into one line with the next step.

    `what` is "a model" or "a data set"; the hub has the pages of the latter below `datasets/`. `similar` returns a
    known name that resembles one that is not found.
    """
    from huggingface_hub import errors

    transport_error = errors.HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    try:
        yield
    except errors.HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{setting}: {repository} is neither a folder here nor a name on the hub: {reason}") from None
    except errors.GatedRepoError:
        raise InputError(
            f"{setting}: {repository} is gated; ask for access at https://huggingface.co/{pages}{repository}, "
            "then run: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{setting}: {repository} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"{setting}: {repository} is neither a folder here nor {what} on the hub that you may see; "
            f"{_meant(similar(repository)) or 'check the name'} or, for a private one, run: hf auth login"
        ) from None
    except (transport_error, OSError) as error:
        sentence = _unreachable(repository, setting=setting, cache=cache, similar=similar, error=error)
        raise EnvironmentFaultError(sentence) from error


def _meant(name: str | None) -> str:
    return f"did you mean {name}?" if name else ""


def _unreachable(
    repository: str,
    *,
    setting: str,
    cache: Path,
    similar: Callable[[str], str | None],
    error: BaseException | None = None,
) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{setting}: {repository} cannot be downloaded into {cache}: {os.strerror(error.errno)}"
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the hub cannot be reached"
    remedy = _meant(similar(repository)) or "name a local folder, or run shardwise fetch JOB where there is a network"
    return f"{setting}: {repository} is neither a folder here nor in {cache}, and {why}; {remedy}"


class Target(Struct, frozen=True):
    """A repository that this login may write to."""

    repository: str
    is_public: bool


def check_target(repository: str, *, is_public: bool) -> Target:
    """The repository, if this login may write to it; it is not created yet.

    Raises InputError for an invalid name, a repository of another owner or one of the other visibility;
    EnvironmentFaultError without a login, with a read-only token, or if the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if not is_hub_id(repository):
        raise InputError(f"--push {repository}: is not USER/NAME")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"--push {repository}: {str(error).splitlines()[0]}") from None
    if is_offline():
        raise EnvironmentFaultError(f"--push {repository}: HF_HUB_OFFLINE is set; unset it to upload")
    if get_token() is None:
        raise EnvironmentFaultError(f"--push {repository}: there is no login for the hub;\n{_LOG_IN}")
    api = HfApi()
    with _faults(repository):
        login: dict[str, Any] = api.whoami()
        _check_permission(repository, login)
        try:
            found = api.repo_info(repository)
        except RepositoryNotFoundError:
            return Target(repository, is_public)
    if is_public == bool(found.private):
        have, remedy = ("private", "remove --public") if is_public else ("public", "add --public")
        raise InputError(f"--push {repository}: is on the hub already and is {have}; {remedy}, or name another")
    return Target(repository, is_public)


def upload(folder: Path, target: Target) -> str:
    """Uploads a folder as one commit and returns the address; creates the repository if there is none."""
    from huggingface_hub import HfApi

    api = HfApi()
    again = f"the export is whole in {folder}; to try again: hf upload {target.repository} {folder} ."
    with _faults(target.repository, then=again):
        made = api.create_repo(target.repository, private=not target.is_public, exist_ok=True)
        api.upload_folder(repo_id=target.repository, folder_path=folder, commit_message="Export of a run, by shardwise")
    return str(made)


def _check_permission(repository: str, login: dict[str, Any]) -> None:
    """Refuses a login that, by the response of whoami, may not write to a repository."""
    owner, user = repository.split("/")[0], str(login.get("name"))
    organisations = [each for each in login.get("orgs", ()) if each.get("roleInOrg", "write") in _MAY_WRITE]
    owners = [user, *(str(each.get("name")) for each in organisations)]
    if owner not in owners:
        raise InputError(f"--push {repository}: you are {user} and may write to {', '.join(owners)}")
    token = login.get("auth", {}).get("accessToken", {})
    role = token.get("role")
    if role == "read" or (role == "fineGrained" and not _grants(token.get("fineGrained", {}), repository)):
        raise EnvironmentFaultError(
            f"--push {repository}: the token {token.get('displayName', 'in use')} may not write there;\n{_LOG_IN}"
        )


def _grants(rights: dict[str, Any], repository: str) -> bool:
    """True if a fine-grained token may write to a repository: by its name, or by its owner's."""
    names = (repository, repository.split("/")[0])
    return any(
        "repo.write" in each.get("permissions", ()) and each.get("entity", {}).get("name") in names
        for each in rights.get("scoped", ())
    )


@contextmanager
def _faults(repository: str, *, then: str = "nothing was exported") -> Iterator[None]:
    """Turns refusals and failures of the hub into EnvironmentFaultErrors of two lines."""
    from huggingface_hub import errors

    transport_error = errors.HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    try:
        yield
    except errors.HfHubHTTPError as error:
        status: Any = error.response.status_code if error.response is not None else "without a status"
        refusals: dict[int, str] = {401: "the hub does not know this token", 403: "the hub refuses to write there"}
        why = refusals.get(status, f"the hub returned {status}")
        remedy = f"{_LOG_IN}; {then}" if status in refusals else then
        raise EnvironmentFaultError(f"--push {repository}: {why};\n{remedy}") from error
    except (transport_error, OSError) as error:
        name = type(error).__name__
        raise EnvironmentFaultError(f"--push {repository}: the hub cannot be reached ({name});\n{then}") from error
