"""A package named wandb that misbehaves in one way, for the path of the process that loads it."""

from pathlib import Path

WAYS = {
    "hangs when it is loaded": ("", "import time\ntime.sleep(3600)"),
    "raises when a run begins": ("raise RuntimeError('cannot allocate a run')", ""),
    "ends its process when a run begins": ("sys.stderr.write('fatal: wandb\\n'); sys.stderr.flush(); os._exit(7)", ""),
}
_MODULE = """
import os
import sys
import time

{on_import}


class Settings:
    def __init__(self, **_settings):
        pass


def teardown(exit_code=None):
    pass


def init(**_settings):
    {on_init}
"""


def write_stand_in(folder: Path, way: str) -> Path:
    on_init, on_import = WAYS[way]
    proto = folder / "wandb" / "proto"
    proto.mkdir(parents=True)
    (folder / "wandb" / "__init__.py").write_text(_MODULE.format(on_import=on_import, on_init=on_init or "pass"))
    (proto / "__init__.py").touch()
    (proto / "wandb_internal_pb2.py").write_text("class Record:\n    pass\n")
    return folder
