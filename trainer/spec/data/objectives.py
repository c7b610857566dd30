"""Training objectives: one row of facts for each, which all other code reads.

A new objective is a member of `Objective` (`trainer/spec/job/sections.py`) with its row here, the shape of rows that
selects it (`trainer/spec/data/shapes.py`), and its function in `trainer/runtime/loop/objectives.py`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.trainer.spec.job.sections import Objective
from shardwise.trainer.spec.optimizers import PublishedRate
from shardwise.trainer.spec.value import Value, complete


class DefaultWarmup(NamedTuple):
    """The share of a run in which the rate rises, and its source."""

    share: float
    source: str


class ObjectiveFacts(Value, frozen=True, kw_only=True):
    """Facts about one objective; nothing has a default that another objective could be taken for."""

    rows_per_example: int  # 2: a pair, whose rows are compared; a step then divides by its pairs, not its targets
    scores_initial_model: bool  # of each row: the base without its adapters, or before step 1 the whole model
    weighs_tokens_alike: bool  # a sum of token losses: others may be added to it or replace it, and slices made of it
    section: str | None  # of `train`, that it alone reads
    # Defaults of a run
    run: str  # as a plan names it
    max_epochs: int  # over data that give few steps
    epochs_source: str
    warmup: DefaultWarmup
    # Published rates of AdamW; empty: those of the optimizer for fine-tuning, and for adapters
    rates: tuple[PublishedRate, ...]
    adapter_rates: tuple[PublishedRate, ...]


_WARMUP = DefaultWarmup(0.03, "QLoRA, arXiv:2305.14314; OLMo 7B, arXiv:2402.00838")

OBJECTIVES: Mapping[Objective, ObjectiveFacts] = complete(
    (objective for objective in Objective if objective is not Objective.AUTO),
    {
        Objective.PRETRAIN: ObjectiveFacts(
            rows_per_example=1,
            scores_initial_model=False,
            weighs_tokens_alike=True,
            section=None,
            run="continued pre-training",
            max_epochs=4,
            epochs_source="arXiv:2305.16264",
            warmup=_WARMUP,
            rates=(),
            adapter_rates=(),
        ),
        Objective.SFT: ObjectiveFacts(
            rows_per_example=1,
            scores_initial_model=False,
            weighs_tokens_alike=True,
            section=None,
            run="fine-tuning",
            max_epochs=3,
            epochs_source="Stanford Alpaca; arXiv:2305.16264",
            warmup=_WARMUP,
            rates=(),
            adapter_rates=(),
        ),
        Objective.DPO: ObjectiveFacts(
            rows_per_example=2,
            scores_initial_model=True,
            weighs_tokens_alike=False,
            section="dpo",
            run="preference training",
            max_epochs=1,
            epochs_source="Tulu 3, arXiv:2411.15124",
            warmup=DefaultWarmup(0.10, "Zephyr 7B, arXiv:2310.16944; OLMo 7B, arXiv:2402.00838"),
            rates=(
                PublishedRate(3e9, 1e-6, "the default of TRL's DPOConfig"),
                PublishedRate(20e9, 5e-7, "Zephyr 7B (arXiv:2310.16944) and OLMo 7B (arXiv:2402.00838)"),
                PublishedRate(math.inf, 2e-7, "Tulu 3 70B (arXiv:2411.15124)"),
            ),
            adapter_rates=(
                PublishedRate(math.inf, 5e-6, "Zephyr 7B with QLoRA, ten times its full rate (arXiv:2310.16944)"),
            ),
        ),
    },
    "OBJECTIVES",
)
