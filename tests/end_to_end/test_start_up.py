"""Commands that read start without the libraries that training needs: they would take seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers", "peft", "numpy", "wandb",
    "typing_extensions",
)  # fmt: skip
REPOSITORY = Path(__file__).parents[2]
COMMANDS = (
    "plan examples/quickstart.yaml --json",
    "plan examples/quickstart.yaml --hardware 8xH100-SXM5-80GB --hardware 1xRTX-4090",
    "estimate CASES",
    "probe",
    "schema",
    "report RUN",
    "doctor --quick",  # whose code tells of faults of the machine
)
PROGRAM = """
import json, sys
from shardwise.launch.cli import main
heavy, *commands = map(str.split, json.loads(sys.argv[1]))
for words in commands:
    code = main(words)
    loaded = sorted(set(heavy) & {name.partition(".")[0] for name in sys.modules})
    sys.stderr.write(f"\\n{words[0]}: code {code} loaded {loaded}")
import typing_extensions  # for a library that needs it
"""


@pytest.mark.cold
def test_commands_that_read_import_nothing_heavy(tmp_path: Path) -> None:
    """One after another in one interpreter, which has nothing that another of them loaded."""
    case = json.loads((REPOSITORY / "benchmarks" / "measured_public.jsonl").read_text().partition("\n")[0])["case"]
    (tmp_path / "cases.jsonl").write_text(json.dumps(case) + "\n")
    places = {"CASES": str(tmp_path / "cases.jsonl"), "RUN": "tests/captured/run_of_0_7/run"}
    commands = [" ".join(places.get(word, word) for word in command.split()) for command in COMMANDS]
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([" ".join(HEAVY), *commands])],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [line for line in answer.stderr.splitlines() if " loaded " in line]
    assert len(found) == len(COMMANDS) and all(line.endswith(" loaded []") for line in found), answer.stderr
    assert all(": code 0 " in line for line in found[:-1]), answer.stderr
