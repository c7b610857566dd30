"""Which column of a row holds what: our name, another usual one, or the one that `data.fields` names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.runtime.data.sources.row_files import Row, kind_of
from trainer.spec.data.row_fields import names_of


class UnusableRowError(ValueError):
    """Why a row cannot be used; its text completes "the row ..."."""


class Cell(NamedTuple):
    """What one column of a row holds."""

    column: str
    value: Any


def find_cell(row: Row, field: str, fields: Mapping[str, str]) -> Cell | None:
    """The field's cell where the row has one that is not null; columnar files write null for what is not there."""
    for column in names_of(field, fields):
        if row.get(column) is not None:
            return Cell(column, row[column])
    return None


def require_cell(row: Row, field: str, fields: Mapping[str, str]) -> Cell:
    """The field's cell, which is not null; UnusableRowError where there is none."""
    cell = find_cell(row, field, fields)
    if cell is not None:
        return cell
    columns = names_of(field, fields)
    null = next((column for column in columns if column in row), None)
    if null is not None:
        raise UnusableRowError(f'field "{null}" is null')
    raise UnusableRowError(f'has no field "{columns[0]}"; its fields: {listed(row)}')


def require_text(row: Row, field: str, fields: Mapping[str, str]) -> str:
    """The field's text, which is more than blanks."""
    column, value = require_cell(row, field, fields)
    if not isinstance(value, str):
        raise UnusableRowError(f'field "{column}" is {kind_of(value)}, not text')
    if not value or value.isspace():
        raise UnusableRowError(f'field "{column}" is empty')
    return value


def find_text(row: Row, field: str, fields: Mapping[str, str]) -> str:
    """The field's text, empty where there is none."""
    cell = find_cell(row, field, fields)
    if cell is not None and not isinstance(cell.value, str):
        raise UnusableRowError(f'field "{cell.column}" is {kind_of(cell.value)}, not text')
    return "" if cell is None or cell.value.isspace() else cell.value


def listed(row: Mapping[str, Any]) -> str:
    """The names of the columns, in one line."""
    return ", ".join(map(str, row)) or "none"
