"""Operators that were built before are loaded as they are; what is not marked as whole is left to DeepSpeed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from operator_cache import folder_with_operators

from shardwise.trainer.runtime.run.operators import built_library, marker

TIMEOUT_S = 600

# Loads DeepSpeed's CPU Adam, with ours or without, and tells whether a compiler's driver was asked.
LOAD = """
import json
import torch.utils.cpp_extension as cpp_extension
asked, load = [], cpp_extension.load
def counted(*args, **kwargs):
    asked.append(None)
    return load(*args, **kwargs)
cpp_extension.load = counted
{before}
from deepspeed.ops.op_builder import CPUAdamBuilder
module = CPUAdamBuilder().load(verbose=False)
again = CPUAdamBuilder().load(verbose=False)
print("answer:" + json.dumps([len(asked), again is module, hasattr(module, "create_adam")]))
"""
OURS = "from shardwise.trainer.runtime.run.operators import use_built_operators as use; use(); use()"
PLAIN = "from shardwise.trainer.runtime.run.operators import leave_out_debug_symbols; leave_out_debug_symbols()"


def load(folder: Path, before: str) -> list[object]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(before=before)], env=environment,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("answer:"))
    answer: list[object] = json.loads(line.removeprefix("answer:"))
    return answer


def test_w56_deepspeed_asks_the_compiler_for_an_operator_that_is_built():
    assert load(folder_with_operators("cpu_adam"), PLAIN) == [1, True, True]


def test_a_rank_imports_what_was_built():
    assert load(folder_with_operators("cpu_adam"), OURS) == [0, True, True]


def test_only_a_library_that_is_marked_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert built_library("cpu_adam") is None
    library = tmp_path / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir()
    library.touch()
    assert built_library("cpu_adam") is None, "a library alone may be half of one"
    marker(tmp_path, "cpu_adam").touch()
    assert built_library("cpu_adam") == library
    library.unlink()
    assert built_library("cpu_adam") is None
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert built_library("cpu_adam") is None
