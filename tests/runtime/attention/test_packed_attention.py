"""Packed rows: each document as if it stood alone, on every attention path of a CPU; nothing is read of the device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from architecture_factory import TINY, VARIANTS
from hub_kernel_factory import KERNEL
from torch.nn import functional
from torch.nn.attention import varlen
from torch.profiler import ProfilerActivity, profile
from torch_flash_kernel.interface import flash_attn_varlen_func
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.falcon import modeling_falcon

from shardwise.trainer.runtime.attention import packed as packed_attention
from shardwise.trainer.runtime.attention.choice import attention_facts
from shardwise.trainer.runtime.attention.packed import FLASH
from shardwise.trainer.runtime.loss import IGNORED, install_loss_head
from shardwise.trainer.runtime.memory.recomputation import apply_checkpointing
from shardwise.trainer.spec.strategy import Checkpointing, LossHead

WIDTH = 48
LENGTHS = ((20, 1, 27), (3, 30, 15))  # of the documents in two rows; windows of the models are 16
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
PLACES = [
    (row, slice(sum(lengths[:number]), sum(lengths[: number + 1])))
    for row, lengths in enumerate(LENGTHS)
    for number in range(len(lengths))
]
BOUNDS = (*(row * WIDTH + places.start for row, places in PLACES), 2 * WIDTH)
CHANGED = [(0, slice(0, 20)), (1, slice(3, 33))]
UNCHANGED = [place for place in PLACES if place not in CHANGED]
WITHOUT_SDPA = ("gemma2", "mpt")
ALIBI = {"falcon rw"}
MODELS = {**TINY, **VARIANTS}
CASES = [
    (name, implementation)
    for name, config in MODELS.items()
    for implementation in ("sdpa", "eager")
    if name not in ALIBI and not (implementation == "sdpa" and config["model_type"] in WITHOUT_SDPA)
]


def build(name: str, implementation: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[name] | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    model.config.use_cache = False
    return model.eval()


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 200, (2, WIDTH), generator=torch.Generator().manual_seed(seed))


def with_others_changed() -> torch.Tensor:
    ids, other = rows(), rows(seed=2)
    for row, places in CHANGED:
        ids[row, places] = other[row, places]
    return ids


def unchanged(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values[row, places] for row, places in UNCHANGED])


def logits(model: PreTrainedModel, ids: torch.Tensor, position_ids: torch.Tensor | None = POSITIONS) -> torch.Tensor:
    inputs = {"input_ids": ids} if position_ids is None else packed_attention.packed_inputs(model, ids, position_ids)
    with packed_attention.known_rows(inputs.get("position_ids")):
        return model(**inputs).logits


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_a_document_is_what_it_is_alone(name, implementation):
    model = build(name, implementation)
    ids = rows()
    with torch.no_grad():
        together = logits(model, ids)
        for row, places in PLACES:
            alone = logits(model, ids[row : row + 1, places], None)[0]
            torch.testing.assert_close(together[row, places], alone, rtol=1e-5, atol=5e-6)


def test_bounds_that_are_lost_on_the_way_stop_the_run():
    """transformers finds documents in the positions, the attention function is told of none."""
    model = build("llama", "sdpa")
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, cu_seq_lens_q, position_ids, **kwargs: forward(*args, **kwargs)
    with pytest.raises(RuntimeError, match="LlamaAttention"):
        logits(model, rows())


RECOMPUTED = [
    ("mistral", Checkpointing.FULL), ("mistral", Checkpointing.ATTENTION), ("mistral", Checkpointing.SELECTIVE),
    ("gpt2", Checkpointing.ATTENTION), ("falcon", Checkpointing.SELECTIVE), ("stablelm", Checkpointing.FULL),
]  # fmt: skip


# transformers renamed the method that `activation_memory` calls, and still has the old name.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "checkpointing"), RECOMPUTED)
def test_recomputed_blocks_see_the_same_bounds(name, checkpointing):
    found = []
    for retained in (Checkpointing.NONE, checkpointing):
        model = build(name, "sdpa").train()
        apply_checkpointing(model, retained)
        install_loss_head(model, LossHead.CHUNKED, chunk_tokens=None)
        ids = rows()
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids.masked_fill(POSITIONS == 0, IGNORED), position_ids=POSITIONS).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_compiled_blocks_keep_documents_apart():
    """Compiled as far as tracing goes; the loop over documents is left out of it."""
    plain, compiled = (build("mistral", "sdpa", num_hidden_layers=1) for _ in range(2))
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    with torch.no_grad():
        for ids in (rows(), with_others_changed()):
            torch.testing.assert_close(logits(compiled, ids), logits(plain, ids), rtol=0, atol=1e-6)


def test_attention_dropout_runs_document_by_document_and_keeps_them_apart():
    model = build("llama", "sdpa", attention_dropout=0.3).train()
    found = []
    for ids in (rows(), with_others_changed()):
        torch.manual_seed(5)
        found.append(logits(model, ids).detach())
    torch.testing.assert_close(unchanged(found[1]), unchanged(found[0]), rtol=0, atol=1e-6)
    assert attention_facts(model) == {"documents": f"separated by {packed_attention.ONE_BY_ONE}"}


class Layer(torch.nn.Module):
    num_key_value_groups = 3
    is_causal = True


BOUND_ARGUMENTS: dict[str, Any] = {
    "cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32),
    "cu_seq_lens_k": np.array(BOUNDS),
}


def heads(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, WIDTH, 6, 24), (2, WIDTH, 2, 24), (2, WIDTH, 2, 24))
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return [each.to(device, dtype).transpose(1, 2).requires_grad_() for each in drawn]


DOCUMENTS = (POSITIONS == 0).cumsum(-1)
IS_SEEN = (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]).tril()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 27, 100])
@pytest.mark.parametrize("kernel", [packed_attention.ON_CPU, packed_attention.ONE_BY_ONE])
def test_each_way_is_attention_under_a_mask(monkeypatch, kernel, window, dtype):
    monkeypatch.setattr(packed_attention, "_kernel", lambda query, value, dropout: kernel)
    inputs, others = heads(dtype), heads(dtype)
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, **BOUND_ARGUMENTS}
    query, key, value = inputs
    out, _ = packed_attention.packed_sdpa(Layer(), query, key, value, None, **settings)
    is_seen = IS_SEEN if window is None else IS_SEEN.triu(1 - window)
    attend: Any = functional.scaled_dot_product_attention
    expected = attend(*others, attn_mask=is_seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (2e-2, 4e-2)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, inputs, weights), torch.autograd.grad(expected, others, weights)
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def test_a_mask_without_values_holds_the_window_or_the_chunk_of_a_block():
    """Chunks are those of Llama 4: a token sees its chunk of its document. Narrow values are padded for the kernel."""
    query, key, value = (x.detach() for x in heads())
    chunk, narrow = 6, value[..., :10]
    place = torch.arange(WIDTH)[:, None] - torch.arange(WIDTH)[None, :]
    chunks = POSITIONS // chunk
    is_near = {"window": place < chunk, "chunk": (chunks[:, :, None] == chunks[:, None, :])[:, None]}
    for rule, near in is_near.items():
        mask = packed_attention._Reach(**{rule: chunk}).as_mask("cpu")
        out, _ = packed_attention.packed_sdpa(Layer(), query, key, narrow, mask, sliding_window=2, **BOUND_ARGUMENTS)
        settings: dict[str, Any] = {"attn_mask": IS_SEEN & near, "enable_gqa": True}
        expected = functional.scaled_dot_product_attention(query, key, narrow, **settings).transpose(1, 2)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_kernel_for_cuda_is_handed_one_row_of_all_documents(monkeypatch):
    """Its arguments, by torch's own check of them and its shapes on a device that computes nothing."""
    seen: dict[str, Any] = {}

    def note(*args, **kwargs):
        seen.update(kwargs, shapes=[x.shape for x in args[:3]], longest=args[5:7])
        return real(*args, **kwargs)

    real = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", note)
    query, key, value = heads(torch.bfloat16, "meta")
    bounds = torch.empty(7, dtype=torch.int32, device="meta")
    out = packed_attention._by_bounds(query, key, value, bounds, 16, 0.3)
    assert seen["shapes"] == [(96, 6, 24), (96, 2, 24), (96, 2, 24)]
    assert (seen["window_size"], seen["enable_gqa"], seen["scale"]) == ((15, 0), True, 0.3)
    assert seen["longest"] == (WIDTH, WIDTH)
    assert out.shape == (2, WIDTH, 6, 24)
    packed_attention._by_bounds(query, key, value, bounds, None, 0.3)
    assert seen["window_size"] == (-1, 0)


def test_w31_stablelm_drops_arguments_next_to_positions():
    """A canary: where StableLM hands its keyword arguments on, `_LOSES_BOUNDS` and `_bounds_of` are not needed."""
    model = build("stablelm", "sdpa")
    seen: dict[str, Any] = {}
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    logits(model, rows())
    assert "position_ids" in seen
    assert "cu_seq_lens_q" not in seen


READS = "aten::is_nonzero"  # a tensor as a condition of Python: on a GPU, a wait


def forward(model: PreTrainedModel, around: AbstractContextManager[None], **inputs: Any) -> tuple[Any, int]:
    with around, profile(activities=[ProfilerActivity.CPU]) as profiler:
        logits = model(**inputs).logits
    return logits, sum(each.count for each in profiler.key_averages() if each.key == READS)


@pytest.mark.parametrize(
    ("name", "implementation", "is_packed"),
    [("llama", "sdpa", False), ("mistral", "sdpa", False), ("mistral", "sdpa", True), ("mistral", "eager", True)],
)
def test_w57_transformers_reads_from_the_device_whether_rows_are_packed_and_we_do_not(name, implementation, is_packed):
    model, inputs, ours = build(name, implementation), {}, {"input_ids": rows()}
    if is_packed:
        inputs, ours = {"position_ids": POSITIONS}, packed_attention.packed_inputs(model, rows(), POSITIONS, BOUNDS)
    plain, reads_before = forward(model, nullcontext(), input_ids=rows(), **inputs)
    spared, reads = forward(model, packed_attention.known_rows(ours.get("position_ids")), **ours)
    assert (reads_before > 0, reads) == (True, 0)
    torch.testing.assert_close(plain, spared, rtol=0, atol=0 if implementation == "eager" or not is_packed else 1e-6)


def test_masks_and_the_look_are_back_afterwards_whatever_happened_meanwhile():
    before = masking_utils.find_packed_sequence_indices, AttentionMaskInterface._global_mapping
    with pytest.raises(ValueError, match="in the forward"), packed_attention.known_rows(POSITIONS):
        raise ValueError("in the forward")
    assert (masking_utils.find_packed_sequence_indices, AttentionMaskInterface._global_mapping) == before


UNDER_FLASH = [name for name in TINY if name != "mpt"]


@pytest.fixture
def flash_attn(request, monkeypatch) -> str:
    """The name by which transformers has flash-attn's functions loaded, as on a machine that could run them.

    There is no function for rows of one document: those of several must come with their bounds.
    """
    name: str = request.param
    library = modeling_flash_attention_utils
    prepare = library._lazy_define_process_function(flash_attn_varlen_func)
    loaded = {"_flash_fn": None, "_flash_varlen_fn": flash_attn_varlen_func}
    loaded |= {"_process_flash_kwargs_fn": prepare, "_process_with_kvcache_kwargs_fn": prepare}
    for attribute, value in {**loaded, "_loaded_implementation": name}.items():
        monkeypatch.setattr(library, attribute, value)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, **_: name)
    monkeypatch.setattr(modeling_falcon, "_flash_attention_forward", library._flash_attention_forward, raising=False)
    AttentionInterface.register(KERNEL, flash_attention_forward)  # as transformers does when it loads a kernel
    AttentionMaskInterface.register(KERNEL, flash_attention_mask)
    return name


def token_losses(model: PreTrainedModel, ids: torch.Tensor, places: list[tuple[int, slice]]) -> torch.Tensor:
    labels = torch.full_like(ids, IGNORED)
    for row, part in places:
        labels[row, part] = ids[row, part]
    labels[POSITIONS == 0] = IGNORED
    return model(input_ids=ids, labels=labels, position_ids=POSITIONS)


# The two names lead to one function of transformers: one of them is tried with every model type.
@pytest.mark.parametrize(
    ("flash_attn", "name"), [*((FLASH, name) for name in UNDER_FLASH), (KERNEL, "mistral")], indirect=["flash_attn"]
)
def test_flash_attn_is_told_the_documents_of_every_row(flash_attn, name):
    """Whatever the model hands on: another document changes no loss, and its own loss is that of eager attention."""
    ids, other = rows(), with_others_changed()
    # transformers looks for a Linear to tell the type that fp32 is cast to, and GPT-2 has none in its attention.
    dtype: Any = torch.float64 if name == "gpt2" else torch.float32
    model = build(name, flash_attn).to(dtype)
    install_loss_head(model, LossHead.EAGER, chunk_tokens=None)
    with torch.no_grad():
        before, after = (token_losses(model, tokens, UNCHANGED) for tokens in (ids, other))
        assert not torch.equal(token_losses(model, ids, CHANGED), token_losses(model, other, CHANGED))
    assert torch.equal(before, after)
    eager = build(name, "eager").to(dtype)
    install_loss_head(eager, LossHead.EAGER, chunk_tokens=None)
    with torch.no_grad():
        torch.testing.assert_close(before, token_losses(eager, ids, UNCHANGED), rtol=1e-5, atol=0)


@pytest.mark.parametrize("flash_attn", [FLASH], indirect=True)
def test_w32_qwen2_moe_does_not_hand_its_window_to_flash_attn(flash_attn, monkeypatch):
    """A canary: where flash-attn gets the windows, `check_attention` need not refuse them."""
    windows: list[int | None] = []
    model = build("qwen2_moe with windows", flash_attn)

    def note(q, k, v, window_size=None, **_):
        windows.append(window_size)
        return q

    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_fn", note)
    with torch.no_grad():
        model(input_ids=rows()[:1])
    assert len(windows) == 3
    assert set(windows) == {None}
