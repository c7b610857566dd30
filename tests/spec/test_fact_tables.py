"""Tables of facts: a member without a row is an error that names it, never a default in a formula."""

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.trainer.runtime import engines as runtime_engines
from shardwise.trainer.runtime.checkpoint import engines as checkpoint_engines
from shardwise.trainer.runtime.optimizers import rules
from shardwise.trainer.spec import engines, optimizers
from shardwise.trainer.spec.optimizers import Optimizer


def without_row(module: ModuleType, table: str, member: str) -> str:
    """The source of a module whose table has lost a row, as it has none for a new member."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (rows,) = (
        each.value.args[1]
        for each in tree.body
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == table and isinstance(each.value, ast.Call)
    )
    assert isinstance(rows, ast.Dict)
    number = [ast.unparse(key) for key in rows.keys if key is not None].index(member)
    del rows.keys[number], rows.values[number]
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("module", "table", "member"),
    [
        (optimizers, "OPTIMIZERS", "Optimizer.SGD"),
        (rules, "UPDATE_RULES", "Optimizer.SGD"),
        (engines, "ENGINES", "Sharding.HSDP"),
        (runtime_engines, "ENGINES", "facts.Engine.FSDP"),
        (checkpoint_engines, "ADAPTERS", "Engine.FSDP"),
    ],
)
def test_a_member_without_a_row_is_an_error_on_import(module: ModuleType, table: str, member: str) -> None:
    source = without_row(module, table, member)
    with pytest.raises(LookupError, match=rf"{table} has no row for {re.escape(member.removeprefix('facts.'))}$"):
        exec(compile(source, table, "exec"), {"__name__": module.__name__})


@pytest.mark.parametrize("optimizer", Optimizer)
def test_state_is_8_bit_where_its_name_says_so(optimizer: Optimizer) -> None:
    assert optimizer.facts.is_8bit is optimizer.endswith("_8bit")
    assert not (optimizer.facts.is_8bit and optimizer.facts.is_exact)
