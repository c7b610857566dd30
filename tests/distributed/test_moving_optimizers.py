"""Optimizers other than AdamW move from engine to engine as well; 8-bit state as far as its blocks lie alike.

Blocks of 256 elements are counted from the start of a parameter where it is whole, of a partition under ZeRO; no size
here divides by 256. Under the same plan everything is bitwise.
"""

from collections.abc import Callable
from functools import cache

import pytest
from moving_factory import STEP, Move, Place, Yard

from shardwise.trainer.runtime.checkpoint import checkpoint_digest
from shardwise.trainer.spec.engines import Sharding

TOLERANCE = 1e-5
ANEW_TOLERANCE = 5e-4  # values of moments are off by up to half a code's step, as after every 8-bit update
SINGLE, DDP, FSDP = Place(Sharding.NONE, 1), Place(Sharding.DDP, 2), Place(Sharding.FSDP, 2)
ZERO2, ZERO3, ZERO2_3 = Place(Sharding.ZERO2, 2), Place(Sharding.ZERO3, 2), Place(Sharding.ZERO2, 3)

EXACT = (
    Move(ZERO3, ZERO3, "lion"), Move(ZERO2, ZERO2, "adamw_8bit"),
    Move(FSDP, ZERO3, "lion"), Move(FSDP, FSDP, "adamw_8bit"), Move(SINGLE, DDP, "adamw_8bit"),
    Move(ZERO3, ZERO3, "ademamix_8bit"),
    Move(ZERO2, SINGLE, "paged_adamw"),
    Move(SINGLE, DDP, "muon"), Move(DDP, SINGLE, "adafactor"), Move(SINGLE, DDP, "galore"),
)  # fmt: skip
MORE_EXACT = (
    Move(FSDP, FSDP, "lion"), Move(DDP, DDP, "adamw_8bit"), Move(ZERO3, ZERO3, "adamw_8bit"),
    Move(ZERO3, DDP, "lion"), Move(SINGLE, DDP, "lion_8bit"), Move(SINGLE, ZERO3, "paged_adamw"),
)  # fmt: skip
ANEW = (
    Move(DDP, ZERO2, "adamw_8bit"),
    Move(FSDP, ZERO2, "adamw_8bit"),
    Move(ZERO3, SINGLE, "adamw_8bit"),
    Move(ZERO2, ZERO2_3, "adamw_8bit"),
    Move(DDP, ZERO3, "ademamix_8bit"),
)
MORE_ANEW = (Move(ZERO2, ZERO3, "adamw_8bit"), Move(ZERO3, DDP, "lion_8bit"))


def each(moves: tuple[Move, ...], more: tuple[Move, ...]):
    """`more` belong to test-long."""
    return pytest.mark.parametrize(
        "move", [*moves, *(pytest.param(each, marks=pytest.mark.long) for each in more)], ids=str
    )


@pytest.fixture(scope="module")
def moved(tmp_path_factory, cache_dir, start_ranks) -> Callable[[Move], Yard]:
    """The yard of a move; all moves of its list are made when the first is asked for."""

    @cache
    def make(*, is_long: bool) -> Yard:
        yard = Yard(tmp_path_factory.mktemp("moving"), cache_dir, start_ranks)
        yard.move((*MORE_EXACT, *MORE_ANEW) if is_long else (*EXACT, *ANEW))
        return yard

    return lambda move: make(is_long=move in (*MORE_EXACT, *MORE_ANEW))


@pytest.fixture
def yard(move: Move, moved: Callable[[Move], Yard]) -> Yard:
    return moved(move)


@each(EXACT, MORE_EXACT)
def test_state_arrives_to_the_bit_and_the_next_steps_are_those_of_staying(move, yard):
    left, arrived = yard.checkpoint(move.left), yard.checkpoint(str(move))
    assert checkpoint_digest(left) == checkpoint_digest(arrived)
    assert arrived.facts.step == STEP and arrived.facts.sharding is move.target.sharding
    assert yard.incidents(str(move)) == []
    assert yard.difference(move) <= (0.0 if move.source == move.target else TOLERANCE)


@each(ANEW, MORE_ANEW)
def test_blocks_that_lie_otherwise_are_coded_anew_and_reported_while_weights_and_counts_are_exact(move, yard):
    (incident,) = yard.incidents(str(move))  # not again when what was saved at once is loaded to continue from
    assert "256" in incident
    assert 0 < yard.difference(move) <= ANEW_TOLERANCE
    left, arrived = (yard.checkpoint(name).manifest.parameters for name in (move.left, str(move)))
    assert {name: entry.step for name, entry in left.items()} == {name: entry.step for name, entry in arrived.items()}
