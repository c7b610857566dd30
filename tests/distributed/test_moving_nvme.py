"""Masters, moments and weights that are files on a disk come into a checkpoint and out of one, to the bit.

The vocabulary tables are just large enough for DeepSpeed to swap them (see `test_offload`), the rest of the partitions
stays in memory, so a checkpoint has both kinds. Sizes are odd, so few gradients begin at a block of the disk.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from moving_factory import STEP, Move, Place, Yard
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio

from shardwise.trainer.runtime.checkpoint import checkpoint_digest
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.spec.engines import Offload, Sharding

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
def test_state_arrives_to_the_bit_and_the_next_steps_are_those_of_staying(move, moved):
    """In files and from files; both kinds of NVMe offload step in DeepSpeed's CPU Adam."""
    left = open_checkpoint(moved.leave(move.left) / "checkpoints" / f"step-{STEP:08d}")
    assert checkpoint_digest(moved.checkpoint(str(move))) == checkpoint_digest(left)
    assert moved.difference(move) <= (0.0 if move.source == move.target else 1e-5)


@pytest.mark.parametrize("place", [NVME, NVME_ALL], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_resume_state_is_in_files_again(place, rank, moved):
    names = [path.name for path in (moved.nvme_folder(place) / "zero_stage_3").glob(f"*/rank{rank}/*.swp")]
    for kind in ("exp_avg-", "exp_avg_sq-"):
        assert any(name.startswith(kind) for name in names)
    assert any(name.endswith("_param.tensor.swp") for name in names) is place.offload.moves_parameters


READ = """
import torch
from shardwise.trainer.runtime.run.operators import use_built_operators
use_built_operators()
from deepspeed.ops.op_builder import AsyncIOBuilder

handle = AsyncIOBuilder().load(verbose=False).aio_handle(
    block_size=1 << 20, queue_depth=8, single_submit=False, overlap_events=True, intra_op_parallelism=1
)
source = handle.new_cpu_locked_tensor(4096, torch.zeros(1)).fill_(7)
assert (handle.async_pwrite(source, "gradient.swp", 0), handle.wait()) == (0, 1)
buffer = handle.new_cpu_locked_tensor(8192, torch.zeros(1)).zero_()
for offset in (0, 1):
    place = buffer[offset : offset + 4096]
    answers = handle.async_pread(place, "gradient.swp", 0), handle.wait()
    print("canary:", offset, *answers, int((place == 7).sum()))
    buffer.zero_()
"""


def test_w52_deepspeed_reads_nothing_to_an_offset_between_blocks_and_reports_success(tmp_path):
    if lacks_libaio():
        pytest.skip(NO_LIBAIO)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(folder_with_operators("async_io")),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("canary: ")]
    assert lines == ["canary: 0 0 1 4096", "canary: 1 0 1 0"]
