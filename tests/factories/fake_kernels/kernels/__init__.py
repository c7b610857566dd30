"""A stand-in for the `kernels` package: what transformers imports of it, and loading from a cache that is filled."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

BUILD = "torch-cpu"


def get_kernel(
    repo_id: str, *, revision: str | None = None, version: int | None = None, user_agent: object = None,
    trust_remote_code: bool = False,
) -> ModuleType:  # fmt: skip
    """The module of a kernel at a revision."""
    assert revision is not None and version is None and not trust_remote_code
    overrides = dict(entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry)
    cached = Path(os.environ["KERNELS_CACHE"], f"kernels--{repo_id.replace('/', '--')}", "snapshots", revision)
    snapshot = Path(overrides.get(repo_id, cached))
    if not snapshot.is_dir():
        raise FileNotFoundError(
            f"Cannot find a local snapshot for {repo_id} (revision: {revision}). "
            "When Hugging Face Hub is in offline mode the kernel must already be present in the local cache."
        )
    variant = snapshot / "build" / BUILD
    if not variant.is_dir():
        raise FileNotFoundError(
            f"Cannot find a build variant for this system in {repo_id} (revision: {revision}):\n\nnone of them"
        )
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_kernel_forward_from_hub(*names):
    """Leaves a class as it is: nothing is replaced before `kernelize` is asked to."""
    return lambda layer: layer


class LayerRepository:
    """Where a layer would be replaced from; transformers makes some while it is imported."""

    def __init__(self, **fields: object) -> None:
        self.fields = fields


use_kernelized_func = use_kernel_forward_from_hub
Device = LocalLayerRepository = FuncRepository = CUDAProperties = ROCMProperties = LayerRepository
Mode = KernelizeFallback = register_kernel_mapping = replace_kernel_forward_from_hub = None
use_kernel_mapping = kernelize = None
