"""The rows of optimizers: a member without one is an error that names it, never a default in a formula."""

from enum import StrEnum
from typing import Any

import pytest

from trainer.runtime.optimizers.rules import UPDATE_RULES
from trainer.spec.optimizers import OPTIMIZERS, Optimizer, OptimizerFacts
from trainer.spec.value import complete


@pytest.mark.parametrize(("table", "rows"), [("OPTIMIZERS", OPTIMIZERS), ("UPDATE_RULES", UPDATE_RULES)])
def test_a_new_member_without_a_row_is_an_error_that_names_it(table: str, rows: dict[Optimizer, object]) -> None:
    members = {each.name: each.value for each in Optimizer} | {"SHAMPOO": "shampoo"}
    with_another: Any = StrEnum("Optimizer", members)  # type: ignore[misc]  # made of the members of today
    with pytest.raises(LookupError, match=f"{table} has no row for Optimizer.SHAMPOO"):
        complete(with_another, {with_another(each.value): row for each, row in rows.items()}, table)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_state_is_8_bit_where_its_name_says_so(optimizer: Optimizer) -> None:
    facts: OptimizerFacts = optimizer.facts
    assert facts.is_8bit is optimizer.endswith("_8bit")
    assert not (facts.is_8bit and facts.is_exact)
