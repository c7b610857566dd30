"""A checkpoint of something else is refused with both values, before any weight is touched."""

import pytest

from shardwise.trainer.runtime.checkpoint import check_compatible
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Precision

DIFFERENCES = {
    "model_config_sha256": ("cd" * 32, "model", "abababababab", "cdcdcdcdcdcd"),
    "data_fingerprint": ("rows-2", "dataset", "rows-1", "rows-2"),
    "seed": (1, r"train\.seed", 0, 1),
    "tokens_per_step": (128, r"train\.tokens_per_step", 64, 128),
    "sequences_per_step": (8, "sequences per step", 4, 8),
    "optimizer": (Optimizer.ADAMW_8BIT, "optimizer", "adamw", "adamw_8bit"),
}


@pytest.fixture(scope="module")
def checkpoint(tiny, newest, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    model = tiny.build_model()
    tiny.save(root, model, tiny.build_optimizer(model), 3)
    return newest(root)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named_with_both_values(tiny, checkpoint, name):
    value, what, old, new = DIFFERENCES[name]
    with pytest.raises(InputProblemsError, match=rf"^step-00000003 of tiny: .*{what}.* {old}, .* {new}\n") as error:
        check_compatible(checkpoint, tiny.build_facts(0, **{name: value}))
    assert len(error.value.problems) == 2


def test_what_a_resume_may_change_is_accepted(tiny, checkpoint):
    of_save = {"step": 900, "tokens_seen": 5, "versions": {"torch": "9"}, "run_name": "again", "best_step": 7}
    of_machine = {"sharding": Sharding.ZERO3, "world_size": 64, "precision": Precision.BF16_MIXED}
    for optimizer in (Optimizer.ADAMW_FUSED, Optimizer.DEEPSPEED_CPU_ADAM):
        check_compatible(checkpoint, tiny.build_facts(0, **of_save, **of_machine, optimizer=optimizer))
