"""From a `Job` back to the tree of a job file, in the spelling a person would use."""

from typing import Any

from trainer.spec.job.fields import EXCLUSIVE, FIELDS, attribute
from trainer.spec.job.sections import Job
from trainer.spec.job.sources import EvalSplit


def job_tree(job: Job) -> dict[str, Any]:
    """The job in the job file's own spelling, every setting; `read_job` gives the same job again."""
    tree: dict[str, Any] = {}
    for entry in FIELDS:
        value = _value(job, entry.path)
        if value is None and any(entry.path in group for group in EXCLUSIVE):
            continue
        section = tree
        *outer, name = entry.path.split(".")
        for part in outer:
            section = section.setdefault(part, {})
        section[name] = entry.kind.write(value)
    return tree


def _value(job: Job, path: str) -> Any:  # noqa: ANN401 - each setting has a type of its own
    if path == "data.eval":
        data = job.data
        return EvalSplit(data.eval_share, data.eval_source, data.eval_subset, data.eval_split)
    found: Any = job
    for name in path.split(".")[:-1]:
        found = getattr(found, name)
    return getattr(found, attribute(path))
