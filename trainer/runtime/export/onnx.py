"""An ONNX graph of a model folder: input_ids and attention_mask, int64 [B, T], to logits [B, T, V].

Made by torch's exporter over torch.export (https://docs.pytorch.org/docs/stable/onnx_export.html), in one call of the
whole model without a cache of keys and values, so it scores and continues texts; weights are in model.onnx.data in the
same folder. Both axes are free. Experts are computed in one batched product, as a loop over the experts that tokens
were routed to is no graph.

The graph is run by onnxruntime and compared with the model it was made of, at another batch size and length than it was
traced with and with padding. Its kernels are not torch's: the tolerance is wider than of the same weights in torch.
"""

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.export.check import check_logits, prompt_ids
from shardwise.trainer.runtime.models.model_code import compute_buffers
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.packages import extra_line

GRAPH = "model.onnx"
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_TRACED = (2, 8)
_RUN = ((1, 24), (3, 11))
_PADDING = 4


class _Logits(nn.Module):
    """The model as a function of two tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        assert isinstance(logits, Tensor)
        return logits


def check_onnx_installed() -> None:
    """EnvironmentFaultError where a package is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFaultError(
            f"--format onnx: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed\n"
            f"{extra_line('onnx')}"
        )


def write_graph(folder: Path) -> str:
    """Writes model.onnx next to the safetensors it is made of, and compares; returns the result as a sentence.

    EnvironmentFaultError if the exporter has no translation for the model, or logits differ.
    """
    model = _load(folder)
    _export(model, folder / GRAPH)
    tolerance = TOLERANCES[model.dtype]
    measured = max(_difference(model, folder / GRAPH, batch, length, tolerance) for batch, length in _RUN)
    return f"run by onnxruntime: logits within {measured:.2g} of the model's ({tolerance:g} allowed)"


def _load(folder: Path) -> PreTrainedModel:
    """The folder's model, with experts and attention in a form that can be traced."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    options: dict[str, Any] = {"experts_implementation": "batched_mm"} if has_experts else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, trust_remote_code=False, **options
    )
    assert isinstance(model, PreTrainedModel)
    model.eval()
    compute_buffers(model, model.dtype, with_persistent=False)
    return model


def _export(model: PreTrainedModel, path: Path) -> None:
    ids = prompt_ids(model.config.get_text_config().vocab_size, batch=_TRACED[0], length=_TRACED[1])
    axes = {0: "batch", 1: "sequence"}
    try:
        with _quiet(), torch.no_grad():
            torch.onnx.export(
                _Logits(model).eval(),
                (ids, torch.ones_like(ids)),
                str(path),
                dynamo=True,
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
                dynamic_shapes={"input_ids": axes, "attention_mask": axes},
                external_data=True,
                verbose=False,
            )
    except (RuntimeError, ValueError, TypeError, NotImplementedError, torch.onnx.errors.OnnxExporterError) as error:
        first = next((line for line in str(error).splitlines() if "Error" in line), str(error).splitlines()[0])
        raise EnvironmentFaultError(
            f"--format onnx: torch.onnx cannot translate {type(model).__name__}: {first.strip()[:200]}"
        ) from error


def _difference(model: PreTrainedModel, path: Path, batch: int, length: int, tolerance: float) -> float:
    """Largest relative difference at the positions of tokens; all rows but the first begin with padding."""
    import onnxruntime

    ids = prompt_ids(model.config.get_text_config().vocab_size, batch=batch, length=length)
    mask = torch.ones_like(ids)
    mask[1:, :_PADDING] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    is_token = mask.bool()
    return check_logits(
        expected[is_token].float(),
        torch.from_numpy(found)[is_token].float(),
        tolerance=tolerance,
        what=f"{path.name}: run by onnxruntime on {batch} x {length} tokens",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses messages of torch and onnxscript for developers of exporters."""
    logger, unread = logging.getLogger("torch.onnx"), io.StringIO()
    level = logger.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
