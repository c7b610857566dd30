"""The operators of a chrome trace, each with what surrounds it, and which of them make up a norm.

A norm is a chain of plain operators in transformers: from the square (`pow`) to the product with the weight. Its
gradient's operators are told by autograd's sequence number, which an operator of the forward shares with its gradient.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Event = Mapping[str, Any]  # of a chrome trace; times in microseconds

BACKWARD = "autograd::engine::evaluate_function: "
_CHAIN = frozenset({"mean", "add", "rsqrt", "mul", "to", "_to_copy"})
_LONGEST_CHAIN = 8
_SUMS, _ROUNDS_BACK = ("aten::add", "aten::add_"), f"{BACKWARD}ToCopyBackward0"


class Op(NamedTuple):
    """An operator, or what only surrounds operators: an annotation, a node of autograd."""

    name: str
    begin: float  # microseconds
    end: float
    own: float  # without what it calls
    external_id: int | None
    sequence: int | None  # autograd's, of itself or of the gradient that it is part of
    around: tuple[str, ...]  # from the outermost on
    outermost: int | None  # the number of the operator that everything else of it is part of


class Norms(NamedTuple):
    """What is part of a norm."""

    operators: frozenset[int]  # numbers of outermost operators
    sequences: frozenset[int]  # of gradients

    def hold(self, op: Op) -> bool:
        if op.outermost in self.operators:
            return True
        if op.name in _SUMS and op.around[-1:] == (_ROUNDS_BACK,):
            return False  # adds the gradient of the residual
        return op.sequence in self.sequences and _is_in_backward(op)


def ops_of(events: Iterable[Event]) -> list[Op]:
    """The operators of all threads, each thread's in the order they begin."""
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event["tid"], []).append(event)
    found: list[Op] = []
    for thread in threads.values():
        ordered = sorted(thread, key=lambda event: (event["ts"], -event["dur"]))
        found += _nested(ordered, first=len(found))
    return found


def norms_of(ops: Sequence[Op]) -> Norms:
    """The norms among the operators of a step, in the forward, where it runs again, and in the backward."""
    outer = [number for number, op in enumerate(ops) if op.outermost == number]
    operators: set[int] = set()
    sequences: set[int] = set()
    for place, number in enumerate(outer):
        if ops[number].name != "aten::pow":
            continue
        chain = [number]
        if place and ops[outer[place - 1]].name in ("aten::to", "aten::_to_copy"):
            chain.append(outer[place - 1])
        chain += _rest_of_chain(ops, outer[place + 1 : place + 1 + _LONGEST_CHAIN])
        if any(ops[each].name == "aten::rsqrt" for each in chain):
            operators.update(chain)
            if not _is_in_backward(ops[number]):  # what runs again there has the number of what asked for it
                sequences.update(each for each in (ops[one].sequence for one in chain) if each is not None)
    return Norms(frozenset(operators), frozenset(sequences))


def _is_in_backward(op: Op) -> bool:
    return any(name.startswith(BACKWARD) for name in op.around)


def _rest_of_chain(ops: Sequence[Op], following: Iterable[int]) -> list[int]:
    """What belongs to a norm after its square: up to the second product, that with the weight."""
    chain: list[int] = []
    products = 0
    for number in following:
        short = ops[number].name.removeprefix("aten::")
        if short not in _CHAIN or products == 2:
            break
        products += short == "mul"
        chain.append(number)
    return chain


class _Open(NamedTuple):
    """An operator that what comes next may be part of."""

    number: int
    end: float
    name: str
    around: tuple[str, ...]
    sequence: int | None
    is_backward: bool
    outermost: int | None


def _nested(thread: Sequence[Event], *, first: int) -> list[Op]:
    """The operators of one thread; they are numbered from `first`."""
    stack: list[_Open] = []
    inner: dict[int, float] = {}
    found: list[Op] = []
    for number, event in enumerate(thread, start=first):
        begin, took, name = float(event["ts"]), float(event["dur"]), str(event["name"])
        while stack and stack[-1].end <= begin:
            stack.pop()
        parent = stack[-1] if stack else None
        opened = _opened(number, event, name, begin + took, parent)
        if parent is not None:
            inner[parent.number] = inner.get(parent.number, 0.0) + took
        stack.append(opened)
        external_id = event.get("args", {}).get("External id")
        found.append(Op(name, begin, begin + took, took, external_id, opened.sequence, opened.around, opened.outermost))
    return [op._replace(own=max(0.0, op.own - inner.get(number, 0.0))) for number, op in enumerate(found, start=first)]


def _opened(number: int, event: Event, name: str, end: float, parent: _Open | None) -> _Open:
    """Inside of a node of autograd the sequence number is that node's; operators in it have none that means anything.

    What runs again in a backward (checkpointing) is no exception: its gradient's numbers are those of the first run.
    """
    is_backward = name.startswith(BACKWARD)
    own = event.get("args", {}).get("Sequence number")
    sequence = None if own is None or int(own) < 0 else int(own)
    if parent is not None and parent.is_backward and not is_backward:
        sequence = parent.sequence
    outermost = parent.outermost if parent is not None else None
    if outermost is None and name.startswith("aten::"):
        outermost = number
    return _Open(
        number,
        end,
        name,
        () if parent is None else (*parent.around, parent.name),
        sequence,
        is_backward or (parent is not None and parent.is_backward),
        outermost,
    )
