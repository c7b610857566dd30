"""Measures whether a model learns a document of a packed row as if it stood alone.

The same document is scored three times: alone, after one document, and after another. Equal losses after both mean
that nothing of the first document reaches it; equal losses alone, that neither its place in the row nor the kernels of
packed rows matter. Documents are as long as a row allows, so that windows, chunks and convolutions have an effect.

Losses are compared in blocks of tokens, by the mean of their differences, in units of the standard deviation of the
document's losses. Rounding differs between kernels and between places in a row, and a token of a mixture that is next
to two experts may change to the other one: both change few losses much, or all of them little. What reaches a document
from another one changes the losses of at least one block by a tenth and more, also in a model with new weights.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loss import IGNORED, LossOutput
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

REMEDY = "give data.packing=false"
# Of the difference after two documents, whose rows have the same shapes: a few roundings. Measured on all types of
# transformers 5.23: at most 1e-6 in fp32 and 4e-3 in bf16 where documents are apart, 2e-2 to 0.9 where they are not.
FP32_TOLERANCE, KERNEL_TOLERANCE = 1e-4, 3e-3  # of plain fp32; of fp16, and of fp32 whose products may be TF32
_TOLERANCES = {Precision.FP32: KERNEL_TOLERANCE, Precision.FP16_MIXED: KERNEL_TOLERANCE, Precision.FP8: 1e-1}
_BF16_TOLERANCE = 2e-2
_ON_PLACE = 10  # times as much for the same document in another place, whose kernels differ
_FIRST_SHARE, _NUM_BLOCKS, _LEAST_BLOCK = 8, 8, 8  # the first document is an eighth of a row
_LEAST_ROW = 4  # tokens: below, no document has a target behind another one


class Dependence(NamedTuple):
    """By how much the losses of a document differ, in standard deviations of its losses."""

    on_others: float  # after one document, and after another
    on_place: float  # after another document, and alone

    def fault(self, tolerance: float) -> str | None:
        """A sentence on what makes documents differ; None where nothing does."""
        if self.on_others > tolerance:
            return "what a document contains changes the losses of the next one in its row"
        if self.on_place > _ON_PLACE * tolerance:
            return "a document has other losses behind another one than alone"
        return None


def measure_dependence(
    model: nn.Module, *, num_rows: int, seq_len: int, vocab_size: int, device: torch.device
) -> Dependence:
    """The largest dependence of a document of `num_rows` equal rows, by a model with a loss head, without dropout.

    The model stays as its last forward was. The errors of a model that accepts no documents are let through.
    """
    generator = torch.Generator().manual_seed(0)
    first = seq_len // _FIRST_SHARE or 1
    one, other, document = (
        torch.randint(vocab_size, (length,), generator=generator) for length in (first, first, seq_len - first)
    )
    positions = torch.cat([torch.arange(first), torch.arange(seq_len - first)])
    bounds = [place for row in range(num_rows) for place in (row * seq_len, row * seq_len + first)]
    packed = {
        "position_ids": positions.expand(num_rows, -1).to(device), "document_bounds": (*bounds, num_rows * seq_len)
    }  # fmt: skip

    def losses(parts: tuple[Tensor, ...], place: int, **inputs: object) -> Tensor:
        ids = torch.cat(parts).expand(num_rows, -1)
        labels = torch.full_like(ids, IGNORED)
        labels[:, place + 1 : place + len(document)] = document[1:]
        found: Tensor = model(input_ids=ids.to(device), labels=labels.to(device), output=LossOutput.TOKENS, **inputs)
        return found[:, place : place + len(document) - 1].cpu()

    on_others, on_place = 0.0, 0.0
    for _ in _forwards(model):
        alone = losses((document, one), 0, row_lengths=(len(document),) * num_rows)
        after_one, after_other = (losses((part, document), first, **packed) for part in (one, other))
        on_others = max(on_others, _difference(after_one, after_other, alone))
        on_place = max(on_place, _difference(after_one, alone, alone))
    return Dependence(on_others, on_place)


def _forwards(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation; then its mixers with a convolution to training, where Mamba 2 has another kernel."""
    model.eval()
    yield
    mixers = [module for module in model.modules() if isinstance(getattr(module, "conv1d", None), nn.Module)]
    for mixer in mixers:
        mixer.training = True  # itself: its parts have no dropout
    if mixers:
        yield


def _difference(one: Tensor, other: Tensor, alone: Tensor) -> float:
    """The largest mean difference of a block of tokens [B, T], or of the first ones, by the spread; 0 without one."""
    spread = float(alone.std(correction=0))
    if not spread > 0:
        return 0.0
    size = max(_LEAST_BLOCK, -(-one.shape[1] // _NUM_BLOCKS))
    differences = (one - other).abs().nan_to_num(nan=torch.inf)
    blocks = (*differences.split(size, dim=1), differences[:, :_LEAST_BLOCK])
    return max(float(block.mean()) for block in blocks) / spread


def check_documents_apart(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """InputError for a model, with its wrappers, in which packed documents are not learned as alone; collective."""
    chosen = plan.chosen
    if not plan.data.is_packed or chosen.seq_len < _LEAST_ROW:
        return
    name, was_training = plan.model_shape.model_type, model.training
    if plan.model_code is not None:
        name = f"the code of {plan.model_code.repository}"
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = measure_dependence(
                model,
                num_rows=chosen.micro_batch,
                seq_len=chosen.seq_len,
                vocab_size=plan.model_shape.vocab_size,
                device=device,
            )
    except (TypeError, ValueError) as error:
        raise InputError(f"data.packing: {name} does not take the bounds of documents ({error});\n{REMEDY}") from error
    finally:
        model.train(was_training)
        running_engine(model).release_gathered(model)
    fault = found.fault(_TOLERANCES.get(chosen.strategy.precision, _BF16_TOLERANCE))
    if fault is not None:
        raise InputError(f"data.packing: {name} does not keep packed documents apart: {fault};\n{REMEDY}")
