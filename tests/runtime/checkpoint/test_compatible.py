"""A checkpoint of something else is refused with both values, before any weight is touched."""

from types import ModuleType

import pytest

from shardwise.trainer.runtime.checkpoint import CheckpointFolder, check_compatible, config_sha256, find_checkpoint
from shardwise.trainer.spec.errors import InputError, InputProblemsError
from shardwise.trainer.spec.strategy import Optimizer, Precision, Sharding


@pytest.fixture(scope="module")
def checkpoint(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    root = tmp_path_factory.mktemp("saved")
    model = tiny.build_model()
    tiny.save(root, model, tiny.build_optimizer(model), 3)
    found = find_checkpoint(root, on_skip=pytest.fail)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"model_config_sha256": "cd" * 32},
            "another model (sha256 of its config): it has abababababab, this job cdcd",
        ),
        ({"data_fingerprint": "rows-2"}, "another dataset (fingerprint): it has rows-1, this job rows-2"),
        ({"seed": 1}, "another train.seed: it has 0, this job 1"),
        ({"tokens_per_step": 128}, "another train.tokens_per_step: it has 64, this job 128"),
        ({"sequences_per_step": 8}, "another sequences per step: it has 4, this job 8"),
        ({"optimizer": Optimizer.SGD}, "another optimizer: it has adamw, this job sgd"),
        ({"optimizer": Optimizer.ADAMW_8BIT}, "another optimizer: it has adamw, this job adamw_8bit"),
    ],
)
def test_what_differs_is_named_with_both_values(
    tiny: ModuleType, checkpoint: CheckpointFolder, changed: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError) as error:
        check_compatible(checkpoint, tiny.build_facts(0, **changed))
    first, *rest = str(error.value).splitlines()
    assert first.startswith("step-00000003 of tiny: ")
    assert sentence in first
    assert rest == ["undo the change, or start a new run without --resume"]


def test_everything_that_differs_is_said_at_once(tiny: ModuleType, checkpoint: CheckpointFolder) -> None:
    with pytest.raises(InputProblemsError) as error:
        check_compatible(checkpoint, tiny.build_facts(0, seed=1, data_fingerprint="rows-2"))
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"step": 900, "tokens_seen": 5},
        {"sharding": Sharding.ZERO3, "world_size": 64},
        {"precision": Precision.BF16_MIXED},
        {"optimizer": Optimizer.ADAMW_FUSED},
        {"optimizer": Optimizer.DEEPSPEED_CPU_ADAM},
        {"versions": {"torch": "9"}, "run_name": "again", "best_step": 7},
    ],
)
def test_what_a_resume_may_change_is_accepted(
    tiny: ModuleType, checkpoint: CheckpointFolder, changed: dict[str, object]
) -> None:
    check_compatible(checkpoint, tiny.build_facts(0, **changed))


def test_config_hash_sees_values_and_not_the_order_of_keys() -> None:
    config = {"hidden_size": 18, "rope": {"theta": 1e4, "type": "default"}}
    turned = {"rope": {"type": "default", "theta": 1e4}, "hidden_size": 18}
    assert config_sha256(config) == config_sha256(turned)
    assert config_sha256(config) != config_sha256(config | {"hidden_size": 20})
