"""Every optimizer learns: forty steps on real text from scratch, each at the rate that a job of this size takes."""

import pytest
from optimizer_factory import GALORE, losses_on_text
from rank_factory import write_packed_rows

from shardwise.trainer.spec.optimizers import Optimizer

NUM_LAST = 5  # losses that the end is the mean of
WHOLE = [pytest.param(kind, None, id=kind) for kind in Optimizer if kind is not Optimizer.DEEPSPEED_CPU_ADAM]
PROJECTED = [pytest.param(kind, GALORE, id=f"galore-{kind}") for kind in (Optimizer.ADAMW, Optimizer.ADAFACTOR)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Full ones: grouped by length, steps would differ in how much they teach."""
    return write_packed_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(scope="module")
def adamws_fall(rows):
    return fall(rows, Optimizer.ADAMW)


def fall(rows, optimizer, galore=None):
    losses = list(losses_on_text(rows, optimizer, galore=galore))
    return losses[0] - sum(losses[-NUM_LAST:]) / NUM_LAST


@pytest.mark.parametrize(("optimizer", "galore"), [*WHOLE[1:], *PROJECTED])
def test_the_loss_falls_at_least_four_fifths_as_far_as_under_adamw(rows, adamws_fall, optimizer, galore):
    assert fall(rows, optimizer, galore) > 0.8 * adamws_fall


def test_adamw_itself_learns(adamws_fall):
    assert adamws_fall > 2, "of ln 256 = 5.5 at the start"
