"""Loads an exported folder as its user will and compares logits with the model; writes and compares an ONNX graph.

Folders are loaded by plain transformers and PEFT.

Both sides compute in fp32 with weights of any type: each module's 16-bit weights are widened while it runs and no
longer. So the same weights give the same logits to 1e-5, and a comparison needs the memory of the weights and in
addition of one module in fp32. The models are never in memory together: the caller has freed its own.

    relative difference = max |a - b| / max |a|,  over the logits of PROMPT_TOKENS fixed tokens

Where weights were rounded to 16 bit on the way (merged, or written in another type) a second tolerance is for that
rounding: eps of the type is 2^-8 (bf16) and 2^-11 (fp16), and the layers add it up.

An ONNX graph of a model folder maps input_ids and attention_mask, int64 [B, T], to logits [B, T, V].

It is made by torch's exporter over torch.export (https://docs.pytorch.org/docs/stable/onnx_export.html), in one call of
the whole model without a cache of keys and values, so it scores and continues texts; weights are in model.onnx.data in
the same folder. Both axes are free. Experts are computed in one batched product, as a loop over the experts that tokens
were routed to is no graph.

The graph is run by onnxruntime and compared with the model it was made of, at another batch size and length than it was
traced with and with padding. Its kernels are not torch's: the tolerance is wider than of the same weights in torch.
"""

import contextlib
import gc
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from shardwise.trainer.runtime.models.build import build_base
from shardwise.trainer.runtime.models.methods import base_type, quantised_layers
from shardwise.trainer.runtime.models.model_code import compute_buffers
from shardwise.trainer.runtime.models.outer import outer_of
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.model.stored import Treatment, weight_format
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

PROMPT_TOKENS = 24
SAME = 1e-5
ROUNDED = {torch.float32: SAME, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_STRIDE = 7919  # a prime: the prompt's ids are spread over any vocabulary


def prompt_ids(vocab_size: int, *, batch: int = 1, length: int = PROMPT_TOKENS) -> Tensor:
    """Fixed ids [batch, length] from all over a vocabulary."""
    return (torch.arange(batch * length).reshape(batch, length) * _STRIDE + 1) % vocab_size


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [B, T, V] of a model on the CPU, computed in fp32 with the weights it has."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), computed_in_fp32(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    model.train(was_training)
    assert isinstance(logits, Tensor)
    return logits.float()


def reloaded_logits(folder: Path, ids: Tensor, *, trust_remote_code: bool = False) -> Tensor:
    """Logits of a folder of whole weights."""
    return _logits_at_last(_from_folder(folder, trust_remote_code=trust_remote_code), ids)


def reloaded_adapter_logits(folder: Path, plan: Plan, ids: Tensor) -> Tensor:
    """Logits of a PEFT folder on the base of a plan, which is loaded as the plan's method holds it.

    A base with other parts than text is loaded with all of them. Code of the base is the code that the run's plan
    names, already registered. A base that is stored in FP8 or MXFP4 is decoded as for training.
    """
    from peft import PeftModel  # takes seconds

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # read by PEFT
        loaded = _base(plan)
        compute_buffers(loaded, loaded.dtype, with_persistent=False)
        model = PeftModel.from_pretrained(loaded, str(folder))
    del loaded
    return _logits_at_last(model, ids)


def _base(plan: Plan) -> PreTrainedModel:
    assert plan.model_path is not None
    folder, outer, chosen = Path(plan.model_path), outer_of(plan, ()), plan.chosen
    weights = weight_format(json.loads((folder / "config.json").read_bytes()))
    if outer is None and weights is not None and weights.treatment is Treatment.DECODED:
        return build_base(plan)
    dtype = base_type(chosen.method, chosen.strategy.precision)
    settings: dict[str, Any] = {"dtype": dtype}
    if chosen.method is Method.QLORA and weights is None:
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model_class = AutoModelForCausalLM if outer is None else outer.model_class
    return _from_folder(folder, trust_remote_code=False, model_class=model_class, **settings)


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """`max |expected - found| / max |expected|`; infinite where the shapes differ."""
    if expected.shape != found.shape:
        return float("inf")
    return float((expected - found).abs().max() / expected.abs().max())


def check_logits(expected: Tensor, found: Tensor, *, tolerance: float, what: str) -> float:
    """The relative difference; EnvironmentFaultError where it is beyond the tolerance, or no number."""
    measured = relative_difference(expected, found)
    if not measured <= tolerance:  # a NaN is not
        raise EnvironmentFaultError(
            f"{what}: logits differ by {measured:.2g} of the largest; {tolerance:g} is allowed; nothing was exported"
        )
    return measured


@contextmanager
def computed_in_fp32(model: nn.Module) -> Iterator[None]:
    """Modules of the model see their own 16-bit parameters in fp32 while they run; 4-bit layers compute in fp32.

    Adapters, which PEFT reads from outside of their modules, are fp32 all the while.
    """
    layers = quantised_layers(model)
    before = [
        (each, each.compute_dtype, each.weight.quant_state.dtype, each.support_avx512bf16_for_cpu) for each in layers
    ]
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_" in name and _is_narrow(parameter)]
    narrow = [(parameter, parameter.data) for parameter in adapters]
    handles = []
    try:
        for layer in layers:
            layer.compute_dtype = layer.weight.quant_state.dtype = torch.float32  # also of what DoRA reads
            layer.support_avx512bf16_for_cpu = False  # else the CPU's kernel is of bf16
        for parameter, held in narrow:
            parameter.data = held.float()
        for module in model.modules():
            read, seam = [*module.parameters(recurse=False)], cast(Any, module)
            if hasattr(module, "parameter_name"):
                read.append(seam.get_param())  # PEFT's wrapper around experts casts adapters to what it finds there
            own = [parameter for parameter in read if _is_narrow(parameter)]
            if own:
                widen, restore = _widening(own)
                handles += [
                    module.register_forward_pre_hook(widen),
                    module.register_forward_hook(restore, always_call=True),
                ]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, held in narrow:
            parameter.data = held
        for layer, compute_dtype, decoded_dtype, uses_avx512 in before:
            layer.compute_dtype, layer.weight.quant_state.dtype = compute_dtype, decoded_dtype
            layer.support_avx512bf16_for_cpu = uses_avx512


def _widening(parameters: list[nn.Parameter]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two hooks: one makes the parameters fp32, the other gives them back what they held."""
    held: list[Tensor] = []

    def widen(*_: object) -> None:
        held.extend(parameter.data for parameter in parameters)
        for parameter in parameters:
            parameter.data = parameter.data.float()

    def restore(*_: object) -> None:
        for parameter, values in zip(parameters, held, strict=True):
            parameter.data = values
        held.clear()

    return widen, restore


def _is_narrow(parameter: nn.Parameter) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16) and not hasattr(parameter, "quant_state")


def _from_folder(
    folder: Path,
    *,
    trust_remote_code: bool,
    model_class: Any = AutoModelForCausalLM,  # noqa: ANN401  # of transformers
    **settings: Any,  # noqa: ANN401  # transformers'
) -> PreTrainedModel:
    options = {"dtype": "auto", **settings}
    loaded: Any = model_class.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=trust_remote_code, **options
    )
    assert isinstance(loaded, PreTrainedModel)
    return loaded


def _logits_at_last(model: nn.Module, ids: Tensor) -> Tensor:
    logits = logits_of(model, ids)
    del model
    gc.collect()
    return logits


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
