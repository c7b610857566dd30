"""kill -9 of one rank of two, or of both, at any moment, also while a checkpoint is written beside the training."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NUM_RANDOM = 15
_PROGRAM = Path(__file__).with_name("rank_kills.py")


def run_program(*arguments: object) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The state of a run that nobody killed, by step."""
    root = tmp_path_factory.mktemp("reference") / "run"
    run_program("reference", root, 410)
    return {int(step): digest for step, digest in json.loads((root / "digests.json").read_text()).items()}


def outcomes_of(root: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    run_program("kill", root, *seeds)
    return [json.loads((root / str(seed) / "outcome.json").read_text()) for seed in seeds]


def check(outcomes: Sequence[dict[str, Any]], digests: dict[int, str]) -> None:
    """Nothing damaged (the program looks), nothing committed lost, the state that of the run that was never killed."""
    for outcome in outcomes:
        newest = outcome["newest"]
        assert newest >= outcome["told"], "what was told to be committed is there"
        assert newest == 0 or outcome["digest"] == digests[newest]
        assert outcome["digest_after"] == digests[newest + 4]
        assert not [name for name in outcome["left"] if name.startswith(".tmp-")]
    counts = Counter((len(each["victims"]), each["in_background"]) for each in outcomes)
    assert len(counts) == 4, "one and both, waited for and in the background"
    assert sum(each["newest"] > 0 for each in outcomes) >= len(outcomes) // 3, "most moments fall into the run"
    who, how = {1: "one rank", 2: "both ranks"}, {False: "waiting for saves", True: "saving beside"}
    told = ", ".join(f"{count} of {who[num]} {how[beside]}" for (num, beside), count in sorted(counts.items()))
    sys.stdout.write(f"{len(outcomes)} kills: {told}; no checkpoint damaged, none lost\n")


def test_fifteen_kills_of_ranks_cost_only_uncommitted_steps(digests, tmp_path):
    check(outcomes_of(tmp_path, range(NUM_RANDOM)), digests)


@pytest.mark.long
def test_two_hundred_kills_of_ranks_cost_only_uncommitted_steps(digests, tmp_path):
    check(outcomes_of(tmp_path, range(1000, 1200)), digests)
