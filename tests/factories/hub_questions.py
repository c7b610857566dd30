"""Questions to a hub, asked through the real huggingface_hub in a process of its own.

The library reads its settings when it is imported, so that a process can ask one endpoint only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NO_HUB = "http://127.0.0.1:9"  # nobody listens there


def ask_hub(program: str, *words: str, home: Path, endpoint: str = NO_HUB, **environment: str) -> list[Any]:
    """The JSON list that the program prints last; it sees no setting of the hub but these."""
    retained = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "PROXY" not in name.upper()
    }
    answer = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**retained, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found
