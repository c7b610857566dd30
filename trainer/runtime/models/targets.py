"""Which linear layers of a model an adapter reaches, and which part of a block each of them is.

Four rules, and no list of names, decide what `all-linear` leaves out:

    the head           its weight is read by the loss
    routers            what is next to experts and does not lead back to the hidden size: it chooses experts, or
                       weights them; an adapter on it moves tokens to other experts, so it is opt-in by name
    weights read past  a layer whose weight another module reads by itself (`self.out_proj.weight` in the class of a
    the forward        Mamba layer, for its kernel), or whose own class has another forward than a linear layer: an
                       adapter on it has no effect, or another one
    no gradient        what runs in a forward under `torch.no_grad`, as the indexers of sparse attention do

The last two rules are read from the source of the classes, as the kernels that would show them run on CUDA alone. A
read in a branch that the module's own settings switch off (`if self.pretraining_tp > 1`) does not count. Shapes, types
and devices of a weight may be read anywhere. What these rules miss is in the report after five steps
(`loop/adapter_check.py`).

Experts that transformers keeps in one tensor of three dimensions get adapters where PEFT knows them under the names of
their former layers (`gate_proj`, `up_proj`, `down_proj`, or `w1` to `w3`). In those models PEFT treats every layer of
such a name as an expert's, so that shared experts and dense layers have no adapters there.
"""

import ast
import copy
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.spec.model.blocks import Component

_OF_TORCH = frozenset({nn.Linear.forward, Conv1D.forward})
_EXPERTS = "experts"
_FACTS = frozenset({"dtype", "device", "shape", "ndim", "size", "numel", "element_size"})  # of a weight, not its values
_GENERAL = (PreTrainedModel.__name__, "GenerationMixin")
_WITHOUT_FORWARD = ("__init__", "_init_weights", "reset_parameters")


class Experts(NamedTuple):
    """A module that holds experts, and the module around it that routes tokens to them."""

    path: str
    parent: str
    number: int  # 0 where the tensors do not show it


def is_linear(module: nn.Module) -> bool:
    """True of what an adapter can be put on: a layer that computes as `nn.Linear` does, or transformers' `Conv1D`."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    return type(module).forward in _OF_TORCH or is_4bit(module) or _computes_alike(module)


def is_4bit(module: nn.Module) -> bool:
    """True of bitsandbytes' layers, and of what stands for one in a dry run."""
    return any(owner.__module__.startswith("bitsandbytes.") for owner in type(module).__mro__)


_ALIKE: dict[type[nn.Module], bool] = {}


def _computes_alike(module: nn.Linear | Conv1D) -> bool:
    """True if a class with a forward of its own gives the result of `nn.Linear`; run once, with small weights."""
    owner = type(module)
    if owner not in _ALIKE:
        small: Any = copy.copy(module)
        numbers = torch.Generator("cpu").manual_seed(0)  # of its own: those of the run decide the first adapters
        hidden, weight = (torch.rand(size, generator=numbers, device="cpu") for size in ((2, 3, 4), (5, 4)))
        small._parameters = {"weight": nn.Parameter(weight), "bias": None}
        try:
            with torch.no_grad():
                made = owner.forward(small, hidden)
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
            made = None
        expected = nn.functional.linear(hidden, weight)
        _ALIKE[owner] = (
            isinstance(made, torch.Tensor) and made.shape == expected.shape and torch.allclose(made, expected)
        )
    return _ALIKE[owner]


def experts_in(root: nn.Module) -> list[Experts]:
    """The modules below `root` that hold experts and have a router next to them."""
    found = [
        Experts(path, path.rpartition(".")[0], count)
        for path, module in root.named_modules()
        if path and (count := _num_experts(path, module)) is not None
    ]
    return [each for each in found if any(_next_to(root, each))]


def routers_of(root: nn.Module) -> set[str]:
    """Paths of the routers below `root`: all that is in them belongs to them."""
    return {path for each in experts_in(root) for path in _next_to(root, each)}


def is_inside(path: str, roots: set[str]) -> bool:
    """True of a path that is one of the roots, or below it."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _num_experts(path: str, module: nn.Module) -> int | None:
    """Number of experts that a module holds, 0 where its tensors do not show it; None if it holds none."""
    if "Conv" in type(module).__name__ or isinstance(module, nn.Linear | nn.Embedding):
        return None
    own = list(module.parameters(recurse=False))
    stacked = [_shape(weight)[0] for weight in own if len(_shape(weight)) == 3]
    if stacked:
        return max(stacked)
    names = path.split(".")
    if isinstance(module, nn.ModuleList) and names[-1] == _EXPERTS:
        return len(module)
    return 0 if _EXPERTS in names and any(len(_shape(weight)) == 2 for weight in own) else None


def _next_to(root: nn.Module, experts: Experts) -> Iterator[str]:
    """Paths of the routers next to experts.

    Below the module that routes, everything leads back to the hidden size or into the experts, but for the router. In
    a block, where attention is next to them as well, it is what has an output for each expert.
    """
    parent_path = experts.parent
    parent = root.get_submodule(parent_path)
    if experts.number == 0:  # one level more: the tensors are in a module of their own
        parent_path = parent_path.rpartition(".")[0] if parent_path.endswith(_EXPERTS) else parent_path
        parent = root.get_submodule(parent_path)
    is_block = parent is root or isinstance(parent, GradientCheckpointingLayer)
    inputs = _widths(root.get_submodule(experts.path))
    for name, child in parent.named_children():
        path = f"{parent_path}.{name}" if parent_path else name
        if is_inside(experts.path, {path}) or isinstance(child, nn.Embedding) or "Norm" in type(child).__name__:
            continue
        outputs = [shape[0] for shape in _matrices(child)]
        if not outputs or _leads_back(child) or any(len(_shape(weight)) == 3 for weight in child.parameters()):
            continue
        feeds_experts = is_linear(child) and outputs[0] in inputs and outputs[0] != experts.number
        if experts.number in outputs if is_block else not feeds_experts:
            yield path


def _leads_back(module: nn.Module) -> bool:
    """True if a module ends with as many features as it begins with, as attention and feed-forward layers do."""
    shapes = list(_matrices(module))
    if len(shapes) == 1:
        return shapes[0][0] == shapes[0][1] or (shapes[0][0] > shapes[0][1])
    return shapes[-1][0] in {inputs for _, inputs in shapes[:-1]}


def _matrices(module: nn.Module) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of the matrices of a module, in their order; those in 4 bit have tensors of other shapes."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            if part.out_features > 0:
                yield part.out_features, part.in_features
            continue
        for weight in part.parameters(recurse=False):
            shape = _shape(weight)
            if len(shape) == 2 and shape[0] > 0 and not isinstance(part, nn.Embedding):
                yield (shape[1], shape[0]) if isinstance(part, Conv1D) else (shape[0], shape[1])


def _widths(experts: nn.Module) -> set[int]:
    stacked = (_shape(weight) for weight in experts.parameters() if len(_shape(weight)) == 3)
    return {inputs for _, inputs in _matrices(experts)} | {size for shape in stacked for size in shape[1:]}


def _shape(weight: Any) -> tuple[int, ...]:  # noqa: ANN401  # a parameter, whole or cut by ZeRO-3
    return tuple(getattr(weight, "ds_shape", weight.shape))


def read_past_forward(model: nn.Module) -> dict[str, str]:
    """The linear layers whose weight is read past their forward: why, by their paths."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear | Conv1D):
                continue
            if not is_linear(child):
                found[inside + name] = f"{type(child).__name__} does not compute as a linear layer does"
            elif any(read.name == name and read.is_live(module) for read in _reads(type(module))):  # type: ignore[arg-type]  # as below
                found[inside + name] = f"{type(module).__name__} reads its weight by itself, for a kernel of its own"
    return found


def without_effect(model: nn.Module) -> dict[str, str]:
    """The linear layers on which an adapter does not learn what it would on a linear layer: why, by their paths."""
    silent = {path: module for path, module in model.named_modules() if _is_without_gradient(type(module))}  # type: ignore[arg-type]  # a class can be hashed
    found = {
        path: f"{type(silent[root]).__name__} runs without gradients"
        for root in silent
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and is_inside(path, {root})
    }
    return found | read_past_forward(model)


@cache
def _is_without_gradient(owner: type) -> bool:
    """True if the forward of a class is decorated with `torch.no_grad`."""
    forwards = (function for function in _functions(owner) if function.name == "forward")
    return any("no_grad" in ast.unparse(each) for forward in forwards for each in forward.decorator_list)


class _Read(NamedTuple):
    """A place in the source of a class that reads `self.NAME.weight`, and the conditions it is under."""

    name: str
    conditions: tuple[tuple[ast.expr, bool], ...]  # a test, and the outcome under which the read happens

    def is_live(self, module: nn.Module) -> bool:
        """False if the settings of a module decide in training that this place is never reached."""
        for test, outcome in self.conditions:
            try:
                if bool(_value(test, module)) is not outcome:
                    return False
            except _UnknownError:
                continue
        return True


class _UnknownError(Exception):
    """A condition that settings of the module alone do not decide."""


@cache
def _reads(owner: type) -> tuple[_Read, ...]:
    found = []
    for function in _functions(owner):
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(function):
            match node:
                case ast.Attribute(attr="weight", value=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    around = parents[node]
                    if not (isinstance(around, ast.Attribute) and around.attr in _FACTS):
                        found.append(_Read(name, tuple(_conditions(node, parents))))
    return tuple(found)


def _functions(owner: type) -> Iterator[ast.FunctionDef]:
    """The methods of a class, those it inherits included, that may run in a forward."""
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        is_general = method.__module__.startswith(("torch.", "peft.")) or method.__qualname__.startswith(_GENERAL)
        if name in _WITHOUT_FORWARD or is_general:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
            (function,) = ast.parse(source).body
        except (OSError, TypeError, SyntaxError, ValueError):  # without a file, or no function of its own
            continue
        if isinstance(function, ast.FunctionDef):
            yield function


def _conditions(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[tuple[ast.expr, bool]]:
    while (around := parents.get(node)) is not None:
        if isinstance(around, ast.If | ast.IfExp) and node is not around.test:
            body = around.body if isinstance(around.body, list) else [around.body]
            yield around.test, node in body
        node = around


_COMPARED: MappingProxyType[type[ast.cmpop], Callable[[Any, Any], bool]] = MappingProxyType(
    {
        ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
        ast.LtE: operator.le, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    }
)  # fmt: skip


def _value(node: ast.expr, module: nn.Module) -> Any:  # noqa: ANN401  # of the expression
    """The value of a condition made of settings of the module; `self.training` is true."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id="self"):
            return module
        case ast.Attribute(value=ast.Name(id="self"), attr="training"):
            return True
        case ast.Attribute():
            of = _value(node.value, module)
            if not hasattr(of, node.attr):
                raise _UnknownError
            return getattr(of, node.attr)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, module)
        case ast.BoolOp():
            return _joined(node, module)
        case ast.Compare(ops=[one], comparators=[other]) if type(one) in _COMPARED:
            return _COMPARED[type(one)](_value(node.left, module), _value(other, module))
    raise _UnknownError


def _joined(node: ast.BoolOp, module: nn.Module) -> bool:
    """Of `and` and `or`: one side may decide although another is unknown."""
    decides, is_unknown = isinstance(node.op, ast.Or), False
    for each in node.values:
        try:
            if bool(_value(each, module)) is decides:
                return decides
        except _UnknownError:
            is_unknown = True
    if is_unknown:
        raise _UnknownError
    return not decides


def component_of(path: str, block: nn.Module, *, routers: set[str], experts: set[str]) -> Component:
    """The part of a block that a layer or a tensor of this path belongs to."""
    if is_inside(path, routers):
        return Component.ROUTER
    if is_inside(path, experts):
        return Component.EXPERTS
    names = path.split(".")
    for depth in range(1, len(names)):
        module = block.get_submodule(".".join(names[:depth]))
        kinds = [type(child) for child in module.children()]
        if hasattr(module, "A_log") or any("Conv" in kind.__name__ and kind is not Conv1D for kind in kinds):
            return Component.STATE
        if "Attention" in type(module).__name__ or "attn" in names[depth - 1]:
            return Component.ATTENTION
    return Component.SHARED_EXPERTS if experts else Component.FEED_FORWARD


def default_layers(model: PreTrainedModel) -> list[str]:
    """Paths of the linear layers that `all-linear` adapts, before what PEFT makes of experts."""
    head, routers, idle = model.get_output_embeddings(), routers_of(model), without_effect(model)
    return [
        path
        for path, module in model.named_modules()
        if is_linear(module) and module is not head and path not in idle and not is_inside(path, routers)
    ]
