"""A cache of the hub with a kernel in it, and an environment in which transformers loads it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

REPOSITORY = "kernels-community/flash-attn2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KERNEL = f"{REPOSITORY}@{COMMIT}"
_HERE = Path(__file__).parent


def put_kernel(cache: Path, commit: str = COMMIT, *, variant: str = "torch-cpu", **metadata: Any) -> Path:
    snapshot = cache / f"kernels--{REPOSITORY.replace('/', '--')}" / "snapshots" / commit
    build = snapshot / "build" / variant
    shutil.copytree(_HERE / "torch_flash_kernel", build, ignore=shutil.ignore_patterns("__pycache__"))
    facts = {"id": f"flash_attn2_cpu_{commit[:7]}", "name": "flash-attn2", "version": 4, "license": "Apache-2.0"}
    facts |= {"python-depends": [], "backend": {"type": "cpu"}, **metadata}
    (build / "metadata.json").write_text(json.dumps(facts))
    return snapshot


def hub_environment(cache: Path, **settings: str) -> dict[str, str]:
    from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available

    environment = {**os.environ, "KERNELS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **settings}
    if not is_kernels_available():
        installed = cache / "installed"
        metadata = installed / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
        folders = [str(_HERE / "fake_kernels"), str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    return environment
