"""The runtime's own step on fake tensors, which reports to the tracker when each event begins.

`trainer.runtime.loop.step.run_step` runs as it is; its arguments make it a dry run. Its clock reports when a forward,
a backward and an update begin. Values that it reads of its tensors, which have none, are supplied: its sums, the only
tensors of float64, are the number of terms each, every other number is 0 and every boolean False (no overflow, no
fault). Reading a value in a forward ends the dry run.

The events of a backward begin when a gradient arrives: that of the logits, of the last hidden state, of the last
block's output, of the first one's, of the first one's input. Hooks on those tensors see it; they hold nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._subclasses import fake_impls

from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.step import Objective, run_step
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.simulation.tracker import Kind, Tracker

FORWARD, LOSS, HEAD, NORM = "forward_end", "loss_backward", "head_backward", "norm_backward"
TOP, MIDDLE, BOTTOM = "block_backward_top", "block_backward_middle", "block_backward_bottom"
COMPLETE, CLIP, STEP = "gradients_complete", "clip", "optimizer_step"
CLIP_NORM, LEARNING_RATE = 1.0, 1e-4
_READ = torch.ops.aten._local_scalar_dense.default
_implementations: Any = fake_impls.op_implementations_dict
_no_result = _implementations[_READ]


class Engine(NamedTuple):
    """Objects that Accelerate has prepared, for `run_step`."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any  # Accelerate's wrapper around torch's or DeepSpeed's
    scaler: LossScaler | None

    def step(self, micro_batches: Sequence[MicroBatch], tracker: Tracker, objective: Objective) -> None:
        """Runs the runtime's step once."""
        num_terms = self.accelerator.num_processes * sum(batch.num_terms for batch in micro_batches)
        tracker.begin(FORWARD, is_forward=True)
        with _reads_as(lambda _mode, _func, tensor: _value(tensor, num_terms)):
            run_step(
                self.accelerator,
                self.model,
                self.optimizer,
                micro_batches,
                num_terms=num_terms,
                step=1,
                seed=0,
                lr=LEARNING_RATE,
                clip=CLIP_NORM,
                clock=_EventClock(tracker, reads_in_backward=running_engine(self.model).updates_in_last_backward),
                scaler=self.scaler,
                objective=objective,
            )
        states = unwrapped(self.optimizer).state.values()
        tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
        tracker.mark(tensors, Kind.OPTIMIZER_STATE)


def _value(tensor: Tensor, num_terms: int) -> float | bool:
    if tensor.dtype is torch.bool:
        return False
    if tensor.dtype is torch.float64:
        return float(num_terms)
    return 0.0 if tensor.is_floating_point() else 0


@contextmanager
def _reads_as(implementation: Callable[..., Any]) -> Iterator[None]:
    """Runs the block with `implementation` where a value is read."""
    before = _implementations[_READ]
    _implementations[_READ] = implementation
    try:
        yield
    finally:
        _implementations[_READ] = before


class _EventClock(Clock):
    """The clock of a step, which measures nothing and reports to the tracker what begins."""

    def __init__(self, tracker: Tracker, *, reads_in_backward: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._tracker = tracker
        self._reads_in_backward = reads_in_backward  # DeepSpeed, whose last backward updates the weights

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Begins the event of a phase."""
        tracker = self._tracker
        if phase == "forward":
            tracker.begin(FORWARD, is_forward=True)
            with _reads_as(_no_result):
                yield
        elif phase == "backward":
            tracker.begin(LOSS)
            with nullcontext() if self._reads_in_backward else _reads_as(_no_result):
                yield
            tracker.block = ""
            tracker.name_gradients()
        else:
            if tracker.event != STEP:  # DeepSpeed's is over
                tracker.begin(CLIP)
            yield


@contextmanager
def reporting(
    engine: Engine, model: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, tracker: Tracker
) -> Iterator[None]:
    """Within the block, reports the running module and the begin of backward events and the update to the tracker."""
    hooks = [hook for name, module in model.named_modules() for hook in _naming(module, _short(name), tracker)]
    for index, block in enumerate(blocks):
        hooks.append(block.register_forward_hook(_block_hook(index, len(blocks), tracker)))
    hooks.append(blocks[0].register_forward_pre_hook(_input_hook(tracker, COMPLETE), with_kwargs=True))
    hooks.append(head.register_forward_pre_hook(_input_hook(tracker, NORM), with_kwargs=True))
    hooks.append(head.register_forward_hook(_head_hook(tracker)))
    if running_engine(engine.model).updates_in_last_backward:
        _report_step(engine.model, tracker)
    else:
        hooks.append(unwrapped(engine.optimizer).register_step_pre_hook(lambda *_: tracker.begin(STEP)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _report_step(engine: Any, tracker: Tracker) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Its step begins with the norm of the gradients, long before the optimizer's own."""
    step = engine.step

    def reported_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # DeepSpeed's
        tracker.name_gradients()
        tracker.begin(STEP)
        return step(*args, **kwargs)

    engine.step = reported_step


def _short(name: str) -> str:
    """A module's name with the numbers of blocks and experts left out, so that equal blocks count together."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _naming(module: nn.Module, name: str, tracker: Tracker) -> Iterator[Any]:
    yield module.register_forward_pre_hook(lambda *_: tracker.modules.append(name))
    yield module.register_forward_hook(lambda *_: _exit(tracker), always_call=True)


def _exit(tracker: Tracker) -> None:
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
