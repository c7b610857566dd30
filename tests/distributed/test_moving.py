"""What one engine saved, another resumes: state arrives to the bit, and training goes on as if nothing had happened.

A move is: six steps on one engine, with a checkpoint after three; that checkpoint loaded by another engine, saved again
at once, and three more steps. Few sizes divide by the number of ranks, gradients are clipped, the learning rate warms
up, some rows are padding, and there are two parameter groups. Numbers are fp32 unless a test says otherwise.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from moving_factory import NUM_STEPS, STEP, Attempt, Move, Place, Yard, greatest

from shardwise.trainer.runtime.checkpoint import checkpoint_digest
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint, verified
from shardwise.trainer.spec.engines import Offload, Sharding

pytestmark = pytest.mark.timeout(1800)  # the first test makes all moves
TOLERANCE = 1e-5
SINGLE, DDP = Place(Sharding.NONE, 1), Place(Sharding.DDP, 2)
FSDP, FSDP_3 = Place(Sharding.FSDP, 2), Place(Sharding.FSDP, 3)
ZERO1, ZERO2, ZERO3 = (Place(each, 2) for each in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3))
ZERO2_3 = Place(Sharding.ZERO2, 3)
ZERO2_HOST, ZERO3_HOST = Place(Sharding.ZERO2, 2, Offload.OPTIMIZER), Place(Sharding.ZERO3, 2, Offload.OPTIMIZER)
ZERO3_ALL_HOST = Place(Sharding.ZERO3, 2, Offload.OPTIMIZER_PARAMS)
HSDP = Place(Sharding.HSDP, 4)  # two copies of two shards
PLACES = (SINGLE, DDP, FSDP, ZERO2, ZERO3, ZERO2_HOST, ZERO3_HOST, HSDP)


COVERING = (
    *(Move(place, place) for place in (SINGLE, FSDP, ZERO2, ZERO3, ZERO2_HOST, HSDP)),
    Move(SINGLE, FSDP), Move(FSDP, ZERO3), Move(ZERO3, ZERO2_HOST), Move(ZERO2_HOST, DDP), Move(DDP, ZERO2),
    Move(ZERO2, ZERO3_HOST), Move(ZERO3_HOST, SINGLE),
    Move(ZERO3, FSDP, "tied"), Move(FSDP, ZERO2, "tied"),
    Move(ZERO2, FSDP, "lora"), Move(FSDP, ZERO3, "lora"), Move(DDP, DDP, "lora"),
    Move(FSDP, FSDP, "dora"),
    Move(ZERO3, ZERO3, "bf16"), Move(FSDP, FSDP, "bf16"),
    Move(ZERO3, ZERO3, "pure-bf16"),
    Move(SINGLE, FSDP, "fp16"),
    Move(SINGLE, HSDP), Move(HSDP, ZERO3),
)  # fmt: skip
REST = [
    *(
        move
        for kind in ("plain", "tied", "lora")
        for move in (Move(source, target, kind) for source, target in product(PLACES, PLACES))
        if move not in COVERING
    ),
    Move(FSDP, ZERO1), Move(DDP, ZERO3_ALL_HOST),
    Move(ZERO3, ZERO3, "dora"), Move(SINGLE, SINGLE, "fp16"),
    Move(ZERO2, ZERO2, "bf16"), Move(ZERO2_HOST, FSDP, "bf16"), Move(HSDP, HSDP, "bf16"), Move(HSDP, ZERO3, "bf16"),
    Move(FSDP, ZERO2, "pure-bf16"),
    *(Move(source, target, "qlora") for source, target in product((SINGLE, FSDP, ZERO2, HSDP), repeat=2)),
]  # fmt: skip
# One process, two ranks, three ranks, one process again, each to one of these steps.
STOPS = (2, 3, 5, NUM_STEPS)
WAYS = ((SINGLE, ZERO3, FSDP_3, SINGLE), (SINGLE, FSDP, ZERO2_3, SINGLE))


@pytest.fixture(scope="module")
def yard(tmp_path_factory, cache_dir, start_ranks) -> Yard:
    return Yard(tmp_path_factory.mktemp("moving"), cache_dir, start_ranks)


@pytest.fixture(scope="module")
def moved(yard) -> Yard:
    """All moves of the covering set."""
    yard.move(COVERING)
    return yard


@pytest.fixture(scope="module")
def moved_all(yard) -> Yard:
    """All ordered pairs."""
    yard.move(REST)
    return yard


def tolerance_of(move: Move) -> float:
    """Losses of the same plan are equal to the bit."""
    if move.source == move.target:
        return 0.0
    return 2e-2 if "16" in move.kind else TOLERANCE  # 16-bit products are added in another order


def test_most_sizes_do_not_divide(moved):
    """Else the last rank's rows, fragments and pieces would be whole ones."""
    shapes = [entry.weight.shape for entry in moved.checkpoint(f"plain-{FSDP}").manifest.parameters.values()]
    for num_ranks in (2, 3):
        for counts in ([shape[0] for shape in shapes], [np.prod(shape) for shape in shapes]):
            assert sum(count % num_ranks > 0 for count in counts) > len(shapes) / 2
    course = moved.losses(f"plain-{SINGLE}")
    assert course[0] > course[-1] + 0.5, "it learns, so that a difference would show"


@pytest.mark.parametrize("move", COVERING, ids=str)
def test_state_arrives_to_the_bit_and_the_next_steps_are_those_of_staying(move, moved):
    check(move, moved)


@pytest.mark.parametrize("move", COVERING, ids=str)
def test_each_rank_writes_what_it_holds_and_no_more(move, moved):
    """Nothing is gathered: the files are of one size, but for headers and what does not divide."""
    manifest = moved.checkpoint(str(move)).manifest
    sizes = [file.size_bytes for file in manifest.files.values()]
    assert max(sizes) / sum(sizes) < 1.14 / move.target.num_ranks
    if move.kind == "tied":
        assert manifest.parameters["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    if move.kind in ("lora", "dora"):
        assert all("lora_" in name for name in manifest.parameters)
    if "bf16" in move.kind:
        types = {entry.weight.type for entry in manifest.parameters.values()}
        assert types == {"BF16" if move.kind == "pure-bf16" else "F32"}, "masters have the type that they are kept in"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("move", REST, ids=str)
def test_every_engine_continues_from_every_other(move, moved_all):
    check(move, moved_all)


def check(move: Move, yard: Yard) -> None:
    left = open_checkpoint(yard.leave(move.left) / "checkpoints" / f"step-{STEP:08d}")
    arrived = verified(yard.checkpoint(str(move)).path)
    assert checkpoint_digest(arrived) == checkpoint_digest(left)
    assert arrived.facts.sharding is move.target.sharding
    assert len(arrived.manifest.files) == move.target.num_ranks
    states = [entry for entry in arrived.manifest.parameters.values() if entry.is_trained and entry.tied_to is None]
    assert states and all(entry.step == STEP and set(entry.state) == {"exp_avg", "exp_avg_sq"} for entry in states)
    assert yard.difference(move) <= tolerance_of(move)


def test_the_scale_of_fp16_goes_on_from_where_it_was(moved):
    left, arrived = (moved.checkpoint(name).facts for name in (f"fp16-{SINGLE}", str(Move(SINGLE, FSDP, "fp16"))))
    assert left.loss_scaler is not None and left.loss_scaler.growth_tracker > 0
    assert arrived.loss_scaler == left.loss_scaler


@pytest.fixture(scope="module")
def travelled(yard) -> Yard:
    """Both ways from one process over two and three ranks back to one."""
    for leg, last in enumerate(STOPS):
        yard.run(
            Attempt(
                name_of_leg(way, leg),
                yard.plan(way[leg], is_resumed=leg > 0),
                yard.folder / name_of_leg(way, leg - 1) if leg > 0 else None,
                last,
            )
            for way in WAYS
        )
    return yard


def name_of_leg(way: Sequence[Place], leg: int) -> str:
    return "-over-".join(map(str, way[: leg + 1])) + f"-of-{'-'.join(map(str, way))}"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_one_process_two_ranks_three_ranks_one_process(way, travelled, moved):
    losses = [loss for leg in range(4) for loss in travelled.losses(name_of_leg(way, leg))]
    assert greatest(losses, moved.losses(f"plain-{SINGLE}")) <= TOLERANCE
    for leg, step in enumerate(STOPS[:-1], start=1):
        left, arrived = (travelled.checkpoint(name_of_leg(way, each), step) for each in (leg - 1, leg))
        assert checkpoint_digest(left) == checkpoint_digest(arrived)


@pytest.mark.long
def test_counts_that_differ_are_refused_where_one_count_is_kept_for_many(moved):
    """As DistributedDataParallel has them of a weight that some steps left out."""
    left = moved.leave(f"plain-{SINGLE}")
    source = shutil.copytree(left, moved.folder / "edited count")
    manifest = source / "checkpoints" / f"step-{STEP:08d}" / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    content["parameters"]["model.norm.weight"]["step"] -= 2
    manifest.write_text(json.dumps(content))
    attempt = Attempt("uneven", moved.plan(ZERO2, is_resumed=True), source)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        moved.run([attempt])
    moved.run([Attempt("uneven on one process", moved.plan(SINGLE, is_resumed=True), source)])
    arrived = moved.checkpoint("uneven on one process").manifest.parameters
    assert {arrived[name].step for name in ("model.norm.weight", "lm_head.weight")} == {STEP - 2, STEP}
