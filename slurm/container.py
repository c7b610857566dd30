"""Which container runtime an image is for, and how a node starts a program in it. Pure.

    NAME, docker://NAME, FILE.sqsh    pyxis, a plugin of Slurm: options of srun
    FILE.sif, oras://, library://     Apptainer (or Singularity): a program that srun starts
    docker://NAME without pyxis       Apptainer

There is no Slurm inside a container, and putting one there (programs, plugins, libraries, the socket of munge) would
depend on the image. So the batch script stays outside: one `srun` starts one command a node, inside, and each is told
its number and the first node, as machines without Slurm are.
"""

import re
import shlex
from collections.abc import Sequence
from enum import StrEnum

from trainer.spec.errors import InputError
from trainer.spec.value import Value

_APPTAINER_IMAGES = ("oras://", "library://", "shub://")


class Runtime(StrEnum):
    """What starts containers."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


class Container(Value, frozen=True, kw_only=True):
    """An image, and the folders of the machine that must be seen inside, under the same paths."""

    runtime: Runtime
    image: str
    folders: tuple[str, ...] = ()


def container_of(image: str, *, folders: Sequence[str], has_pyxis: bool) -> Container:
    """The container for `slurm.container`; InputError for a folder it cannot show, and where nothing here runs it."""
    for folder in folders:
        if re.search(r"[:,]", folder):
            raise InputError(
                f"{folder}: a container cannot be given a folder with a colon or a comma in its path; rename it"
            )
    kept = _without_nested(folders)
    if image.endswith(".sif") or image.startswith(_APPTAINER_IMAGES):
        return Container(runtime=Runtime.APPTAINER, image=image, folders=kept)
    if has_pyxis:
        return Container(runtime=Runtime.PYXIS, image=_pyxis_name(image), folders=kept)
    if image.startswith("docker://"):
        return Container(runtime=Runtime.APPTAINER, image=image, folders=kept)
    raise InputError(
        f"slurm.container: {image} needs pyxis, and srun has no --container-image on this cluster; "
        "write docker://NAME or a .sif file, which Apptainer runs"
    )


def srun_words(container: Container, *, workdir: str) -> tuple[list[str], list[str]]:
    """Options of srun, and what stands before the program; every word is quoted for the shell."""
    mounts = ",".join(f"{folder}:{folder}" for folder in container.folders)
    if container.runtime is Runtime.PYXIS:
        options = [f"--container-image={container.image}", f"--container-workdir={workdir}"]
        options += [f"--container-mounts={mounts}"] if mounts else []
        return [shlex.quote(option) for option in options], []
    binds = ["--bind", mounts] if mounts else []
    words = ["exec", "--nv", *binds, "--pwd", workdir, container.image]
    return [], ['"$apptainer"', *map(shlex.quote, words)]


def _pyxis_name(image: str) -> str:
    """As every version of pyxis reads it: a registry is set off by `#`."""
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    if image.startswith("docker://") and slash and "#" not in name and re.search(r"[.:]|^localhost$", registry):
        return f"{registry}#{rest}"
    return name


def _without_nested(folders: Sequence[str]) -> tuple[str, ...]:
    """Each folder once, without those inside another."""
    unique = sorted(set(folders))
    return tuple(folder for folder in unique if not any(folder.startswith(f"{other.rstrip('/')}/") for other in unique))
