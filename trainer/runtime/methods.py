"""What a method makes of a model that was built or loaded: all weights trained, adapters on a frozen base, noise."""

from torch import nn
from transformers import PreTrainedModel

from trainer.spec.errors import InputError
from trainer.spec.plan import Plan


def apply_method(model: PreTrainedModel, plan: Plan) -> None:
    """Freezes, adapts and hooks the model as the plan's method and job say; before loss head and checkpointing."""
    if plan.chosen.method.freezes_base:
        raise InputError(f"train.method: {plan.chosen.method} comes with shardwise 0.3")
    if plan.job.train.neftune_alpha is not None:
        raise InputError("train.neftune_alpha comes with shardwise 0.3")


def method_facts(model: nn.Module) -> dict[str, str]:
    """What is seen of the method, in words: trained share, adapters, types of the base."""
    return {}
