"""Functions of a model's code that a package computes in one kernel, and what stands in for an installed package.

transformers wraps such a function (`use_kernel_func_from_hub_with_fallback`): with the package its kernel runs, without
it operations of torch. A kernel runs on a real device alone, so a dry run has a stand-in: it saves what the function is
given and makes what it returns, as the kernels of these packages do. What a kernel allocates for itself is not counted.
"""

import inspect
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.trainer.simulation.device_memory import Tracker
from shardwise.trainer.simulation.fake_device import replaced

_DISTRIBUTIONS: Mapping[str, str] = {"fla": "flash-linear-attention"}


class PackageFunction(NamedTuple):
    """A function of a model's code that a package computes in one kernel."""

    name: str
    package: str  # as pip names it
    wrapped: Callable[..., Any]  # as the code calls it: the package's, or transformers' own operations
    operations: Callable[..., Any]  # transformers' own


def package_functions(model: nn.Module) -> Iterator[tuple[Any, str, PackageFunction]]:
    """Functions of packages in the modules that a model's classes are from: (module, name in it, function)."""
    names = {type(module).__module__ for module in model.modules()}
    for owner in (sys.modules[name] for name in sorted(names)):
        for attribute, value in list(vars(owner).items()):
            inner = getattr(value, "__wrapped__", None)
            known = _closure(value)
            if inner is not None and "package" in known and "func_name" in known:
                package = _DISTRIBUTIONS.get(known["package"], known["package"].replace("_", "-"))
                yield owner, attribute, PackageFunction(known["func_name"], package, value, inner)


def _closure(function: Any) -> dict[str, Any]:  # noqa: ANN401  # any value of a module
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


Run = Callable[..., Any]
Costs = Callable[[Sequence[Tensor]], None]


@contextmanager
def as_installed(
    model: nn.Module,
    packages: Container[str],
    tracker: Tracker,
    *,
    watch: Callable[[PackageFunction, Run], Run] = lambda _, run: run,
    ran: Costs = lambda _: None,
) -> Iterator[None]:
    """Within the block, functions of `packages` are stand-ins, and others run transformers' operations.

    `watch` may wrap these; `ran` is called with the tensors that a stand-in was given and made.
    """
    with ExitStack() as stack:
        for owner, attribute, function in package_functions(model):
            run = _operations(function)
            run = _stand_in(run, tracker, ran) if function.package in packages else watch(function, run)
            stack.enter_context(replaced(owner, **{attribute: run}))
        yield


def _operations(function: PackageFunction) -> Run:
    """transformers' operations, without arguments that only a package has."""
    taken = inspect.signature(function.operations).parameters

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the function's
        return function.operations(*args, **{name: value for name, value in kwargs.items() if name in taken})

    return call


def _stand_in(run: Run, tracker: Tracker, ran: Costs) -> Run:
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the function's
        given, layout = tree_flatten((args, kwargs))
        made: list[Any] = []

        def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
            values = iter(tensors)
            args, kwargs = tree_unflatten(
                [next(values) if isinstance(each, Tensor) else each for each in given], layout
            )
            with tracker.unseen():
                made.extend(tree_flatten(run(*args, **kwargs)))
            return tuple(each for each in made[0] if isinstance(each, Tensor))

        inputs = [each for each in given if isinstance(each, Tensor)]
        outputs = _OneKernel.apply(compute, *inputs)  # type: ignore[no-untyped-call]
        ran([*inputs, *outputs])
        values = iter(outputs)
        return tree_unflatten([next(values) if isinstance(each, Tensor) else each for each in made[0]], made[1])

    return call


class _OneKernel(torch.autograd.Function):
    """Outputs like those of `compute`, and gradients like the inputs."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401  # torch's context
        outputs = tuple(torch.empty_like(each) for each in compute(*inputs))
        ctx.save_for_backward(*inputs, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        needed = ctx.needs_input_grad[1:]
        made = zip(ctx.saved_tensors[: len(needed)], needed, strict=True)
        return (None, *(torch.empty_like(each) if is_needed else None for each, is_needed in made))
