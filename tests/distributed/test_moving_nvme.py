"""Masters, moments and weights that are files on a disk come into a checkpoint and out of one, to the bit.

The vocabulary tables are just large enough for DeepSpeed to swap them (see `test_offload`), the rest of the partitions
stays in memory, so a checkpoint has both kinds.
"""

import pytest
from moving_factory import STEP, Move, Place, Yard
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio

from trainer.runtime.checkpoint import checkpoint_digest
from trainer.runtime.checkpoint.search import open_checkpoint
from trainer.spec.strategy import Offload, Sharding

SINGLE = Place(Sharding.NONE, 1)
NVME, NVME_ALL = Place(Sharding.ZERO3, 2, Offload.NVME_OPTIMIZER), Place(Sharding.ZERO3, 2, Offload.NVME_ALL)
MOVES = tuple(
    Move(source, target, "large")
    for source, target in ((SINGLE, NVME), (NVME, NVME_ALL), (NVME_ALL, SINGLE), (NVME_ALL, NVME_ALL))
)


@pytest.fixture(scope="module")
def moved(tmp_path_factory, cache_dir, start_ranks) -> Yard:
    if lacks_libaio():
        pytest.skip(NO_LIBAIO)
    folder_with_operators("cpu_adam", "async_io")
    yard = Yard(tmp_path_factory.mktemp("nvme"), cache_dir, start_ranks)
    yard.move(MOVES)
    return yard


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_state_arrives_to_the_bit_in_files_and_from_files(move, moved):
    left = open_checkpoint(moved.leave(move.left) / "checkpoints" / f"step-{STEP:08d}")
    assert checkpoint_digest(moved.checkpoint(str(move))) == checkpoint_digest(left)


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_five_steps_after_a_move_are_those_of_staying(move, moved):
    """Between the two kinds of NVMe offload as well: both step in DeepSpeed's CPU Adam."""
    assert moved.difference(move) <= (1e-5 if SINGLE in move else 1e-6)


@pytest.mark.parametrize("place", [NVME, NVME_ALL], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_resume_state_is_in_files_again(place, rank, moved):
    names = [path.name for path in (moved.nvme_folder(place) / "zero_stage_3").glob(f"*/rank{rank}/*.swp")]
    for kind in ("exp_avg-", "exp_avg_sq-"):
        assert any(name.startswith(kind) for name in names)
    assert any(name.endswith("_param.tensor.swp") for name in names) is place.offload.moves_parameters
