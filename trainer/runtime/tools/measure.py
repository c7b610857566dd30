"""Measures the speed of a device, and of the links between devices.

    python -m shardwise.trainer.runtime.tools.measure OUT.json cuda|cpu [SECONDS]
    python -m shardwise.trainer.runtime.tools.measure OUT.json peers [SECONDS]
    python -m shardwise.trainer.runtime.tools.measure FOLDER gather RANK WORLD cuda|cpu [LOCAL_RANK tcp://HOST:PORT]

Each figure of a device is the best of several repetitions: square matrix products in the precisions the device has, a
causal attention forward by the kernel that ranks run (`trainer.spec.strategy`), a copy within the
device's memory, copies between pinned host memory and the device, and an update of AdamW on the host's cores. A copy
within memory reads and writes every byte, and both count; attention counts the scores that are not masked. SECONDS is
spent on each figure.

A figure that cannot be measured (no room, no such kernel) is a line in the result, and the others follow; an error of
the GPU itself ends the measurement. The result is written after each figure, so that it is not lost when the process is
stopped.

`peers` copies memory between GPUs and reads it. Over PCIe some machines announce peer access and then hang or deliver
other bytes (an IOMMU or ACS settings between the cards); a training run on them stops, or learns nothing. Every ordered
pair is tried. The result is written before and after each, so that a process that hangs has named the pair at work.

`gather` is one rank of an all-gather. The ranks meet through a file in FOLDER, those of several machines at an address;
they gather a block of each other several times, check every value, and each writes `RANK.json`. Rates are those of one
device in a ring: each rank receives the blocks of all others, and so does the link into a machine. If a rank is
missing, the others wait until the caller ends them.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import distributed
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.trainer.runtime.run.clock import best_seconds, wait_for
from shardwise.trainer.spec import codec, strategy
from shardwise.trainer.spec.hardware import DeviceKind, MeasuredRates, PeerCopy
from shardwise.trainer.spec.messages.worker_requests import GatherResult, Measurement
from shardwise.trainer.spec.strategy import AttentionKernel
from shardwise.trainer.spec.units import GIB, MIB

BUDGET_S = 1.0  # for each figure; at least three repetitions and a first one make it about two
NUM_BYTES = 128 * MIB  # copied between two GPUs
PEERS_BUDGET_S = 0.2  # for each pair
REPETITIONS = 5  # the same on every rank
BLOCK_BYTES = {DeviceKind.CUDA: 64 * MIB, DeviceKind.CPU: 8 * MIB}  # of each rank
MOST_GATHERED_BYTES = 512 * MIB  # by each rank, which holds them twice
BACKENDS = {DeviceKind.CUDA: "nccl", DeviceKind.CPU: "gloo"}
_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ADAM_BYTES = 28  # a parameter: fp32 weight and two moments read and written, gradient read
_FP8_CAPABILITY = (8, 9)

_BACKENDS = {
    AttentionKernel.FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionKernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}

Figure = tuple[str, Callable[[], MeasuredRates]]


def main(arguments: Sequence[str]) -> int:
    """Measures the subject named in `arguments` and writes the result to the file or folder named first."""
    out, subject, *rest = arguments
    if subject == "gather":
        local_rank, meeting = rest[3:] or (rest[0], f"file://{Path(out, 'meeting').absolute()}")
        _gather_as_rank(Path(out), int(rest[0]), int(rest[1]), DeviceKind(rest[2]), int(local_rank), meeting)
        return 0
    results: Iterator[Measurement]
    if subject == "peers":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        copies = peer_copies(devices, budget_s=float(rest[0]) if rest else PEERS_BUDGET_S)
        results = (Measurement(rates=MeasuredRates(peer_copies=pairs)) for pairs in copies)
    else:
        results = measure(torch.device(DeviceKind(subject)), budget_s=float(rest[0]) if rest else BUDGET_S)
    for result in results:
        codec.write(Path(out), result)
    return 0


def measure(device: torch.device, *, budget_s: float = BUDGET_S) -> Iterator[Measurement]:
    """The ceilings of one device, after each figure as far as they are known."""
    so_far = Measurement()
    for name, figure in _figures(device, budget_s):
        try:
            found = figure()
        except RuntimeError as error:  # torch raises it for no memory, for no kernel and for a sick GPU
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            so_far = replace(so_far, notes=(*so_far.notes, f"{name}: not measured, {reason}"))
            yield so_far
            if "CUDA error" in reason:
                return
            continue
        so_far = replace(so_far, rates=_merged(so_far.rates, found))
        yield so_far


def trainable_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The element types to compare; a GPU trains in its native 16-bit type, a CPU in whichever is faster."""
    if device.type != "cuda":
        return (torch.float32, torch.bfloat16)
    return (torch.bfloat16,) if torch.cuda.get_device_capability(device) >= (8, 0) else (torch.float16,)


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, size: int, budget_s: float) -> int:
    """Floating-point operations per second of a `size` x `size` product, 2 * size**3 of them in each."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return round(2 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), device, budget_s))


def fp8_flops_per_s(device: torch.device, size: int, budget_s: float) -> int:
    """The same in e4m3 with one scale a tensor, summed in fp32 and written in bf16."""
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()  # cuBLAS wants it by columns
    scale = torch.ones((), device=device)

    def multiply() -> object:
        return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return round(2 * size**3 / best_seconds(multiply, device, budget_s))


def attention_flops_per_s(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], budget_s: float
) -> int:
    """FLOP/s of a causal forward of (batch, heads, row, head) without a row x row array."""
    batch, heads, row, head = shape
    query, key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    backend = attention_backend(device, dtype, head)

    def attend() -> object:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with torch.no_grad():
        return round(4 * batch * heads * row * row * head / 2 / best_seconds(attend, device, budget_s))


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> SDPBackend:
    """torch's name of the kernel that a rank runs on the device."""
    kind = DeviceKind(device.type)
    capability = torch.cuda.get_device_capability(device) if kind is DeviceKind.CUDA else None
    is_16_bit = dtype is not torch.float32
    return _BACKENDS[strategy.sdpa_kernel(kind, capability, is_16_bit=is_16_bit, head_dim=head_dim)]


def memory_bytes_per_s(device: torch.device, num_bytes: int, budget_s: float) -> int:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / best_seconds(lambda: target.copy_(source), device, budget_s))


def host_copy_bytes_per_s(device: torch.device, num_bytes: int, budget_s: float, *, to_device: bool) -> int:
    """Bytes per second between pinned host memory and the device, one way."""
    host = torch.ones(num_bytes // 4).pin_memory()
    there = torch.ones(num_bytes // 4, device=device)
    target, source = (there, host) if to_device else (host, there)
    return round(host.nbytes / best_seconds(lambda: target.copy_(source, non_blocking=True), device, budget_s))


def host_adam_bytes_per_s(num_parameters: int, budget_s: float) -> int:
    """Bytes per second of a fused AdamW step on the host's cores."""
    weight = torch.nn.Parameter(torch.ones(num_parameters))
    weight.grad = torch.ones(num_parameters)
    optimizer = torch.optim.AdamW([weight], fused=True)
    seconds = best_seconds(lambda: optimizer.step(), torch.device("cpu"), budget_s)
    return round(_ADAM_BYTES * num_parameters / seconds)


def _figures(device: torch.device, budget_s: float) -> Iterator[Figure]:
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else 8 * GIB
    size = (8192 if free > 4 * GIB else 4096) if is_cuda else 1024
    num_bytes = min(GIB, free // 8) if is_cuda else 256 * MIB  # beyond every cache
    dtypes = trainable_dtypes(device)
    yield "matrix products", lambda: _fastest_product(device, dtypes, size, budget_s)
    if is_cuda:
        yield (
            "fp32 products",
            lambda: MeasuredRates(fp32_flops_per_s=matmul_flops_per_s(device, torch.float32, size, budget_s)),
        )
        if torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
            yield "fp8 products", lambda: MeasuredRates(fp8_flops_per_s=fp8_flops_per_s(device, size, budget_s))
    shape = (2, 32, size // 2, 128) if is_cuda else (1, 8, size, 64)
    yield (
        "attention",
        lambda: MeasuredRates(attention_flops_per_s=attention_flops_per_s(device, dtypes[0], shape, budget_s)),
    )
    yield "memory", lambda: MeasuredRates(memory_bytes_per_s=memory_bytes_per_s(device, num_bytes, budget_s))
    if is_cuda:
        yield (
            "host to device",
            lambda: MeasuredRates(
                host_to_device_bytes_per_s=host_copy_bytes_per_s(device, num_bytes // 4, budget_s, to_device=True)
            ),
        )
        yield (
            "device to host",
            lambda: MeasuredRates(
                device_to_host_bytes_per_s=host_copy_bytes_per_s(device, num_bytes // 4, budget_s, to_device=False)
            ),
        )
    yield "AdamW on the host", lambda: MeasuredRates(host_adam_bytes_per_s=host_adam_bytes_per_s(8 * MIB, budget_s))


def _fastest_product(device: torch.device, dtypes: Sequence[torch.dtype], size: int, budget_s: float) -> MeasuredRates:
    flops = {dtype: matmul_flops_per_s(device, dtype, size, budget_s) for dtype in dtypes}
    fastest = max(flops, key=lambda dtype: flops[dtype])
    return MeasuredRates(matmul_flops_per_s=flops[fastest], matmul_precision=_PRECISIONS[fastest])


def _merged(known: MeasuredRates, found: MeasuredRates) -> MeasuredRates:
    figures = {name: getattr(found, name) for name in found.__struct_fields__}
    return replace(known, **{name: value for name, value in figures.items() if value not in (None, ())})


def peer_copies(devices: Sequence[torch.device], *, budget_s: float) -> Iterator[tuple[PeerCopy, ...]]:
    """The pairs so far, before and after each; the last is at work while it has no rate.

    A pair for which a card has no room is omitted.
    """
    done: tuple[PeerCopy, ...] = ()
    for a, b in permutations(range(len(devices)), 2):
        try:
            # Values that differ everywhere, so that a page that was not copied shows.
            there = torch.arange(NUM_BYTES // 4, dtype=torch.int32, device=devices[a])
            here = torch.zeros(NUM_BYTES // 4, dtype=torch.int32, device=devices[b])
            wait_for(devices[a])
            wait_for(devices[b])
        except torch.OutOfMemoryError:
            continue
        started = PeerCopy(a=a, b=b)
        yield (*done, started)
        done = (*done, _copied(started, there, here, budget_s))
        yield done


def _copied(pair: PeerCopy, there: torch.Tensor, here: torch.Tensor, budget_s: float) -> PeerCopy:
    seconds = best_seconds(lambda: here.copy_(there), here.device, budget_s)
    is_correct = bool(torch.equal(here.cpu(), there.cpu()))
    return replace(pair, bytes_per_s=round(there.nbytes / seconds), is_correct=is_correct)


def _gather_as_rank(folder: Path, rank: int, world: int, kind: DeviceKind, local_rank: int, meeting: str) -> None:
    device = torch.device("cuda", local_rank) if kind is DeviceKind.CUDA else torch.device("cpu")
    if kind is DeviceKind.CUDA:
        torch.cuda.set_device(device)
    distributed.init_process_group(BACKENDS[kind], init_method=meeting, rank=rank, world_size=world)
    num_bytes = min(BLOCK_BYTES[kind], MOST_GATHERED_BYTES // world)
    codec.write(folder / f"{rank}.json", gather(device, rank, world, num_bytes=num_bytes))
    distributed.destroy_process_group()


def gather(device: torch.device, rank: int, world: int, *, num_bytes: int) -> GatherResult:
    """Gathers a block of every rank and looks at all of them; every rank of the default group calls it."""
    mine = _block(rank, num_bytes // 4, device)
    everything = torch.empty(world * mine.numel(), dtype=mine.dtype, device=device)
    best_s = float("inf")
    for repetition in range(REPETITIONS + 1):  # the first opens connections
        wait_for(device)
        started = time.perf_counter()
        distributed.all_gather_into_tensor(everything, mine)
        wait_for(device)
        if repetition:
            best_s = min(best_s, time.perf_counter() - started)
    expected = torch.cat([_block(other, mine.numel(), torch.device("cpu")) for other in range(world)])
    return GatherResult(
        bytes_per_s=round((world - 1) * mine.nbytes / best_s), is_correct=torch.equal(everything.cpu(), expected)
    )


def _block(rank: int, num_elements: int, device: torch.device) -> torch.Tensor:
    """Values that differ by rank and position."""
    return torch.arange(num_elements, dtype=torch.int32, device=device) * 31 + rank


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
