"""Where a profiled step's time went, by group, from the trace that `shardwise profile` leaves.

On a GPU a group's time is that of its kernels and copies, each put down to the operator that started it; on a CPU it
is that of the operators themselves, without what they call.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from on_gpu.path_ops import Event, Norms, Op, norms_of, ops_of
from trainer.spec.value import Value


class Group(StrEnum):
    """What the time of a step goes to."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    NORM = "norms"
    ELEMENTWISE = "element-wise"
    LOSS = "loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer and clipping"
    COPIES = "copies and fills"
    COMMUNICATION = "exposed communication"
    IDLE = "idle between kernels"


class Breakdown(Value, frozen=True, kw_only=True):
    """One profiled step."""

    seconds: dict[str, float]  # by group; idle and communication are not among them
    exposed_communication_s: float  # while nothing else ran
    busy_s: float  # while anything ran
    num_waits: int  # times the host waited for the device, or would have on a GPU
    num_started: int  # kernels and copies that the host started, or operators of a CPU
    is_device: bool  # kernels of a device, or operators of a CPU
    top: dict[str, dict[str, float]]  # by group, the kernels or operators that took longest


class _Timed(NamedTuple):
    """What took time, in microseconds."""

    group: Group
    name: str
    begin: float
    end: float
    own: float


_COPIED = ("gpu_memcpy", "gpu_memset")
_KERNELS = ("kernel", *_COPIED)
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_WAITING_OPERATORS = ("aten::_local_scalar_dense", "aten::nonzero")
_MOST_NAMES = 4

# The first that is found in a name, or in one around it, decides; in this order.
_LOSSES = r"ChunkedLoss|FusedLoss|FusedLinearCrossEntropy|cross_entropy|nll_loss|NllLoss|log_softmax|LogSoftmax"
_NAMED: tuple[tuple[Group, str], ...] = (
    (Group.COMMUNICATION, r"nccl|c10d::|all_reduce|allgather|reduce_scatter"),
    (Group.OPTIMIZER, r"Optimizer\.|_fused_adam|_foreach_|multi_tensor|linalg_vector_norm"),
    (Group.ATTENTION, r"scaled_dot_product|ScaledDotProduct|flash|fmha|varlen_attn|_DocumentAttention"),
    (Group.NORM, r"rms_?norm|layer_?norm|RMSNorm|PowBackward|RsqrtBackward|MeanBackward"),
    (Group.LOSS, _LOSSES),
    (Group.EMBEDDING, r"aten::embedding|Embedding(Dense)?Backward"),
    (Group.COPIES, r"^aten::(copy_|clone|contiguous|zero_|fill_|cat)$"),
)
_MAY_HOLD_PRODUCTS = (Group.LOSS, Group.NORM, Group.EMBEDDING, Group.COPIES)  # which are products all the same
_PRODUCT_OPERATORS = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|matmul|linear|addmm_|_grouped_mm)$")
_PRODUCT_KERNELS = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma|cublas", re.IGNORECASE)


def read_trace(path: Path) -> Breakdown:
    """The groups of the step in a gzipped chrome trace."""
    return breakdown(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def breakdown(events: Sequence[Event]) -> Breakdown:
    """The groups of the events of a chrome trace."""
    whole = [event for event in events if event.get("ph") == "X"]
    ops = ops_of(whole)
    norms = norms_of(ops)
    kernels = [event for event in whole if event.get("cat") in _KERNELS]
    timed = list(_of_kernels(kernels, ops, whole, norms) if kernels else _of_operators(ops, norms))
    names: dict[str, Counter[str]] = {}
    for each in timed:
        if each.group is not Group.COMMUNICATION:
            names.setdefault(each.group.value, Counter())[each.name] += each.own
    busy = _covered((each.begin, each.end) for each in timed)
    computing = _covered((each.begin, each.end) for each in timed if each.group is not Group.COMMUNICATION)
    return Breakdown(
        seconds={group: _seconds(sum(counted.values())) for group, counted in names.items()},
        exposed_communication_s=_seconds(busy - computing),
        busy_s=_seconds(busy),
        num_waits=_num_waits(whole, ops, is_device=bool(kernels)),
        num_started=len(kernels) or sum(1 for number, op in enumerate(ops) if op.outermost == number),
        is_device=bool(kernels),
        top={
            group: {name: _seconds(took) for name, took in counted.most_common(_MOST_NAMES)}
            for group, counted in names.items()
        },
    )


def _of_kernels(kernels: Sequence[Event], ops: Sequence[Op], events: Sequence[Event], norms: Norms) -> Iterator[_Timed]:
    by_id = {op.external_id: op for op in ops if op.external_id is not None}
    launched = {  # where a kernel does not name its operator, the call that launched it may
        event["args"]["correlation"]: event["args"].get("External id")
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    for kernel in kernels:
        args, begin, took = kernel.get("args", {}), float(kernel["ts"]), float(kernel["dur"])
        number = args.get("External id") or launched.get(args.get("correlation"))
        op, name = (None if number is None else by_id.get(number)), str(kernel["name"])
        group = Group.COPIES if kernel["cat"] in _COPIED else _group(name, op, norms)
        told = op.name if op is not None and "at::native" in name else name  # those of torch are named alike
        yield _Timed(group, told, begin, begin + took, took)


def _of_operators(ops: Sequence[Op], norms: Norms) -> Iterator[_Timed]:
    """Of a CPU. What only surrounds operators has no time of its own here: it is Python's, or autograd's."""
    for op in ops:
        if op.name.startswith(("aten::", "c10d::")):
            yield _Timed(_group(op.name, op, norms), op.name, op.begin, op.end, op.own)


def _group(name: str, op: Op | None, norms: Norms) -> Group:
    """The group of a kernel and the operator that started it, or of an operator of a CPU."""
    innermost = name if op is None else op.name
    around = (name,) if op is None else (*op.around, op.name, name)
    is_product = bool(_PRODUCT_OPERATORS.match(innermost)) or bool(_PRODUCT_KERNELS.search(name))
    is_norm = op is not None and norms.hold(op)
    for group, pattern in _NAMED:
        if is_product and group in _MAY_HOLD_PRODUCTS:
            continue
        places = (innermost,) if group is Group.COPIES else around
        if (group is Group.NORM and is_norm) or any(re.search(pattern, place) for place in places):
            return group
    return Group.PRODUCTS if is_product else Group.ELEMENTWISE


def _num_waits(events: Sequence[Event], ops: Sequence[Op], *, is_device: bool) -> int:
    """How often the host waited for the device; on a CPU, operators that would have waited for one."""
    if is_device:
        until = max((op.end for op in ops), default=0.0)  # then the profiler waits for the end of it
        waits = (event for event in events if event.get("cat") in _LAUNCHES and event["name"] in _WAITS)
        return sum(1 for event in waits if float(event["ts"]) < until)
    waiting = [op for op in ops if op.name in _WAITING_OPERATORS]
    # A CPU's optimizer reads its step count, a GPU's does not.
    return sum(1 for op in waiting if not any("Optimizer." in name or "_fused_adam" in name for name in op.around))


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def _seconds(microseconds: float) -> float:
    return microseconds / 1e6
