"""The Python API of shardwise: plan and train from a script or a notebook.

import shardwise
plan = shardwise.plan(model="Qwen/Qwen2.5-7B", data="chats.jsonl", hardware="RTX 4090")
run = shardwise.train("job.yaml", "train.lr=1e-4")
shardwise.export(run, "model", format="gguf")

The folders of the repository are the subpackages: `shardwise/trainer` is a link to `trainer`, and so on. Importing the
package alone loads none of them, as each rank and each command does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.launch.api import chat, data, estimate, export, plan, report, train
    from shardwise.trainer.spec.errors import ShardwiseError
    from shardwise.trainer.spec.job.sections import Job
    from shardwise.trainer.spec.plan import Plan
    from shardwise.trainer.spec.report import Report

__all__ = ["Job", "Plan", "Report", "ShardwiseError", "chat", "data", "estimate", "export", "plan", "report", "train"]

_MODULES = {
    "Job": "trainer.spec.job.sections",
    "Plan": "trainer.spec.plan",
    "Report": "trainer.spec.report",
    "ShardwiseError": "trainer.spec.errors",
    **dict.fromkeys(("chat", "data", "estimate", "export", "plan", "report", "train"), "launch.api"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(f"shardwise.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
