"""Check that the loss trained here is the model's own: cross-entropy of hidden states x head, and nothing else.

Some models scale or mask their logits after the head, change the hidden states before it, or add a loss of another
kind. The loss heads of `trainer.runtime.loss.head` know a cap and a bias; they would train another loss than such a
model's without a word. So the model's own loss is run on fake tensors, and so are its hidden states and its head, and
the operations are compared one by one.
"""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from trainer.runtime.attention.packed import known_rows
from trainer.runtime.loss.head import LossForward
from trainer.simulation.build import materialise
from trainer.simulation.kernels import Kernels

NUM_TOKENS = 8
# What moves values or changes their form, labels shifted by one place among it.
_FREE = frozenset({
    "view", "_unsafe_view", "slice", "alias", "detach", "_to_copy", "select", "unsqueeze", "t", "index", "clone",
    "constant_pad_nd",
})  # fmt: skip
_CAP = ("div", "tanh", "mul")
_CROSS_ENTROPY = ("_log_softmax", "nll_loss_forward")


def loss_obstacle(model: PreTrainedModel, loss: LossForward) -> str | None:
    """Why a model on `meta` has another loss than the heads here; None where it has not. It is left on fake tensors."""
    kernels = Kernels("cpu", (0, 0))
    model.eval()
    try:
        with kernels.installed(), known_rows(are_packed=False), FakeTensorMode():
            materialise(model, "cpu")
            ids = torch.zeros((1, NUM_TOKENS), dtype=torch.long)
            theirs = _operations(lambda: loss.own_forward(input_ids=ids, labels=ids, use_cache=False))
            ours = _operations(lambda: _logits(model, ids))
    except _NOT_FOLLOWED as error:
        return f"its forward cannot be followed without values ({type(error).__name__})"
    ours = [*ours, *(_CAP if loss.softcap is not None else ()), *_CROSS_ENTROPY]
    if theirs == ours:
        return None
    differing = next((own for own, other in zip_longest(theirs, ours) if own != other), None)
    return f"its loss is not just the cross-entropy of its hidden states times its head ({differing or 'less'})"


# What following a forward on fake tensors may end in: a question of values, or code that takes another kind of model.
_NOT_FOLLOWED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


def _logits(model: Any, ids: Tensor) -> Tensor:  # noqa: ANN401  # transformers' classes
    """As the loss heads compute them."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    assert isinstance(logits, Tensor)
    return logits


def _operations(compute: Any) -> list[str]:  # noqa: ANN401  # a function without arguments
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        compute()
    return recorder.names


class _Recorder(TorchDispatchMode):
    """The names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        name = func.__name__.partition(".")[0].rstrip("_")
        if name not in _FREE and func.namespace == "aten":
            self.names.append(name)
        return func(*args, **(kwargs or {}))
