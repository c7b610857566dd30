"""An exported folder on the Hugging Face hub: may it go there, asked before anything is made; and the upload.

huggingface_hub reads HF_TOKEN, the login that `hf auth login` stored, HF_ENDPOINT and HF_HUB_OFFLINE itself; the token
is handed to it alone. A new repository is private unless `--public` says otherwise; one that is there keeps what it is,
and is refused where that is not what was asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from launch.inputs.hub_files import HUB_ID, is_offline
from trainer.spec.errors import EnvironmentFaultError, InputError

_MAY_WRITE = ("admin", "write", "contributor")  # roles in an organisation
_LOG_IN = "log in with: hf auth login (a token with write access), or set HF_TOKEN"


class Target(NamedTuple):
    """A repository that this login may write to."""

    repository: str
    is_public: bool


def check_target(repository: str, *, is_public: bool) -> Target:
    """The repository, after the hub said that this login may write to it; it is not made yet.

    InputError for a name that is none, or is another's, or whose visibility is not the one asked for;
    EnvironmentFaultError without a login, with one that may only read, or where the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if HUB_ID.fullmatch(repository) is None:
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
        have, remedy = ("private", "leave --public out") if is_public else ("public", "add --public")
        raise InputError(f"--push {repository}: is on the hub already and is {have}; {remedy}, or name another")
    return Target(repository, is_public)


def upload(folder: Path, target: Target) -> str:
    """Uploads a folder as one commit, into a repository that is made where there is none; its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    again = f"the export is whole in {folder}; to try again: hf upload {target.repository} {folder} ."
    with _faults(target.repository, then=again):
        made = api.create_repo(target.repository, private=not target.is_public, exist_ok=True)
        api.upload_folder(repo_id=target.repository, folder_path=folder, commit_message="Export of a run, by shardwise")
    return str(made)


def _check_permission(repository: str, login: dict[str, Any]) -> None:
    """Whether the answer of whoami lets a login write to a repository."""
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
    """Whether a fine-grained token may write to a repository: by its name, or by its owner's."""
    names = (repository, repository.split("/")[0])
    return any(
        "repo.write" in each.get("permissions", ()) and each.get("entity", {}).get("name") in names
        for each in rights.get("scoped", ())
    )


@contextmanager
def _faults(repository: str, *, then: str = "nothing was exported") -> Iterator[None]:
    """Answers of the hub, and its silence, as EnvironmentFaultErrors of two lines."""
    from huggingface_hub import errors

    transport_error = errors.HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    try:
        yield
    except errors.HfHubHTTPError as error:
        status: Any = error.response.status_code if error.response is not None else "without a status"
        refusals: dict[int, str] = {401: "the hub does not know this token", 403: "the hub refuses to write there"}
        why = refusals.get(status, f"the hub answered {status}")
        remedy = f"{_LOG_IN}; {then}" if status in refusals else then
        raise EnvironmentFaultError(f"--push {repository}: {why};\n{remedy}") from error
    except (transport_error, OSError) as error:
        name = type(error).__name__
        raise EnvironmentFaultError(f"--push {repository}: the hub cannot be reached ({name});\n{then}") from error
