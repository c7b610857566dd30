"""DeepSpeed's operators in a rank: those that were built before are loaded as they are (W56).

DeepSpeed asks a compiler's driver each time whether an operator is up to date, under a lock that a rank which is killed
leaves behind, and compiles anew, for minutes and without a word, where a flag or a header's time is another. Whoever
started the ranks has built what they need (`launch.engine.operators`) in a folder that is of these versions and this
machine alone, and has marked what is whole.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_VARIABLE = "TORCH_EXTENSIONS_DIR"


def use_built_operators() -> None:
    """From here on, operators that are marked as built are imported; others are DeepSpeed's to build."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    build = OpBuilder.jit_load
    if hasattr(build, "imports_built"):
        return

    def jit_load(self: Any, verbose: bool = True) -> ModuleType:  # noqa: ANN401, FBT001, FBT002  # DeepSpeed's own signature
        library = built_library(self.name)
        module: ModuleType = build(self, verbose) if library is None else _imported(self.name, library)
        OpBuilder._loaded_ops[self.name] = module
        return module

    jit_load.imports_built = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    OpBuilder.jit_load = jit_load


def built_library(name: str) -> Path | None:
    """The library of an operator that was built and loaded once; None where there is none in this environment."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not marker(Path(folder), name).is_file():
        return None
    library = Path(folder, name, f"{name}.so")
    return library if library.is_file() else None


def marker(folder: Path, name: str) -> Path:
    """Written after an operator was built and loaded; a library alone may be half of one."""
    return folder / f"{name}.built"


def mark_loaded(folder: Path) -> None:
    """Marks every operator that this process has built and loaded, also those that another needed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    for name in OpBuilder._loaded_ops:
        if Path(folder, name, f"{name}.so").is_file():
            marker(folder, name).touch()


def leave_out_debug_symbols() -> None:
    """Compiles without `-g`, which nobody looks at: two fifths less time."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    keep = OpBuilder.strip_empty_entries
    OpBuilder.strip_empty_entries = lambda self, args: [each for each in keep(self, args) if each != "-g"]


def _imported(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None, library
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
