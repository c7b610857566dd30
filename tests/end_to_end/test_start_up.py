"""Commands that only report never load the libraries that train."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold
HEAVY = (
    "torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers", "peft", "numpy", "wandb",
    "typing_extensions",
)  # fmt: skip
REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys
from shardwise.launch.cli import main
code = main(sys.argv[2:])
loaded = sorted(set(sys.argv[1].split(",")) & {name.partition(".")[0] for name in sys.modules})
import typing_extensions  # for a library that needs it
sys.stderr.write(f"code {code} loaded {loaded}")
"""


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "examples/quickstart.yaml", "--json"),
        ("plan", "examples/quickstart.yaml", "--hardware", "8xH100-SXM5-80GB", "--hardware", "1xRTX-4090"),
        ("estimate", "CASES.jsonl"),
        ("probe",),
        ("schema",),
        ("doctor", "--quick"),
    ],
    ids=" ".join,
)
def test_it_imports_nothing_heavy(command, tmp_path):
    cases = tmp_path / "CASES.jsonl"
    with (REPOSITORY / "benchmarks" / "measured_public.jsonl").open() as rows:
        cases.write_text(json.dumps(json.loads(rows.readline())["case"]) + "\n")
    words = [str(cases) if word == cases.name else word for word in command]
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(HEAVY), *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stderr.endswith("loaded []"), answer.stderr
    if command[0] != "doctor":  # whose code tells of faults of the machine
        assert "code 0 " in answer.stderr


def test_report_imports_nothing_heavy(trained):
    _, run_dir, _ = trained()
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(HEAVY), "report", str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stderr.endswith("code 0 loaded []"), answer.stderr
