"""Which columns a row of each shape has, and the shape that columns speak of.

| shape | columns |
|---|---|
| preference | `chosen`, `rejected`, and `prompt` or a beginning that both share |
| chat | `messages` or `conversations`; or Alpaca's `instruction`, `output` (`input`, `system`, `history`) |
| prompt_completion | `prompt`, `completion` |
| text | `text` |
| tokens | `tokens` or `input_ids`, with `labels` or a mask where not all are learned |

Where a row has the columns of several shapes, the first in this table is taken: rows of preferences often carry the
messages they came from, and rows of messages the text they were rendered to. `data.fields` names other columns, and
with them the shape.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from trainer.spec.job.sections import DataFormat

ROLES = ("system", "user", "assistant", "tool")
_IN_MESSAGES = ("role", "content", *ROLES)
_USUAL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("tokens", "input_ids"),
    "mask": ("loss_mask", "completion_mask", "assistant_masks", "mask"),
    "messages": ("messages", "conversations", "conversation"),
}
FIELDS_OF_SHAPE: Mapping[DataFormat, tuple[str, ...]] = {
    DataFormat.PREFERENCE: ("prompt", "chosen", "rejected", "messages", *_IN_MESSAGES),
    DataFormat.CHAT: ("messages", "tools", "instruction", "input", "output", *_IN_MESSAGES),
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion", *_IN_MESSAGES),
    DataFormat.TEXT: ("text",),
    DataFormat.TOKENS: ("tokens", "labels", "mask"),
}
_NEEDED_FIELDS: Sequence[tuple[DataFormat, tuple[str, ...]]] = (
    (DataFormat.PREFERENCE, ("chosen", "rejected")),
    (DataFormat.CHAT, ("messages",)),
    (DataFormat.PROMPT_COMPLETION, ("prompt", "completion")),
    (DataFormat.CHAT, ("instruction", "output")),
    (DataFormat.TEXT, ("text",)),
    (DataFormat.TOKENS, ("tokens",)),
)


def names_of(field: str, fields: Mapping[str, str]) -> tuple[str, ...]:
    """The columns in which a field may stand, the first one first; `fields` is the job's own naming."""
    return (fields[field],) if field in fields else _USUAL_COLUMNS.get(field, (field,))


def fitting_shapes(fields: Mapping[str, str]) -> list[DataFormat]:
    """The shapes that have every field the job names a column of."""
    return [shape for shape, names in FIELDS_OF_SHAPE.items() if set(fields) <= set(names)]


def shape_of_row(has_field: Callable[[str], bool], allowed: Collection[DataFormat]) -> DataFormat | None:
    """The first shape of the table whose fields a row has; None where it has those of none."""
    for shape, needed in _NEEDED_FIELDS:
        if shape in allowed and all(has_field(name) for name in needed):
            return shape
    return None
