"""A file system that is soon full, and a limit of files that needs no mount."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from suite_remains import MARK, disk_source


@contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size`, such as `2m`, at `folder`; skips where nothing may be mounted."""
    folder.mkdir(exist_ok=True)
    source = disk_source(os.environ[MARK])
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", source, folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs needs root (run the tests in a container): {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel refuses longer files; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip_bit(path: Path, place: int = -1) -> None:
    """Damages a file in one bit of the byte at this place."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
