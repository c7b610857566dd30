"""A run that is resumed on two ranks and then on one again trains what one process does, whatever its state is.

Each leg ends with a checkpoint, which the next one loads and saves again at once. Every leg of all chains runs in one
group of ranks.
"""

import pytest
from moving_factory import NUM_STEPS, Attempt, Place, Yard, greatest

from shardwise.trainer.runtime.checkpoint import checkpoint_digest
from shardwise.trainer.spec.engines import Sharding

SINGLE = Place(Sharding.NONE, 1)
STOPS = (2, 4, NUM_STEPS)
TOLERANCE = 1e-5
ANEW_TOLERANCE = 5e-4  # 8-bit state whose blocks lie otherwise is coded anew (test_moving_optimizers.py)
# The kind, and the sharding of the two ranks.
CHAINS = (
    ("lora", Sharding.FSDP),
    ("qlora", Sharding.ZERO2),
    ("galore", Sharding.DDP),
    ("adamw_8bit", Sharding.DDP),
)
MORE_CHAINS = (
    *(("lora", each) for each in (Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3)),
    *(("dora", each) for each in (Sharding.DDP, Sharding.FSDP)),
    *(("qlora", each) for each in (Sharding.DDP, Sharding.FSDP)),
    *(("adamw_8bit", each) for each in (Sharding.FSDP, Sharding.ZERO2, Sharding.ZERO3)),
    *(("lion_8bit", each) for each in (Sharding.DDP, Sharding.ZERO3)),
)
Chain = tuple[str, Sharding]


def name_of(chain: Chain, leg: int) -> str:
    return f"{'-'.join(chain)}-leg-{leg}"


def travel(yard: Yard, chains: tuple[Chain, ...]) -> Yard:
    """All legs of the chains, and each kind of run without an interruption."""
    straight = [Attempt(f"straight-{kind}", yard.plan(SINGLE, kind)) for kind in dict(chains)]
    for leg, last in enumerate(STOPS):
        legs = [
            Attempt(
                name_of(chain, leg),
                yard.plan(Place(chain[1], 2) if leg == 1 else SINGLE, chain[0], is_resumed=leg > 0),
                yard.folder / name_of(chain, leg - 1) if leg > 0 else None,
                last,
            )
            for chain in chains
        ]
        yard.run([*legs, *(straight if leg == 0 else [])])
    return yard


@pytest.fixture(scope="module")
def travelled(tmp_path_factory, cache_dir, start_ranks) -> Yard:
    return travel(Yard(tmp_path_factory.mktemp("chains"), cache_dir, start_ranks), CHAINS)


@pytest.fixture(scope="module")
def travelled_more(tmp_path_factory, cache_dir, start_ranks) -> Yard:
    return travel(Yard(tmp_path_factory.mktemp("more chains"), cache_dir, start_ranks), MORE_CHAINS)


def check(chain: Chain, yard: Yard) -> None:
    is_coded_anew = "8bit" in chain[0] and chain[1] is not Sharding.DDP
    losses = [loss for leg in range(len(STOPS)) for loss in yard.losses(name_of(chain, leg))]
    expected = yard.losses(f"straight-{chain[0]}")
    assert len(losses) == len(expected) == NUM_STEPS
    assert greatest(losses, expected) <= (ANEW_TOLERANCE if is_coded_anew else TOLERANCE)
    for leg, step in enumerate(STOPS[:-1], start=1):
        left, arrived = (yard.checkpoint(name_of(chain, each), step) for each in (leg - 1, leg))
        assert (checkpoint_digest(left) == checkpoint_digest(arrived)) is not is_coded_anew


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_one_rank_two_ranks_one_rank(chain: Chain, travelled: Yard) -> None:
    check(chain, travelled)


@pytest.mark.long
@pytest.mark.parametrize("chain", MORE_CHAINS, ids="-".join)
def test_one_rank_two_ranks_one_rank_under_other_engines(chain: Chain, travelled_more: Yard) -> None:
    check(chain, travelled_more)
