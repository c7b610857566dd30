"""Every causal type of the installed transformers learns packed documents as alone, or packing is off with a reason."""

import os
import sys
from copy import deepcopy
from pathlib import Path
from subprocess import run

import pytest
import torch
from outcome_file import FINDING, Difference, record_differences
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from zoo import NOT_TRAINED, NUM_IDS, WINDOW, config_of, model_of, types

from shardwise.trainer.runtime.attention.packed import EAGER, SDPA
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.data.documents import measure_dependence
from shardwise.trainer.runtime.loop.step import forward
from shardwise.trainer.runtime.loss import LossOutput, install_loss_head
from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.worker_requests import TraceRequest
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelShape
from shardwise.trainer.spec.strategy import LossHead

LENGTHS = (37, 1, 43, 15)  # of the documents of a row: windows and chunks of the zoo are 16 tokens
WIDTH = sum(LENGTHS)
BOUNDS = (0, 37, 38, 81, 96, 133, 134, 177, 192)  # of two such rows
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
# Positions of its own, MLA, an index of keys, windows in some blocks, sinks and experts, chunks; layers with a state.
# Masks of their own, positions behind a padding token, logits of their own, blocks of keys.
THINNED = (
    "bart", "deepseek_v3", "deepseek_v32", "deepseek_v4", "exaone4", "gpt_oss", "lfm2", "llama4_text", "mamba",
    "minimax_m3_vl_text", "openai-gpt", "qwen2_moe", "roberta", "roformer", "xlm", "xlnet",
)  # fmt: skip
REST = [pytest.param(each, marks=pytest.mark.long) for each in types() if each not in THINNED]
# Types that are not packed: their layers have a state.
KEEP_STATE = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
LOSS_TOLERANCE = 1e-5  # relative
NOT_IN_FP64 = ("inkling2_text", "xglm", "xlnet")
ALL_HAVE_STATES = ("mamba", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "inkling_text", "zamba")


def described(name: str) -> ModelShape:
    return describe(DescriptionRequest(model_config=config_of(name).to_dict(), origin=name))


def rows(seed: int = 1) -> Tensor:
    return torch.randint(3, NUM_IDS, (2, WIDTH), generator=torch.Generator().manual_seed(seed))


def documents(values: Tensor) -> list[Tensor]:
    return [part for row in values.split(1) for part in row.split(LENGTHS, dim=1)]


ROPES: dict[str, dict[str, object]] = {
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": WINDOW},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": WINDOW},
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_that_follow_from_a_length_are_those_of_each_document(kind):
    """Documents are shorter and longer than 16 tokens, also in a row that is padded beside a longer one."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    longest = {"max_position_embeddings": WINDOW if kind == "dynamic" else 4 * WINDOW}
    config = LlamaConfig(**{**config_of("llama").to_dict(), **longest, "rope_parameters": rope})
    model = model_of("llama", dtype=torch.float64, attention=SDPA, config=config)
    alone = [deepcopy(model)(input_ids=ids, use_cache=False).logits for ids in documents(rows())]
    install_loss_head(model, LossHead.EAGER, chunk_tokens=None)
    with torch.no_grad():
        for logits, each in zip(documents(packed(model, LossOutput.LOGITS)), alone, strict=True):
            same(logits, each)
        ids = torch.cat([rows()[:1, 38:], functional.pad(rows()[:1, 81:], (0, 43))])
        micro_batch = MicroBatch(ids, ids, num_targets=0, row_lengths=(58, 15))
        padded = forward(model, micro_batch, torch.device("cpu"), output=LossOutput.LOGITS)
    same(padded[1:, :15], alone[3])


@pytest.mark.parametrize("name", ["llama4_text", "modernbert-decoder"])
def test_w65_transformers_finds_no_decoder(name):
    model = model_of(name)
    assert model.get_decoder() in (model, model.get_output_embeddings())
    assert described(name).loss_obstacle is None


def packed(model: PreTrainedModel, output: LossOutput) -> Tensor:
    labels = rows().masked_fill(POSITIONS == 0, -100)
    found = model(input_ids=rows(), labels=labels, position_ids=POSITIONS, document_bounds=BOUNDS, output=output)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.zoo
@pytest.mark.parametrize("name", [*THINNED, *REST])
def test_packed_documents_are_learned_as_alone_or_packing_is_off(name, record_property):
    """And rows that are padded beside longer ones have the logits of rows alone, for preferences and unpacked data."""
    shape, differences = described(name), []
    obstacles = {"no training": shape.loss_obstacle, "packing is off": shape.packing_obstacle}
    reasons = [f"{outcome}: {reason}" for outcome, reason in obstacles.items() if reason is not None]
    record_property(FINDING, ("; ".join(reasons) or "packed", name))
    assert (shape.loss_obstacle is None) == (name not in NOT_TRAINED)
    if shape.loss_obstacle is not None:
        return
    for attention in [each for each in (SDPA, EAGER) if each in shape.attentions]:
        # In fp64; where a product of experts does not know it, they are multiplied one by one.
        model = model_of(name, dtype=torch.float32 if name in NOT_IN_FP64 else torch.float64, attention=attention)
        if type(model)._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        alone = [model(input_ids=ids, use_cache=False).logits for ids in documents(rows())]
        padded = model(input_ids=functional.pad(rows()[:, : LENGTHS[0]], (0, 9)), use_cache=False).logits
        same(padded[:1, : LENGTHS[0]], alone[0])
        if shape.packing_obstacle is None:
            title = f"loss, {attention}, {model.dtype}"
            differences.append(Difference(title, LOSS_TOLERANCE, loss_as_alone(model, alone)))
    record_differences(record_property, differences)
    kinds = getattr(config_of(name), "layer_types", None) or ()
    assert shape.packing_obstacle is None or name in ALL_HAVE_STATES or not KEEP_STATE.isdisjoint(kinds)


def same(found: Tensor, expected: Tensor) -> None:
    """Within the roundings of what models compute in fp32 of fp64: routers, norms, frequencies."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=3e-6 * float(expected.detach().std()))


def loss_as_alone(model: PreTrainedModel, alone: list[Tensor]) -> float:
    """The relative difference of the loss, which with logits and gradients is that of the documents one by one.

    transformers computes those of documents.
    """
    losses = [
        functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        for logits, ids in zip(alone, documents(rows()), strict=True)
    ]
    total = torch.stack(losses).sum()
    total.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    install_loss_head(model, LossHead.EAGER, chunk_tokens=None)
    loss = packed(model, LossOutput.SUM)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=LOSS_TOLERANCE)
    with torch.no_grad():
        for logits, each in zip(documents(packed(model, LossOutput.LOGITS)), alone, strict=True):
            same(logits, each)
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for name, weight in model.named_parameters():
        if name in gradients:
            assert weight.grad is not None, name
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-6 * scale, msg=name)
    return float(abs(loss.detach() / total.detach() - 1))


KERNELS = Path(__file__).parents[1] / "factories" / "state_kernels"


@pytest.mark.parametrize(
    ("name", "has_kernels", "fact"),
    [
        ("lfm2", False, "its layers do not take the bounds of documents: `causal_conv1d_fn` can't keep packed"),
        ("lfm2", True, None),
        ("jamba", True, "what a document contains changes the losses of the next one in its row"),
        *(
            pytest.param(name, True, None, marks=[pytest.mark.long, pytest.mark.zoo])
            for name in ("bamba", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h", "qwen3_5_text", "zamba2")
        ),
    ],
)
def test_layers_with_a_state_are_packed_where_a_kernel_takes_bounds(name, has_kernels, fact, tmp_path):
    """By stand-ins of causal-conv1d, mamba-ssm and flash-linear-attention, in the worker of `plan`."""
    config = {key: value for key, value in config_of(name).to_dict().items() if key != "time_step_limit"}
    request = TraceRequest(description=DescriptionRequest(model_config=config, origin=name), modes=())
    codec.write(tmp_path / "request.json", request)
    path = os.pathsep.join([*([str(KERNELS)] if has_kernels else []), os.environ.get("PYTHONPATH", "")])
    worker = [sys.executable, "-m", "shardwise.trainer.simulation", "--trace", "request.json", "result.json"]
    run(worker, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
    shape = codec.read(tmp_path / "result.json", ModelShape)
    assert shape.loss_obstacle is None
    assert (shape.packing_obstacle or "").startswith(fact or "") and (shape.packing_obstacle is None) == (fact is None)


class Mixer(nn.Module):
    """Packed tokens have losses with a share of the first token of their row, in training or in evaluation alone.

    They are stretched besides, whatever is before them.
    """

    def __init__(self, *, leaks_in_training: bool = True, share: float = 0.0, stretch: float = 1.0) -> None:
        super().__init__()
        self.conv1d, self.leaks_in_training, self.share, self.stretch = nn.Identity(), leaks_in_training, share, stretch

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: object) -> Tensor:
        losses, is_packed = input_ids.double(), position_ids is not None
        leaks = is_packed and self.training is self.leaks_in_training
        return (losses + self.share * losses[:, :1] if leaks else losses) * (self.stretch if is_packed else 1.0)


def fault_of(model: nn.Module) -> str | None:
    found = measure_dependence(model, num_rows=1, seq_len=32, vocab_size=9, device=torch.device("cpu"))
    return found.fault(1e-3)


@pytest.mark.parametrize(("leaks_in_training", "share"), [(False, 0.5), (True, 0.5), (True, float("nan"))])
def test_mixers_are_measured_with_the_kernels_of_training_and_of_evaluation(leaks_in_training, share):
    fault = fault_of(Mixer(leaks_in_training=leaks_in_training, share=share))
    assert fault == "what a document contains changes the losses of the next one in its row"


def test_other_faults_of_rows_are_found():
    """Tokens that see later ones, and documents that have other losses in another place."""
    assert described("cpmant").loss_obstacle == "a token sees those after it"
    assert fault_of(Mixer(stretch=1.1)) == "a document has other losses behind another one than alone"
