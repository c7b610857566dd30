"""Commands that only report never load the libraries that train."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold
HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers", "peft", "numpy", "wandb")
REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys
from shardwise.launch.cli import main
code = main(sys.argv[2:])
loaded = sorted(set(sys.argv[1].split(",")) & {name.partition(".")[0] for name in sys.modules})
sys.stderr.write(f"code {code} loaded {loaded}")
"""


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "examples/quickstart.yaml"),
        ("plan", "examples/quickstart.yaml", "--json"),
        ("plan", "examples/quickstart.yaml", "--hardware", "8xH100-SXM5-80GB", "--hardware", "1xRTX-4090"),
        ("estimate", "benchmarks/measured_public.jsonl"),
        ("probe",),
        ("schema",),
        ("doctor", "--quick"),
    ],
    ids=" ".join,
)
def test_it_imports_nothing_heavy(command):
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(HEAVY), *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stderr.endswith("code 0 loaded []"), answer.stderr


def test_report_imports_nothing_heavy(trained):
    _, run_dir, _ = trained()
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(HEAVY), "report", str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stderr.endswith("code 0 loaded []"), answer.stderr
