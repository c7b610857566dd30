"""Attention over packed rows: a token sees the tokens before it in its own document, and nothing else of its row.

Documents are distinguished by their positions, which start at 0 in each. They are separated in these ways:

    sdpa     one kernel call for all documents of a micro batch, or one for each, without a mask: the function is ours,
             which is transformers' own for all other rows
        CUDA, 16 bit, head dimension a multiple of 8 up to 256    torch's `varlen_attn`, a FlashAttention kernel
        CPU                                                       the kernel behind PyTorch's attention, a document at
                                                                  a time
        else, or with attention dropout                           PyTorch's attention, a document at a time, with
                                                                  grouped heads repeated if its kernel has none
    flash    flash-attn's function for rows of variable length, its own or the hub's: transformers calls it when it is
             given the bounds
    eager    a mask of row x row for each row of a micro batch, where transformers makes one for all rows

Masks. Most models let transformers make their masks, many of them without the positions. `known_rows` replaces its
functions for the forward of a decoder: each rule (causal, window, chunk, a model's own) then holds within a document.
For sdpa the mask is an empty tensor whose shape holds the window or the chunk (`_Reach`): which blocks have a window is
known to the model alone, and a module's `sliding_window` does not state it. Falcon and OPT, whose attention accepts a
mask and no other argument, and models that compute with masks (an index that selects keys) get real ones. Falcon and
StableLM under flash-attn get their rows as one, the only form in which they pass positions on.

Models that make masks of their own (OpenAI GPT, XLM, XLNet) are given that of the documents (`own_masks`).

Positions that start anew are all that learned and rotated ones need; a decoder that counts them itself is given them
(`own_positions`), and one that counts from behind the padding token those that it would count (`counted_positions`).
ALiBi adds to a score what depends on the distance alone, up to a constant for each query: it needs
nothing, but Falcon rounds that constant to bf16.

Layers with a state (convolutions, state spaces, linear attention) need a kernel that accepts the bounds: `seq_idx` of
causal-conv1d and mamba-ssm, `cu_seqlens` of flash-linear-attention, which has one row alone. transformers raises an
error where a package is missing, and drops bounds that a kernel does not take: data/documents.py measures the result.

Memory: the first two kernels keep query, key, value, output and a log-sum-exp a head, as for a row of one document.
Elsewhere each document keeps its own output, and the row one more. A window longer than every document costs nothing;
a shorter one is the kernel's own on CUDA, else a mask of document x document while it runs. Values that are narrower
than queries (MLA) are padded to their size.

The bounds go from the model's forward to each attention function as keyword arguments with transformers' names, so
that recomputation and engines pass them on; a model that loses them on the way stops the run.

Without a mask, transformers looks for packed rows in the positions in every forward (`find_packed_sequence_indices`),
and Python reads the result: the host waits for the device, in each micro batch and for each kind of mask. `known_rows`
uses the data instead: a micro batch without positions of its own holds one document a row (W57).
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from shardwise.trainer.runtime.attention import computing_type, kernel_for, supports_grouped_heads
from shardwise.trainer.runtime.attention.key_blocks import pool_by_document
from shardwise.trainer.spec.strategy import AttentionKernel

SDPA, EAGER, FLASH = "sdpa", "eager", "flash_attention_2"
_NEEDS_MASK = ("falcon", "opt")  # model types whose own attention takes a mask and no other argument
_LOSES_BOUNDS = ("falcon", "stablelm")  # whose attention is handed positions, and no other keyword arguments (W31)
_NAMES_BOUNDS = ("bailing_hybrid", "kimi_linear")  # whose kernel (KDA) is handed bounds under the name that it has
_WITH_STATE = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})  # kinds of blocks


@contextmanager
def known_rows(position_ids: Tensor | None) -> Iterator[None]:
    """Within the block, masks are those of these packed rows [B, S]; None: each row is one document.

    Whether rows are packed is not read from the device (W57).
    """
    names: Any = AttentionMaskInterface
    look, masks = masking_utils.find_packed_sequence_indices, names._global_mapping
    masking_utils.find_packed_sequence_indices = _none_is_packed
    if position_ids is not None:
        by_masks = {name: partial(_masked, masks[name], position_ids) for name in (SDPA, EAGER)}
        names._global_mapping = {**masks, **by_masks, SDPA: partial(_unmasked, by_masks[SDPA])}
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look
        names._global_mapping = masks


@contextmanager
def own_positions(decoder: nn.Module, position_ids: Tensor | None) -> Iterator[None]:
    """A decoder that counts positions itself (BART and its kin) is given those of packed rows [B, S] in the block."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    if position_ids is not None and not _accepts_positions(decoder):
        tables = [each for each in decoder.modules() if isinstance(each, nn.Embedding) and _accepts_positions(each)]
        forwards = {table: partial(_looked_up, table, position_ids) for table in tables}
    with replaced_forwards(forwards):
        yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, each of these modules has that forward in place of its own."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        seam: Any = module
        seam.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            del module.forward
            if own is not None:
                seam = module
                seam.forward = own


def _looked_up(table: nn.Embedding, positions: Tensor, /, *_: object, **__: object) -> "Tensor | _OfRows":
    found = functional.embedding(positions + getattr(table, "offset", 0), table.weight)
    return _OfRows(found[:, None]) if type(table).__name__ in _OF_ALL_ROWS else found


_OF_ALL_ROWS = ("RoFormerSinusoidalPositionalEmbedding",)  # tables that return [S, D], which the caller expands


class _OfRows(NamedTuple):
    """A tensor for each row, where a model expects one for all rows and adds two dimensions by an index."""

    found: Tensor

    def __getitem__(self, _: object) -> Tensor:  # type: ignore[override]  # any index
        return self.found


def counted_positions(decoder: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Positions [B, S] for embeddings that count their tokens themselves (RoBERTa), from behind the padding token.

    The padding token is not counted, and has the position of its number.
    """
    counts = "create_position_ids_from_input_ids"
    tables: list[Any] = [each for each in decoder.modules() if hasattr(each, counts) and _accepts_positions(each)]
    if not tables:
        return position_ids
    is_counted = input_ids.ne(tables[0].padding_idx).long()
    count = is_counted.cumsum(-1)
    before = (count - is_counted).masked_fill(position_ids != 0, 0).cummax(-1).values  # of the document
    return (count - before) * is_counted + int(tables[0].padding_idx)


@contextmanager
def own_masks(decoder: Any, position_ids: Tensor | None) -> Iterator[dict[str, Any]]:  # noqa: ANN401  # transformers' classes
    """Separates the documents of packed rows [B, S] in a decoder that makes its mask itself, within the block.

    Yields inputs of the decoder.
    """
    model_type = decoder.config.model_type
    if position_ids is None or model_type not in ("openai-gpt", "xlm", "xlnet"):
        yield {}
        return
    document = (position_ids == 0).cumsum(-1)
    is_same = document[:, :, None] == document[:, None, :]
    if model_type == "openai-gpt":
        yield {"attention_mask": _Expanded(is_same[:, None])}
        return
    owner, name = (
        (sys.modules[type(decoder).__module__], "get_masks") if model_type == "xlm" else (decoder, "create_mask")
    )
    make = getattr(owner, name)

    def of_xlm(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401  # XLM's
        rows, is_seen = make(*args, **named)
        return rows, is_seen & is_same

    def of_xlnet(*lengths: int) -> _OfRows:  # 1 where a key is not seen: [S, S], or [S, S, B, 1] for the rows
        return _OfRows(make(*lengths)[:, :, None, None] + (~is_same).permute(1, 2, 0)[..., None])

    setattr(owner, name, of_xlm if model_type == "xlm" else of_xlnet)
    try:
        yield {"lengths": torch.full_like(document[:, 0], document.shape[1])} if model_type == "xlm" else {}
    finally:
        if owner is decoder:
            delattr(owner, name)
        else:
            setattr(owner, name, make)


class _Expanded(NamedTuple):
    """A mask [B, 1, S, S] where a model expects [B, S] and adds two dimensions."""

    mask: Tensor

    def unsqueeze(self, dim: int) -> "Tensor | _Expanded":
        """The mask in the place of the second dimension that is added."""
        return self.mask if dim == 2 else self


def _accepts_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def _none_is_packed(position_ids: Tensor) -> Tensor | None:
    del position_ids
    return None


def _masked(
    mask: Callable[..., Tensor],
    position_ids: Tensor,
    *,
    mask_function: Callable[..., Tensor],
    **settings: Any,  # noqa: ANN401  # transformers' settings
) -> Tensor:
    """transformers' mask for rows of several documents: its rule within each document, and nothing else."""
    if settings["q_length"] != settings["kv_length"]:  # of another sequence
        return mask(mask_function=mask_function, **settings)
    document = (position_ids == 0).cumsum(-1)

    def within(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = mask_function(row, head, position_ids[row, query], position_ids[row, key])
        return is_seen & (document[row, query] == document[row, key])

    settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return mask(mask_function=within, **settings)


def _unmasked(
    masked: Callable[..., Tensor],
    *,
    kv_length: int,
    config: Any,  # noqa: ANN401  # of transformers, one class for each model
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **settings: Any,  # noqa: ANN401  # transformers' settings
) -> Tensor:
    """An empty tensor in place of a causal mask, whose shape holds what the mask would add: see `_Reach`.

    A mask where the model computes with one, or has a rule of its own.
    """
    if not allow_is_causal_skip or config.model_type in _NEEDS_MASK:
        return masked(kv_length=kv_length, config=config, local_size=local_size, **settings)
    is_chunked = local_size == getattr(config, "attention_chunk_size", None)
    return _Reach(chunk=local_size if is_chunked else None, window=None if is_chunked else local_size).as_mask(
        settings.get("device")
    )


class _Reach(NamedTuple):
    """How far back a token sees in its document: its last `window` tokens, or the `chunk` of the document it is in."""

    window: int | None = None
    chunk: int | None = None

    def as_mask(self, device: Any) -> Tensor:  # noqa: ANN401  # torch's or a name
        return torch.empty((1 + (self.chunk or 0), 1 + (self.window or 0), 0, 0), dtype=torch.bool, device=device)

    @classmethod
    def of(cls, mask: Tensor) -> "_Reach":
        chunk, window = mask.shape[:2]
        return cls(window=window - 1 or None, chunk=chunk - 1 or None)


def grouped_heads(kernel: Callable[..., Any]) -> dict[str, Any]:
    """Argument of `varlen_attn` for grouped heads: torch 2.11 accepts them without, later versions only with it."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


_GROUPED_HEADS = grouped_heads(varlen.varlen_attn)


def packed_inputs(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, bounds: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Inputs of the decoder for packed rows [B, S], such that no token sees another document.

    The decoder runs within `known_rows` of the positions among them. Without `bounds`, known from the data, the host
    waits for the device to find them in the positions. Where the decoder is called with one row, [1, B x S], its hidden
    states are one row too.
    """
    AttentionInterface.register(SDPA, packed_sdpa)  # which is transformers' own without bounds
    pool_by_document(model)
    is_flash = is_flash_attention_requested(model.config)  # by whichever name
    keeps_state = not _WITH_STATE.isdisjoint(getattr(model.config, "layer_types", None) or ())
    if keeps_state or (is_flash and model.config.model_type in _LOSES_BOUNDS):
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
    if is_flash and model.config.model_type in _LOSES_BOUNDS:
        return inputs
    if keeps_state or is_flash or model.config._attn_implementation == SDPA:
        bounds, longest = bounds or document_bounds(position_ids), position_ids.shape[1]
        there = torch.tensor(bounds, dtype=torch.int32).to(position_ids.device, non_blocking=True)
        inputs |= {"cu_seq_lens_q": there, "cu_seq_lens_k": there if is_flash else np.asarray(bounds)}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    if keeps_state:
        inputs["seq_idx"] = (position_ids == 0).cumsum(-1, dtype=torch.int32) - 1
    if model.config.model_type in _NAMES_BOUNDS:
        inputs["cu_seqlens"] = inputs["cu_seq_lens_q"]
    return inputs


def document_bounds(position_ids: Tensor) -> tuple[int, ...]:
    """Starts of the documents in the concatenated rows [B, S], and the end."""
    starts = (position_ids.flatten().cpu() == 0).nonzero().squeeze(-1)
    return *starts.tolist(), position_ids.numel()


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: NDArray[np.int64] | None = None,
    **settings: Any,  # noqa: ANN401  # what else a model hands to its attention
) -> tuple[Tensor, None]:
    """transformers' attention function for query [B, H, S, D] and key and value [B, K, S, D]: the output [B, S, H, D].

    The bounds of documents come twice: on the device for its kernel, in host memory for a loop. Without them it is
    transformers' own function.
    """
    bounds, on_host = cu_seq_lens_q, cu_seq_lens_k
    is_plain = attention_mask is None or not attention_mask.numel()
    if bounds is None and attention_mask is not None and is_plain:
        on_host = _bounds_of(module, settings.get("position_ids"))
        bounds = torch.tensor(on_host, dtype=torch.int32, device=query.device)
    if bounds is None or on_host is None or not is_plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **settings
        )
    reach = _Reach(window=sliding_window) if attention_mask is None else _Reach.of(attention_mask)
    if settings.get("position_bias") is not None:
        mask = _row_mask(on_host, query, reach)
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **settings)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(computing_type(x)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if reach.chunk is not None:
        on_host = _in_chunks(on_host, reach.chunk)
        bounds = torch.tensor(on_host, dtype=torch.int32, device=query.device)
    kernel = _kernel(query, value, dropout)
    module.document_kernel = kernel  # type: ignore[assignment]  # what ran, for the report
    if kernel == ONE_BY_ONE:
        return _one_by_one(query, key, value, on_host, reach.window, scale, dropout), None
    size = value.shape[-1]
    if size != query.shape[-1]:  # both kernels know one size of heads; zeros make zeros
        value = functional.pad(value, (0, query.shape[-1] - size))
    if kernel == VARLEN:
        return _by_bounds(query, key, value, bounds, reach.window, scale)[..., :size], None
    return documents_on_cpu(query, key, value, on_host, reach.window, scale)[..., :size], None


def _bounds_of(module: nn.Module, position_ids: Tensor | None) -> NDArray[np.int64]:
    """The bounds of the documents from their positions, which StableLM hands on where it loses the bounds (W31)."""
    if position_ids is None:
        raise RuntimeError(f"{type(module).__name__} was not handed the bounds of its documents")
    return np.asarray(document_bounds(position_ids))


VARLEN, ON_CPU, ONE_BY_ONE = "varlen_attn", "PyTorch's CPU kernel by document", "PyTorch's attention by document"


def document_kernels(model: nn.Module) -> tuple[str, ...]:
    """Kernels that separated documents in the model's blocks so far; () if no bounds have come."""
    found = {getattr(module, "document_kernel", None) for module in model.modules()}
    return tuple(sorted(kernel for kernel in found if kernel is not None))


def _kernel(query: Tensor, value: Tensor, dropout: float) -> str:
    if dropout or value.shape[-1] > query.shape[-1]:
        return ONE_BY_ONE
    if query.device.type == "cpu":
        return ON_CPU
    is_taken = query.device.type == "cuda" and kernel_for(query) is AttentionKernel.FLASH
    return VARLEN if is_taken and query.shape[-1] % 8 == 0 else ONE_BY_ONE


def _in_chunks(bounds: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """The bounds of documents that are cut into chunks: nothing is seen of another chunk."""
    return np.asarray([*(place for start, end in pairwise(bounds) for place in range(start, end, chunk)), bounds[-1]])


def _row_mask(bounds: NDArray[np.int64], query: Tensor, reach: _Reach) -> Tensor:
    """[B, 1, S, S]: True where a query [B, H, S, D] sees a key."""
    batch, _, width, _ = query.shape
    bounds = bounds if reach.chunk is None else _in_chunks(bounds, reach.chunk)
    numbers = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)).reshape(batch, 1, width)
    document = torch.from_numpy(numbers).to(query.device)
    is_seen = (document[..., :, None] == document[..., None, :]).tril()
    return is_seen if reach.window is None else is_seen.triu(1 - reach.window)


def _by_bounds(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int | None, scale: float) -> Tensor:
    batch, heads, width, _ = query.shape
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = varlen.varlen_attn(
        queries,
        keys,
        values,
        bounds,
        bounds,
        width,
        width,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **(_GROUPED_HEADS if key.shape[1] != heads else {}),
    )
    assert isinstance(out, Tensor)
    return out.view(batch, width, heads, -1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop follows the data
def documents_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, bounds: NDArray[np.int64], window: int | None, scale: float
) -> Tensor:
    """Attention [B, H, S, D] of each document by the kernel that PyTorch has for a row on a CPU."""
    out = _DocumentAttention.apply(query, key, value, tuple(bounds.tolist()), window, scale)  # type: ignore[no-untyped-call]  # torch's
    assert isinstance(out, Tensor)
    return out


class _Document(NamedTuple):
    """Tokens `places` of row `row`."""

    row: int
    places: slice
    mask: Tensor | None

    def of(self, heads: Tensor) -> Tensor:
        """This document [1, H, L, D] of all rows [B, H, S, D], a view."""
        return heads[self.row : self.row + 1, :, self.places]


class _DocumentAttention(torch.autograd.Function):
    """Causal attention of each document by the kernel that PyTorch has for a row on a CPU; heads may be grouped.

    A function of its own for what it keeps: the inputs, the output and its log-sum-exp, all of them once.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: tuple[int, ...],
        window: int | None,
        scale: float,
    ) -> Tensor:
        batch, heads, width, size = query.shape
        out = query.new_empty(batch, width, heads, size)
        log_sums = query.new_empty(batch, width, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        for document in _documents(bounds, width, window, query.dtype):
            inputs = (document.of(x) for x in (query, key, value))
            outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, document.mask is None, attn_mask=document.mask, scale=scale
            )
            for total, part in zip((out, log_sums), outputs, strict=True):
                document.of(total.transpose(1, 2)).copy_(part)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.bounds, ctx.window, ctx.scale = bounds, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        query, key, value, out, log_sums = ctx.saved_tensors
        by_head = [x.transpose(1, 2) for x in (*grad_outputs, out, log_sums)]
        grads = [torch.empty_like(x) for x in (query, key, value)]
        for document in _documents(ctx.bounds, query.shape[2], ctx.window, query.dtype):
            grad_out, *others = (document.of(x) for x in (by_head[0], query, key, value, *by_head[1:]))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, *others, 0.0, document.mask is None, attn_mask=document.mask, scale=ctx.scale
            )
            for total, part in zip(grads, parts, strict=True):
                document.of(total).copy_(part)
        return (*grads, None, None, None)


def _documents(bounds: tuple[int, ...], width: int, window: int | None, dtype: torch.dtype) -> Iterator[_Document]:
    for start, end in pairwise(bounds):
        row, place = divmod(start, width)
        mask = _window_mask(end - start, window, torch.device("cpu"))
        yield _Document(row, slice(place, place + end - start), mask if mask is None else _additive(mask, dtype))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop follows the data
def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: NDArray[np.int64],
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    lengths, num_groups = np.diff(bounds).tolist(), query.shape[1] // key.shape[1]
    rows = [x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (query, key, value)]  # each [L, H, D]
    masks = (_window_mask(length, window, query.device) for length in lengths)
    outputs = []
    for *document, mask in zip(*rows, masks, strict=True):
        queries, keys, values = (x.transpose(0, 1)[None] for x in document)
        is_grouped = num_groups > 1 and supports_grouped_heads(keys, is_masked=mask is not None)
        if not is_grouped:
            keys, values = (repeat_kv(x, num_groups) for x in (keys, values))
        out = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=is_grouped,
        )
        outputs.append(out[0].transpose(0, 1))
    batch, heads, width, _ = query.shape
    return torch.cat(outputs).view(batch, width, heads, -1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L]: True where a query sees a key; None where the window is no shorter than the document."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).where(mask, float("-inf"))
