"""Steps of the trainer on fake tensors, with the tracker told which event begins when.

The order of operations and what stays referenced are those of `trainer.runtime.step`; the objective is the runtime's
own. The events of a backward begin when a gradient arrives: that of the logits, of the last hidden state, of the last
block's output, of the first one's, of the first one's input. Hooks on those tensors see it; they hold nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.adapters import trained_parameters
from trainer.runtime.data import MicroBatch
from trainer.runtime.step import Objective
from trainer.simulation.tracker import Kind, Tracker

FORWARD, LOSS, HEAD, NORM = "forward_end", "loss_backward", "head_backward", "norm_backward"
TOP, MIDDLE, BOTTOM = "block_backward_top", "block_backward_middle", "block_backward_bottom"
COMPLETE, CLIP, STEP = "gradients_complete", "clip", "optimizer_step"
CLIP_NORM = 1.0


def run_step(
    model: nn.Module,
    optimizer: TorchOptimizer,
    micro_batches: Sequence[MicroBatch],
    tracker: Tracker,
    device: torch.device,
    objective: Objective,
) -> None:
    """One optimizer step, as the runtime's `run_step`."""
    tracker.begin(FORWARD, is_forward=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, micro_batch in enumerate(micro_batches):
        with _without_sync(model) if index < len(micro_batches) - 1 else nullcontext():
            tracker.begin(FORWARD, is_forward=True)
            terms = objective(model, micro_batch, device)
            total += terms.loss.detach()
            tracker.begin(LOSS)
            (terms.loss * 1.0).backward()
            tracker.block = ""
        tracker.name_gradients()
    tracker.begin(CLIP)
    trained = trained_parameters(model)
    torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
    tracker.begin(STEP)
    optimizer.step()
    tracker.mark(_states(optimizer), Kind.OPTIMIZER_STATE)
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def told(model: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, tracker: Tracker) -> Iterator[None]:
    """Tells the tracker, for the block, which module runs and which event of the backward begins."""
    hooks = [hook for name, module in model.named_modules() for hook in _naming(module, _short(name), tracker)]
    for index, block in enumerate(blocks):
        hooks.append(block.register_forward_hook(_block_hook(index, len(blocks), tracker)))
    hooks.append(blocks[0].register_forward_pre_hook(_input_hook(tracker, COMPLETE), with_kwargs=True))
    hooks.append(head.register_forward_pre_hook(_input_hook(tracker, NORM), with_kwargs=True))
    hooks.append(head.register_forward_hook(_head_hook(tracker)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accelerate's `no_sync`."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        return _gradients_wait(model)
    return nullcontext()


@contextmanager
def _gradients_wait(model: Any) -> Iterator[None]:  # noqa: ANN401  # an FSDPModule
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _states(optimizer: TorchOptimizer) -> Iterator[Tensor]:
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def _short(name: str) -> str:
    """A module's name with the numbers of blocks and experts left out, so that equal blocks count together."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _naming(module: nn.Module, name: str, tracker: Tracker) -> Iterator[Any]:
    yield module.register_forward_pre_hook(lambda *_: tracker.modules.append(name))
    yield module.register_forward_hook(lambda *_: _leave(tracker), always_call=True)


def _leave(tracker: Tracker) -> None:
    tracker.modules.pop()


def _block_hook(index: int, num_blocks: int, tracker: Tracker) -> Any:  # noqa: ANN401  # a forward hook
    event = BOTTOM if index == 0 else TOP if index == num_blocks - 1 else MIDDLE

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401  # torch's
        if tracker.event == FORWARD:  # not when a block runs again
            _on_gradient(output, tracker, event, "backward of block *")

    return hook


def _head_hook(tracker: Tracker) -> Any:  # noqa: ANN401  # a forward hook
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401  # torch's
        if output.ndim > 1:  # logits, not the loss of a chunked head or its sums of rows
            _on_gradient(output, tracker, HEAD, "backward of the head")

    return hook


def _input_hook(tracker: Tracker, event: str) -> Any:  # noqa: ANN401  # a forward pre-hook
    def hook(_module: nn.Module, inputs: Any, kwargs: Any) -> None:  # noqa: ANN401  # torch's
        if tracker.event == FORWARD:
            _on_gradient(inputs or kwargs["hidden_states"], tracker, event, f"backward: {event}")

    return hook


def _on_gradient(values: Any, tracker: Tracker, event: str, place: str) -> None:  # noqa: ANN401  # a tensor, or a tuple that begins with one
    tensor = values if isinstance(values, Tensor) else values[0]

    def arrived(_gradient: Tensor) -> None:
        tracker.block = place
        tracker.begin(event)

    if tensor.requires_grad:
        tensor.register_hook(arrived)
