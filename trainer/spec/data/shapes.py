"""The shapes of training rows: one row of facts for each DataFormat, which all other code reads.

A new shape is a member of DataFormat, a row of SHAPES, and a reader in trainer/runtime/data/sources/rows.py.

A shape is found from the columns of a row. If a row has the columns of several shapes, the first of `identified_by`
decides: preference rows often carry the messages they were made from, and chat rows the text they were rendered to.
`data.fields` names other columns and so selects the shape.
"""

from collections.abc import Callable, Collection, Mapping
from enum import Enum

from shardwise.trainer.spec.data.objectives import OBJECTIVES
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat, LossOn, Objective
from shardwise.trainer.spec.value import Value

ROLES = ("system", "user", "assistant", "tool")
_IN_MESSAGES = ("role", "content", *ROLES)
_USUAL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("tokens", "input_ids"),
    "mask": ("loss_mask", "completion_mask", "assistant_masks", "mask"),
    "messages": ("messages", "conversations", "conversation"),
    "input": ("input", "context"),
    "output": ("output", "response"),
    "chosen": ("chosen", "preferred_output"),
    "rejected": ("rejected", "non_preferred_output"),
    "tools": ("tools", "functions"),
    "system": ("system", "system_prompt"),
}

# Chat templates of shardwise, and the special tokens that each writes around a message. They are added to a tokenizer
# that lacks them, and embeddings to a model that has too few; both must be known before anything is loaded.
TEMPLATE_TOKENS: Mapping[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "llama2": (),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "mistral_v1": (),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "plain": (),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "zephyr": (),
}


class Encoding(Enum):
    """Conversion of rows to token ids."""

    TEXT = "text"  # tokenised, between bos (where the tokenizer writes one) and eos
    RENDERED = "rendered"  # by a chat template, or as prompt and completion; the roles of the tokens are known
    TOKENS = "tokens"  # they are token ids already


class ShapeFacts(Value, frozen=True, kw_only=True):
    """Facts about one shape of rows."""

    fields: tuple[str, ...]  # that `data.fields` may name columns of
    identified_by: tuple[tuple[int, tuple[str, ...]], ...]  # (precedence, fields that a row must have)
    encoding: Encoding
    objective: Objective  # that `train.objective: auto` selects
    also_for: tuple[Objective, ...] = ()  # other objectives that can learn from it
    packs_by_default: bool = True
    loss_on: tuple[LossOn, ...] = ()  # choices in addition to auto and all
    plural: str
    learned: str  # the tokens that `data.loss_on: auto` selects

    @property
    def rows_per_example(self) -> int:
        """2: the rows of a pair, which are compared and cannot be packed."""
        return OBJECTIVES[self.objective].rows_per_example


SHAPES: Mapping[DataFormat, ShapeFacts] = {
    DataFormat.TEXT: ShapeFacts(
        fields=("text",),
        identified_by=((4, ("text",)),),
        encoding=Encoding.TEXT,
        objective=Objective.PRETRAIN,
        plural="texts",
        learned="every token",
    ),
    DataFormat.PROMPT_COMPLETION: ShapeFacts(
        fields=("prompt", "completion", "tools", *_IN_MESSAGES),
        identified_by=((2, ("prompt", "completion")),),
        encoding=Encoding.RENDERED,
        objective=Objective.SFT,
        loss_on=(LossOn.COMPLETION,),
        plural="prompts with completions",
        learned="the completion",
    ),
    DataFormat.CHAT: ShapeFacts(
        fields=("messages", "tools", "instruction", "input", "output", *_IN_MESSAGES),
        identified_by=((1, ("messages",)), (3, ("instruction", "output"))),  # the latter: Alpaca
        encoding=Encoding.RENDERED,
        objective=Objective.SFT,
        loss_on=(LossOn.COMPLETION, LossOn.ASSISTANT),
        plural="chats",
        learned="the assistant's messages",
    ),
    DataFormat.PREFERENCE: ShapeFacts(
        fields=("prompt", "chosen", "rejected", "messages", "tools", "instruction", "input", *_IN_MESSAGES),
        identified_by=((0, ("chosen", "rejected")),),
        encoding=Encoding.RENDERED,
        objective=Objective.DPO,
        packs_by_default=False,
        plural="preferences",
        learned="which of two answers is the better one",
    ),
    DataFormat.TOKENS: ShapeFacts(
        fields=("tokens", "labels", "mask"),
        identified_by=((5, ("tokens",)),),
        encoding=Encoding.TOKENS,
        objective=Objective.PRETRAIN,
        also_for=(Objective.SFT,),
        packs_by_default=False,  # each row stays the row that it is
        plural="rows of tokens",
        learned="what the rows mark, else every token",
    ),
}
_IDENTIFICATIONS = sorted((*way, shape) for shape, facts in SHAPES.items() for way in facts.identified_by)
BY_PRECEDENCE = tuple(dict.fromkeys(shape for _, _, shape in _IDENTIFICATIONS))


def encoding_of(stated: DataFormat) -> Encoding | None:
    """The encoding of rows of a stated shape; None for `auto`."""
    return None if stated is DataFormat.AUTO else SHAPES[stated].encoding


def packing_note(shape: DataFormat, *, packing: bool | None, obstacle: str | None) -> str | None:
    """A sentence on unpacked rows that would be packed by default, if the model had no obstacle."""
    return f"packing is off: {obstacle}" if obstacle and packing is None and SHAPES[shape].packs_by_default else None


def check_shape(shape: DataFormat, *, packing: bool | None, loss_on: LossOn) -> None:
    """InputError for settings that rows of this shape cannot have."""
    facts = SHAPES[shape]
    if facts.rows_per_example > 1 and packing:
        raise InputError("data.packing: pairs of rows are compared and cannot be packed; remove it")
    if facts.encoding is not Encoding.RENDERED and loss_on in (LossOn.COMPLETION, LossOn.ASSISTANT):
        raise InputError(
            f"data.loss_on: {loss_on} is requested, and the rows are {shape}, which have no such part;\n"
            "remove it, or give rows of chats or of prompts and completions"
        )


def column_names(field: str, fields: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that may hold a field, the preferred one first; `fields` is the job's own naming."""
    return (fields[field],) if field in fields else _USUAL_COLUMNS.get(field, (field,))


def fitting_shapes(fields: Mapping[str, str]) -> list[DataFormat]:
    """The shapes that have every field the job names a column of, by precedence."""
    return [shape for shape in BY_PRECEDENCE if set(fields) <= set(SHAPES[shape].fields)]


def shape_of_row(has_field: Callable[[str], bool], allowed: Collection[DataFormat]) -> DataFormat | None:
    """The first allowed shape whose fields a row has; None if it has the fields of none."""
    for _, needed, shape in _IDENTIFICATIONS:
        if shape in allowed and all(has_field(name) for name in needed):
            return shape
    return None


def shapes_for(objective: Objective) -> tuple[DataFormat, ...]:
    """The shapes that an objective can learn from; all for `auto`."""
    return tuple(
        shape for shape, facts in SHAPES.items() if objective in (Objective.AUTO, facts.objective, *facts.also_for)
    )


def objective_of(requested: Objective, shape: DataFormat) -> Objective:
    """The objective of a job whose rows have this shape, never `auto`."""
    return SHAPES[shape].objective if requested is Objective.AUTO else requested


def assumed_shape(requested: Objective, stated: DataFormat) -> DataFormat:
    """The shape of rows that have not been read: the job's, or the first by precedence for the objective."""
    if stated is not DataFormat.AUTO:
        return stated
    objective = Objective.PRETRAIN if requested is Objective.AUTO else requested
    return next(shape for shape in BY_PRECEDENCE if SHAPES[shape].objective is objective)
