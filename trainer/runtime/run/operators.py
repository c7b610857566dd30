"""Compiles DeepSpeed's operators into $TORCH_EXTENSIONS_DIR, so that no rank ever has to.

    python -m trainer.runtime.run.operators cpu_adam async_io

DeepSpeed compiles an operator when it is first used: for minutes, in every rank at once, and without a word. This runs
the same builders beforehand, in a process of its own (`launch.engine.operators` starts it), with the result that
`load()` in a rank finds a finished library. DeepSpeed itself finds the device that they are for, unless $DS_ACCELERATOR
names one.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.runtime.run.built_operators import FOLDER_VARIABLE, leave_out_debug_symbols, mark_loaded
from trainer.runtime.run.processor_facts import answer_for_processor

# Our name: the builder that DeepSpeed's accelerator makes by its class name.
BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "fused_adam": "FusedAdamBuilder",
    "shm_comm": "ShareMemCommBuilder",
}


def build(name: str) -> None:
    """Compiles one operator, or finds it compiled; RuntimeError where it cannot be."""
    from deepspeed.accelerator import get_accelerator

    answer_for_processor()
    leave_out_debug_symbols()
    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if builder is None:
        raise RuntimeError(f"DeepSpeed has no {name} for {get_accelerator().device_name()}")
    builder.load(verbose=True)
    mark_loaded(Path(os.environ[FOLDER_VARIABLE]))


def main(names: Sequence[str]) -> int:
    """Builds `names` one after the other; 2 for a name that is none."""
    unknown = [name for name in names if name not in BUILDERS]
    if unknown or not names:
        sys.stderr.write(f"no such operator: {' '.join(unknown)}; there are {' '.join(BUILDERS)}\n")
        return 2
    for name in names:
        build(name)
        sys.stdout.write(f"{name}: ready\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
