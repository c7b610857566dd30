"""Single questions to a device, in a process of its own: `python -m on_gpu.prediction_probe_child REQUEST ANSWER`.

REQUEST is JSON with `kind` and what it asks for; ANSWER gets what was found, again after every part of it, so that a
crash leaves what was known before.

    context   device bytes of a bare process, after its first matrix products, and what cuBLAS keeps of torch's memory
    loss      the most that is allocated in the forward and in the backward of a model that is all but loss head, with
              each head and with two vocabularies: their difference is bytes a logit
    load      what building a plan's model, engine and optimizer takes at most, and what is left of it
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.runtime.clock import Clock
from trainer.runtime.loss import install_loss_head
from trainer.runtime.memory_profile import MemoryProfile
from trainer.spec.errors import ShardwiseError
from trainer.spec.strategy import LossHead

Answer = dict[str, Any]
OUTPUTS_KEPT, LOSS_KEPT, COMPILED = "transformers, outputs kept", "transformers, loss kept", "compiled cross-entropy"
VARIANTS = (*map(str, LossHead), OUTPUTS_KEPT, LOSS_KEPT, COMPILED)


def main() -> int:
    """Answers the request named on the command line."""
    request_path, answer_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for answer in KINDS[request["kind"]](request, device):
        partial = answer_path.with_suffix(".partial")
        partial.write_text(json.dumps(answer))
        partial.rename(answer_path)
    return 0


def context(_request: Mapping[str, Any], device: torch.device) -> Iterator[Answer]:
    """Stages of a process that does more and more: (what it has done, used of the device, allocated, reserved)."""
    if device.type != "cuda":
        yield {"reason": "a CPU has no context, and cuBLAS is for GPUs"}
        return
    stages: list[Answer] = []

    def note(name: str) -> Answer:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        stages.append({"stage": name, "used": total - free, "allocated": allocated, "reserved": reserved})
        return {"stages": stages}

    yield note("a context")
    factor = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(4096, device=device, dtype=torch.bfloat16)
    yield note("tensors")
    product = factor @ factor
    del product
    yield note("a product")
    functional.linear(factor, factor, bias).detach()
    yield note("a product with a bias")
    (factor @ factor).sum().backward()
    factor.grad = None
    yield note("a backward")
    functional.scaled_dot_product_attention(*(factor.detach().view(1, 32, 4096, 128) for _ in range(3)), is_causal=True)
    yield note("attention")


def loss(request: Mapping[str, Any], device: torch.device) -> Iterator[Answer]:
    """Bytes above what is there between steps, by variant and vocabulary."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        try:
            figures = [_step_peaks(request, variant, vocab, device) for vocab in request["vocabularies"]]
        except (ShardwiseError, RuntimeError, ImportError) as error:  # not here; the others are worth their answer
            lines = (str(error) or type(error).__name__).splitlines()
            found[variant] = {"reason": f"{lines[0]}"}
        else:
            found[variant] = {"peaks": figures}
        yield {"variants": found}


def _step_peaks(request: Mapping[str, Any], variant: str, vocab: int, device: torch.device) -> dict[str, int]:
    torch.manual_seed(0)
    config = LlamaConfig(**request["config"], vocab_size=vocab, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).train()
    ids = torch.randint(3, vocab, (1, request["tokens"]), device=device)
    forward = _forward_of(variant, model, ids)
    profile = MemoryProfile(model, torch.optim.SGD(model.parameters(), lr=1e-3), device)
    _one_step(model, forward, Clock(device))
    clock = Clock(device)
    with profile.step(clock):
        _one_step(model, forward, clock)
    figures = profile.figures()
    assert figures.steady_allocated_bytes is not None, "a step was measured"
    return {phase: figures.peaks[phase] - figures.steady_allocated_bytes for phase in ("forward", "backward")}


def _one_step(model: nn.Module, forward: Callable[[], tuple[Tensor, object]], clock: Clock) -> None:
    with clock.measure("forward"):
        found, kept = forward()
    with clock.measure("backward"):
        found.backward()
    del found, kept
    model.zero_grad(set_to_none=True)


def _forward_of(variant: str, model: Any, ids: Tensor) -> Callable[[], tuple[Tensor, object]]:  # noqa: ANN401  # a model
    """A forward to the loss, and what is held until the backward has run."""
    if variant in (OUTPUTS_KEPT, LOSS_KEPT):

        def of_transformers() -> tuple[Tensor, object]:
            outputs = model(input_ids=ids, labels=ids, use_cache=False)
            return outputs.loss, outputs if variant == OUTPUTS_KEPT else None

        return of_transformers
    if variant == COMPILED:
        entropy = torch.compile(_summed_entropy)
        labels = functional.pad(ids[:, 1:], (0, 1), value=-100).flatten()

        def compiled() -> tuple[Tensor, object]:
            return entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels), None

        return compiled
    install_loss_head(model, LossHead(variant), chunk_tokens=None)
    return lambda: (model(input_ids=ids, labels=ids), None)


def _summed_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def load(request: Mapping[str, Any], device: torch.device) -> Iterator[Answer]:
    """The most that was allocated while a rank built what its plan says; a CPU counts none of it."""
    from trainer.runtime.report_writer import ReportWriter, run_paths
    from trainer.runtime.session import build_session
    from trainer.runtime.state import RunState
    from trainer.spec import codec
    from trainer.spec.plan import Plan

    path = Path(request["plan"])
    paths = run_paths(path, started_at=datetime.now(UTC))
    session = build_session(codec.read(path, Plan), paths, ReportWriter(paths, rank=0), RunState())
    if device.type != "cuda":
        yield {"built": type(session.model).__name__, "reason": "a CPU's allocator counts nothing while a model loads"}
        return
    torch.cuda.synchronize(device)
    yield {
        "built": type(session.model).__name__,
        "peak": torch.cuda.max_memory_allocated(device),
        "held": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


KINDS: dict[str, Callable[[Mapping[str, Any], torch.device], Iterator[Answer]]] = {
    "context": context,
    "loss": loss,
    "load": load,
}

if __name__ == "__main__":
    sys.exit(main())
