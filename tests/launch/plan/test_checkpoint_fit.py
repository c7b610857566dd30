"""Which fallbacks a checkpoint lets go on, from its manifest alone."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from report_factory import make_candidate

from shardwise.launch.plan.checkpoints import SavedFacts, obstacle_to_resume, read_facts
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method, Precision

SAVED = SavedFacts(step=30, optimizer=Optimizer.ADAMW, precision=Precision.FP32)
ADAPTERS = msgspec.to_builtins(LoraJob())


def candidate(*, method: Method = Method.FULL, **strategy: object) -> Candidate:
    made = make_candidate(method=method)
    return replace(made, strategy=replace(made.strategy, **strategy))


@pytest.mark.parametrize(
    ("saved", "wanted", "obstacle"),
    [
        (SAVED, candidate(), None),
        (SAVED, candidate(optimizer=Optimizer.ADAMW_FUSED, sharding=Sharding.ZERO3), None),
        (SAVED, candidate(optimizer=Optimizer.DEEPSPEED_CPU_ADAM), None),
        (SAVED, candidate(precision=Precision.BF16_MIXED), None),
        (SAVED, candidate(optimizer=Optimizer.ADAMW_8BIT), "adamw"),
        (SAVED, candidate(optimizer=Optimizer.SGD), "adamw"),
        (SAVED, candidate(precision=Precision.BF16), "fp32"),
        (SAVED, candidate(method=Method.LORA), "weights"),
        (replace(SAVED, optimizer=Optimizer.LION), candidate(optimizer=Optimizer.LION), None),
        (replace(SAVED, precision=Precision.BF16), candidate(precision=Precision.BF16), None),
        (replace(SAVED, lora=ADAPTERS), candidate(method=Method.LORA), None),
        (replace(SAVED, lora=ADAPTERS), candidate(method=Method.QLORA), "weights"),
        (None, candidate(optimizer=Optimizer.SGD), None),
    ],
)
def test_a_fallback_goes_on_where_its_state_means_the_same(saved, wanted, obstacle):
    found = obstacle_to_resume(saved, wanted)
    assert found is None if obstacle is None else obstacle in (found or "")


def test_facts_are_read_from_a_manifest_whatever_else_it_holds(tmp_path: Path):
    facts = {"step": 30, "optimizer": "adamw", "precision": "fp32", "run_name": "bot", "later": {"key": 1}}
    (tmp_path / "MANIFEST.json").write_bytes(msgspec.json.encode({"format": 9, "facts": facts, "parameters": {}}))
    assert read_facts(tmp_path) == SAVED
    (tmp_path / "MANIFEST.json").write_text('{"facts": ')
    assert read_facts(tmp_path) is None and read_facts(tmp_path / "nowhere") is None
