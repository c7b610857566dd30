"""The files of a stream on this machine: those of the hub come when they are read, and go when they were.

A file of a data set never changes at its commit, so that one that was removed can be fetched again. Only the names that
were listed are fetched: rows and text, by suffix, never a script.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from trainer.spec.data.request import SourceFile
from trainer.spec.errors import EnvironmentFaultError

_HUB = "hf://datasets/"
_PAUSES_S = (10.0, 60.0)  # between attempts at one file, in each of which the library asks six times in half a minute


class FileFetcher:
    """Fetches files into a folder that somebody else removes at last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def opened(self, file: SourceFile) -> Iterator[SourceFile]:
        """The file as it is on this machine; a fetched one is gone afterwards."""
        if not file.is_remote:
            yield file
            return
        try:
            yield self.fetch(file)
        finally:
            shutil.rmtree(self._place(file), ignore_errors=True)

    def fetch(self, file: SourceFile) -> SourceFile:
        """The file on this machine, fetched where it is not there yet; EnvironmentFaultError where it cannot be."""
        if not file.is_remote:
            return file
        repository, commit, name = _parsed(file.path)
        path = self._place(file) / name
        if not path.is_file():
            _download(repository, commit, name, self._place(file))
        status = path.stat()
        if status.st_size != file.size_bytes:
            raise EnvironmentFaultError(
                f"{file.path}: has {status.st_size} bytes, the hub listed {file.size_bytes}; start again with --resume"
            )
        return replace(file, path=str(path), mtime_ns=status.st_mtime_ns)

    def _place(self, file: SourceFile) -> Path:
        return self._folder / f"fetched-{blake2b(file.path.encode(), digest_size=8).hexdigest()}"


def _parsed(path: str) -> tuple[str, str, str]:
    """(ORG/NAME, commit, file) of hf://datasets/ORG/NAME@COMMIT/file."""
    repository, _, rest = path.removeprefix(_HUB).partition("@")
    commit, _, name = rest.partition("/")
    return repository, commit, name


def _download(repository: str, commit: str, name: str, folder: Path) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    transport_error = HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    for pause_s in (*_PAUSES_S, None):
        try:
            hf_hub_download(repository, name, repo_type="dataset", revision=commit, local_dir=folder)
        except (transport_error, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                words = os.strerror(error.errno)
                raise EnvironmentFaultError(f"{folder}: {name} cannot be written there: {words}") from error
            if pause_s is None or _is_final(error):
                raise EnvironmentFaultError(
                    f"data.train: {repository}@{commit}: {name} cannot be fetched: {_words(error)}\n"
                    "mend that, and go on from the last checkpoint with --resume"
                ) from error
            time.sleep(pause_s)
        else:
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            return


def _words(error: Exception) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return "HF_HUB_OFFLINE is set" if _is_offline() else "the hub cannot be reached"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_final(error: Exception) -> bool:
    """Whether asking again would not help: the hub has answered that it will not give the file."""
    from huggingface_hub import errors

    refusals = (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    is_refusal = isinstance(error, refusals) and not isinstance(error, errors.LocalEntryNotFoundError)
    return is_refusal or _is_offline()
