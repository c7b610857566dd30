"""Settings that are legal, that can be planned for, and that this version cannot train with yet.

`train` asks `later_problems` before anything starts; `plan` does not. To serve a setting: delete its row.
"""

from typing import Any, NamedTuple

from trainer.spec.job import Job
from trainer.spec.job_writing import job_tree


class Later(NamedTuple):
    """The values of a setting that come with a later version, in the spelling of the job file; () is any value that
    is not the default."""

    path: str
    values: tuple[object, ...]
    version: str


COMES_LATER: tuple[Later, ...] = (
    Later("log.wandb", ("offline", "online"), "0.7"),
    Later("log.tensorboard", (True,), "0.7"),
    Later("log.notify", (), "0.7"),
)


def later_problems(job: Job) -> tuple[str, ...]:
    """One line for each setting this version cannot train with: `data.format: chat comes with shardwise 0.4`."""
    written, default = job_tree(job), job_tree(Job())
    return tuple(
        f"{row.path}{_written(value)} comes with shardwise {row.version}"
        for row in COMES_LATER
        if (value := _value(written, row.path)) in row.values or (not row.values and value != _value(default, row.path))
    )


def _value(tree: dict[str, Any], path: str) -> object:
    found: object = tree
    for name in path.split("."):
        assert isinstance(found, dict)
        found = found[name]
    return found


def _written(value: object) -> str:
    return f": {'true' if value is True else value}"
