"""Optimizers other than AdamW move from engine to engine as well; 8-bit state as far as its blocks lie alike.

Blocks of 256 elements are counted from the start of a parameter where it is whole, of a partition under ZeRO; no size
here divides by 256. Under the same plan everything is bitwise.
"""

import pytest
from moving_factory import STEP, Move, Place, Yard

from trainer.runtime.checkpoint import checkpoint_digest
from trainer.spec.strategy import Sharding

TOLERANCE = 1e-5
ANEW_TOLERANCE = 5e-4  # values of moments are off by up to half a code's step, as after every 8-bit update
SINGLE, DDP, FSDP = Place(Sharding.NONE, 1), Place(Sharding.DDP, 2), Place(Sharding.FSDP, 2)
ZERO2, ZERO3, ZERO2_3 = Place(Sharding.ZERO2, 2), Place(Sharding.ZERO3, 2), Place(Sharding.ZERO2, 3)

EXACT = (
    *(Move(place, place, "lion") for place in (FSDP, ZERO3)),
    *(Move(place, place, "adamw_8bit") for place in (DDP, ZERO2, ZERO3)),
    Move(FSDP, ZERO3, "lion"), Move(ZERO3, DDP, "lion"),
    Move(SINGLE, DDP, "adamw_8bit"), Move(SINGLE, DDP, "lion_8bit"),
    Move(ZERO2, SINGLE, "paged_adamw"), Move(SINGLE, ZERO3, "paged_adamw"),
    Move(SINGLE, DDP, "muon"), Move(DDP, SINGLE, "adafactor"), Move(SINGLE, DDP, "galore"),
)  # fmt: skip
ANEW = (
    Move(DDP, ZERO2, "adamw_8bit"), Move(ZERO2, ZERO3, "adamw_8bit"), Move(ZERO3, SINGLE, "adamw_8bit"),
    Move(ZERO2, ZERO2_3, "adamw_8bit"), Move(ZERO3, DDP, "lion_8bit"),
)  # fmt: skip


@pytest.fixture(scope="module")
def moved(tmp_path_factory, cache_dir, start_ranks) -> Yard:
    yard = Yard(tmp_path_factory.mktemp("moving"), cache_dir, start_ranks)
    yard.move((*EXACT, *ANEW))
    return yard


@pytest.mark.parametrize("move", EXACT, ids=str)
def test_state_arrives_to_the_bit(move, moved):
    left, arrived = moved.checkpoint(move.left), moved.checkpoint(str(move))
    assert checkpoint_digest(left) == checkpoint_digest(arrived)
    assert arrived.facts.step == STEP and arrived.facts.sharding is move.target.sharding
    assert moved.incidents(str(move)) == []


@pytest.mark.parametrize("move", EXACT, ids=str)
def test_five_steps_after_a_move_are_those_of_staying(move, moved):
    assert moved.difference(move) <= (0.0 if move.source == move.target else TOLERANCE)


@pytest.mark.parametrize("move", ANEW, ids=str)
def test_blocks_that_lie_otherwise_are_coded_anew_and_told(move, moved):
    (incident,) = moved.incidents(str(move))  # not again when what was saved at once is loaded, to go on from
    assert "blocks of 256 values were coded anew" in incident
    assert 0 < moved.difference(move) <= ANEW_TOLERANCE


@pytest.mark.parametrize("move", ANEW, ids=str)
def test_weights_and_counts_are_exact_even_then(move, moved):
    left, arrived = (moved.checkpoint(name).manifest.parameters for name in (move.left, str(move)))
    assert {name: entry.step for name, entry in left.items()} == {name: entry.step for name, entry in arrived.items()}
