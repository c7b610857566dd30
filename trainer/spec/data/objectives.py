"""What the loss asks of the model, where the job leaves it to the shape of the data."""

from trainer.spec.job.sections import DataFormat, Objective

_OF_SHAPE: dict[DataFormat, Objective] = {
    DataFormat.TEXT: Objective.PRETRAIN,
    DataFormat.TOKENS: Objective.PRETRAIN,
    DataFormat.PROMPT_COMPLETION: Objective.SFT,
    DataFormat.CHAT: Objective.SFT,
    DataFormat.PREFERENCE: Objective.DPO,
}

# What the rows may be that each learns from.
SHAPES: dict[Objective, tuple[DataFormat, ...]] = {
    Objective.PRETRAIN: (DataFormat.TEXT, DataFormat.TOKENS),
    Objective.SFT: (DataFormat.PROMPT_COMPLETION, DataFormat.CHAT, DataFormat.TOKENS),
    Objective.DPO: (DataFormat.PREFERENCE,),
}


def objective_of(asked: Objective, shape: DataFormat) -> Objective:
    """The objective of a job; `shape` is what its rows are, never `auto`."""
    return _OF_SHAPE[shape] if asked is Objective.AUTO else asked


def shape_before_reading(asked: Objective, stated: DataFormat) -> DataFormat:
    """What rows that nobody has looked at are taken for: as the job states them, or as its objective needs them."""
    if stated is not DataFormat.AUTO:
        return stated
    if asked is Objective.DPO:
        return DataFormat.PREFERENCE
    return DataFormat.CHAT if asked is Objective.SFT else DataFormat.TEXT


def rows_per_example(objective: Objective) -> int:
    """Sequences that one example is: a preference has a chosen and a rejected one."""
    return 2 if objective is Objective.DPO else 1
