"""Whether a model with code of its own keeps the documents of a packed row apart, found out by running it.

The models of transformers make their masks from the positions, or hand on the bounds of documents (`packed_attention`),
and tests hold each of them to it. Code that nobody has read may ignore both, and every token would then learn from
documents that have nothing to do with its own. So two rows that differ in their first document only are scored, through
whatever wraps the model: the score of the second document must not notice.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.runtime.loss.head import IGNORED, Answer
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan

_TOKENS = 8  # of a document
_TOLERANCE = 1e-6  # relative; attention across documents makes 1e-4 and more, the same products the same bits
_REMEDY = "give data.packing=false"


def check_documents_apart(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """InputError for a model whose packed documents see each other; asks nothing of one without code of its own."""
    if plan.model_code is None or not plan.data.is_packed:
        return
    was_training = model.training
    model.eval()
    try:
        one, other = (_score(model, plan, first, device) for first in (0, 1))
    except TypeError as error:
        raise InputError(
            f"data.packing: the code of {plan.model_code.repository} does not take what tells documents apart "
            f"({error}); {_REMEDY}"
        ) from error
    finally:
        model.train(was_training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what a forward gathers at the root stays until a backward
    if not abs(one - other) <= _TOLERANCE * abs(one):
        raise InputError(
            f"data.packing: the attention of {plan.model_code.model_class} looks across the documents of a packed "
            f"row;\n{_REMEDY}"
        )


def _score(model: nn.Module, plan: Plan, first: int, device: torch.device) -> float:
    """The loss of the second document of a row, whose first begins with the token `first`."""
    length = max(2, min(_TOKENS, plan.chosen.seq_len // 2))
    documents = (torch.arange(first, first + length), torch.arange(length))
    ids = torch.cat(documents).remainder(plan.model_shape.vocab_size)
    labels = ids.clone()
    labels[: length + 1] = IGNORED
    positions = torch.arange(length).repeat(2)
    with torch.no_grad():
        found = model(
            input_ids=ids[None].to(device),
            labels=labels[None].to(device),
            position_ids=positions[None].to(device),
            document_bounds=(0, length, 2 * length),
            answer=Answer.SCORE,
        )
    assert isinstance(found, Tensor)
    return float(found[0])
