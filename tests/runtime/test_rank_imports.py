"""What a rank of a plain run has imported at its first step: one rank, Llama, AdamW, nothing sharded.

The rank runs in an interpreter of its own that has imported nothing before. torch's and transformers' own modules are
no part of the budget: `transformers.modeling_utils` imports torch's FSDP2, its DTensor and its compiler by itself.
"""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt, write_rows

from shardwise.trainer.spec.messages.extension import Extension, Hook

PYTHON = Path(sys.prefix, "bin", "python")
TIMEOUT_S = 300  # only a rank that hangs needs it
NOT_IMPORTED = (
    # engines, methods, optimizers and kernels that another plan names
    "deepspeed", "peft", "bitsandbytes", "trl", "galore_torch", "torchao", "transformer_engine", "liger_kernel",
    "kernels", "flash_attn", "shardwise.trainer.runtime.optimizers.eight_bit",
    # data is read from prepared rows
    "datasets", "pyarrow", "pandas", "shardwise.trainer.runtime.data.prepare",
    # the export and what checks it
    "onnx", "onnxruntime", "onnxscript",
    "shardwise.trainer.runtime.export.run", "shardwise.trainer.runtime.export.check",
    # metrics leave through another process
    "wandb", "tensorboard", "torch.utils.tensorboard",
    # what no training of text needs
    "scipy", "sklearn", "matplotlib", "torchvision", "torchaudio", "librosa",
    # starting and planning
    "launch", "slurm", "shardwise.trainer.planning", "shardwise.trainer.simulation", "torch.distributed.run",
)  # fmt: skip
AT_FIRST_STEP = """
import gc
import json
import os
import sys

def on_step(step, metrics):
    seen = {{"modules": sorted(sys.modules), "collects": gc.isenabled(), "frozen": gc.get_freeze_count()}}
    with open({path!r}, "w") as file:
        json.dump(seen, file)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def first_step(tmp_path_factory) -> dict[str, object]:
    """The modules of a rank at its first step, and what its garbage collector does then."""
    folder = tmp_path_factory.mktemp("first-step")
    body = AT_FIRST_STEP.format(path=str(folder / "seen.json"))
    (folder / "mine.py").write_text(body)
    extension = Extension(path=str(folder / "mine.py"), sha256=sha256(body.encode()).hexdigest(), hooks=(Hook.ON_STEP,))
    plan = replace(rank_plan(write_rows(folder / "rows"), num_steps=2), extension=extension)
    argv = [str(PYTHON), "-m", "shardwise.trainer", str(write_attempt(folder / "run", plan))]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    rank = subprocess.run(
        argv, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert rank.returncode == 0, rank.stdout + rank.stderr
    seen: dict[str, object] = json.loads((folder / "seen.json").read_text())
    return seen


def test_it_has_imported_nothing_that_its_plan_does_not_use(first_step):
    modules = first_step["modules"]
    assert "transformers.models.llama.modeling_llama" in modules
    assert [name for name in modules if any(f"{name}.".startswith(f"{other}.") for other in NOT_IMPORTED)] == []


def test_the_garbage_collector_is_on_and_leaves_out_what_the_imports_made(first_step):
    assert first_step["collects"] and first_step["frozen"] > 100 * len(first_step["modules"])
