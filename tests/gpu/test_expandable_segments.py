"""Expandable segments where the driver cannot map memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.launch.probe.host import is_wsl

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not is_wsl(Path("/proc/version").read_text()), reason="is about the Windows Subsystem for Linux")
def test_w61_an_expandable_segment_fails_under_wsl():
    done = subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"],
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode and "CUDA driver error" in done.stderr
