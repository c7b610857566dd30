"""Installed packages, by the names of their metadata folders; and whether a torch build fits the GPUs of this machine.

`importlib.metadata` finds the same folders, but it loads the standard library's mail parser and parses a package's
whole description for its version: a fifth of the time of `shardwise plan`. The folder's name holds both, by
the specification of recorded projects (packaging.python.org): `NAME-VERSION.dist-info`.

Before gigabytes of torch are downloaded, `make install` checks that the build has code for a GPU of this machine. Only
the standard library is there by then, so this module imports nothing else:

    nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader |
        python -m shardwise.launch.probe.installed VERSION

VERSION is the torch that pip would install. Exit code 4: it can use none of the cards, and stderr names one that can.
"""

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.packages import CUDA_12_INDEX, OLDEST_CAPABILITY, extra_line, lacks_code


def installed_version(name: str) -> str | None:
    """The version of a package by any spelling of its name, None if it is not installed."""
    found = _installed(tuple(sys.path)).get(_normalized(name))
    return None if found is None else found[0]


def installed_ns(name: str) -> int | None:
    """Time of a package's installation, in nanoseconds since the epoch; None if it is not installed."""
    found = _installed(tuple(sys.path)).get(_normalized(name))
    return None if found is None else os.stat(found[1]).st_mtime_ns  # noqa: PTH116 - as above


class UnfitVersion(NamedTuple):
    """An installed package whose version another package does not accept."""

    required: str  # `<0.19,>=0.18.2`
    sentence: str  # `kernels 0.17.2 is installed; transformers 5.23.0 requires <0.19,>=0.18.2`


def unfit_version(name: str, *, user: str) -> UnfitVersion | None:
    """None if `user` accepts the version, if either package is missing, or if `user` states no versions."""
    packages = _installed(tuple(sys.path))
    installed, requiring = packages.get(_normalized(name)), packages.get(_normalized(user))
    if installed is None or requiring is None:
        return None
    requirement = re.search(
        rf"^Requires-Dist: {re.escape(name)} *([<>=!~][^;\n]*)", _metadata(requiring[1]), re.MULTILINE
    )
    if requirement is None:
        return None
    # Imported here: an ordinary plan starts faster without it.
    from packaging.specifiers import SpecifierSet

    wanted = requirement[1].strip()
    if SpecifierSet(wanted).contains(installed[0], prereleases=True):
        return None
    return UnfitVersion(wanted, f"{name} {installed[0]} is installed; {user} {requiring[0]} requires {wanted}")


def needed_libraries(*extras: str) -> tuple[str, ...]:
    """Names of the libraries that shardwise needs, those of `extras` included; empty if it is not installed itself."""
    own = _installed(tuple(sys.path)).get("shardwise")
    lines = re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", "" if own is None else _metadata(own[1]), re.MULTILINE)
    wanted = {f"extra == '{extra}'" for extra in extras}
    return tuple(name for name, rest in lines if "extra ==" not in rest or any(text in rest for text in wanted))


def require_libraries_of_training() -> None:
    """Raises EnvironmentFaultError with the line that installs them if a library that training needs is missing."""
    missing = [name for name in needed_libraries("train") if installed_version(name) is None]
    if missing:
        raise EnvironmentFaultError(f"training needs {', '.join(missing)}, not installed here:\n{extra_line('train')}")


def obstacle_to_torch(cards: str, torch_version: str) -> tuple[str, ...]:
    """Lines for the user if torch can use none of the cards that nvidia-smi lists; else empty."""
    known = [
        ((int(found[1]), int(found[2])), found[3].strip()) for found in re.finditer(r"(?m)^(\d+)\.(\d+), *(.+)$", cards)
    ]
    if not known or not all(lacks_code(torch_version, capability) for capability, _ in known):
        return ()
    (major, minor), name = max(known)
    oldest = ".".join(map(str, OLDEST_CAPABILITY))
    return (
        f"{name} has compute capability {major}.{minor}; torch {torch_version}, which pip would download, is built for "
        f"CUDA 13 and has code for {oldest} and newer: nothing was downloaded",
        f"a build for CUDA 12 has code for this card: export PIP_EXTRA_INDEX_URL={CUDA_12_INDEX}",
        "or train on the CPU: export CUDA_VISIBLE_DEVICES=",
    )


def main() -> ExitCode:
    """Reads the cards from stdin."""
    lines = obstacle_to_torch(sys.stdin.read(), sys.argv[1])
    sys.stderr.writelines(f"{line}\n" for line in lines)
    return ExitCode.ENVIRONMENT if lines else ExitCode.DONE


def _metadata(folder: str) -> str:
    """The METADATA file of a package; empty if there is none."""
    try:
        return Path(folder, "METADATA").read_text(encoding="utf-8")
    except OSError:
        return ""


@cache
def _installed(folders: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Version and metadata folder of every package that can be imported.

    Of several in one name the first folder's counts, as for an import.
    """
    packages: dict[str, tuple[str, str]] = {}
    for folder in folders:
        try:
            entries = os.listdir(folder or ".")  # noqa: PTH208 - a hundred Path objects take longer than the rest
        except OSError:
            continue  # a zip file, or a missing folder
        for entry in entries:
            name, _, rest = entry.partition("-")
            version, _, kind = rest.rpartition(".")
            if version and kind in ("dist-info", "egg-info") and not name.startswith("~"):  # left over by pip
                packages.setdefault(_normalized(name), (version.partition("-")[0], f"{folder}/{entry}"))
    return packages


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
