"""Settings that are legal, that can be planned for, and that this version cannot train with yet.

`train` asks `later_problems` before anything starts; `plan` does not. To serve a setting: delete its row.
"""

from typing import NamedTuple

from trainer.spec.job import Job
from trainer.spec.job_writing import job_tree


class Later(NamedTuple):
    """The values of a setting that come with a later version, in the spelling of the job file; () is any value that
    is not the default."""

    path: str
    values: tuple[object, ...]
    version: str


COMES_LATER: tuple[Later, ...] = (
    Later("model.trust_remote_code", (), "0.4"),
    Later("data.format", ("prompt_completion", "chat", "preference"), "0.4"),
    Later("data.chat_template", (), "0.4"),
    Later("data.loss_on", ("completion", "assistant"), "0.4"),
    Later("data.streaming", (True,), "0.4"),
    Later("train.objective", ("sft", "dpo"), "0.4"),
    Later("pin.sharding", ("hsdp",), "0.6"),
    Later("checkpoint.async", (True,), "0.5"),
    Later("eval.early_stop", (), "0.4"),
    Later("log.wandb", ("offline", "online"), "0.7"),
    Later("log.tensorboard", (True,), "0.7"),
    Later("log.notify", (), "0.7"),
    Later("extensions", (), "0.4"),
)


def later_problems(job: Job) -> tuple[str, ...]:
    """One line for each setting this version cannot train with: `data.format: chat comes with shardwise 0.4`."""
    return tuple(
        f"{row.path}{_written(value)} comes with shardwise {row.version}"
        for row in COMES_LATER
        if (value := _value(job, row.path)) in row.values or (not row.values and value != _value(Job(), row.path))
    )


def _value(job: Job, path: str) -> object:
    found: object = job_tree(job)
    for name in path.split("."):
        assert isinstance(found, dict)
        found = found[name]
    return found


def _written(value: object) -> str:
    return f": {'true' if value is True else value}"
