"""Writes a page where `--html` says."""

from pathlib import Path

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError


def write_page(path: Path, html: str) -> None:
    """InputError where the folder is not there, EnvironmentFaultError where it cannot be written."""
    try:
        path.write_text(html, encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"--html {path}: {error.strerror}; name a file in a folder that exists") from error
    except OSError as error:
        raise EnvironmentFaultError(f"--html {path}: cannot be written: {error.strerror}") from error
