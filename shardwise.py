"""The Python API of shardwise: plan and train from a script or a notebook. Only re-exports.

import shardwise
plan = shardwise.plan("job.yaml", hardware="8xH100-SXM5-80GB")
report = shardwise.train("job.yaml", "train.lr=1e-4")
"""

from launch.api import estimate, plan, train
from trainer.spec.errors import ShardwiseError
from trainer.spec.job.sections import Job
from trainer.spec.plan import Plan
from trainer.spec.report import Report

__all__ = ["Job", "Plan", "Report", "ShardwiseError", "estimate", "plan", "train"]
