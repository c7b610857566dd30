"""A small config of the same kind as a given one: one block of each kind, and narrow layers.

What a model does with documents, padding or boundaries is a property of its code and of the kinds of its blocks, not of
their sizes. A miniature shows it in a second, on a CPU.

Sizes are recognised by the names of the fields. No size grows, and what is off stays off. Windows, chunks and the
number of keys that an index selects become shorter than the documents of a measurement, so that they matter there.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

Fields = dict[str, Any]
_ROTATED = 8  # of a head, where it has a part that is not
_OF_ROTATED = ("head_dim", "qk_head_dim", "qk_nope_head_dim", "v_head_dim")
# The size of a field by its name: the first pattern that is the whole name.
_SIZES = tuple(
    (re.compile(pattern), size)
    for pattern, size in (
        (r"(.*_)?vocab_size(_.*)?|ngram_vocab_size_base|num_centroids", 512),
        (r".*_hash_byte_group_vocab", 512),
        (r"mamba_d_ssm|.*ple_embed_dim", 128),
        (r"hidden_size|d_model|n_embd|emb_dim|(.*_)?embedding_(size|dim)|word_embed_proj_dim|lru_width", 64),
        (r"attention_hidden_size|.*_embed_dim|cross_attention_hidden_size|backbone_hidden_size", 64),
        (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|inner_dim|inner|dim_ff|dff|feed_forward_size)(_mlp)?", 96),
        (r"(.*_)?num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads", 2),
        (r"index(er)?_n_heads", 32),  # as many, that no two keys have the same score
        (r"mamba_(n|num)_heads|n_mamba_heads", 8),
        (r"(.*_)?(num_)?attention_heads(_per_layer)?|(.*_)?(n|num)_heads?|num_query_groups", 4),
        (r"qk_rope_head_dim|rotary_dim", _ROTATED),
        (r"(.*_)?(head_?dim|dim_head|d_head)|kv_channels|attention_head_size", 16),
        (r"(.*_)?(rank|lowrank|time_step_rank)|d_rel|router_hidden_size|moe_latent_size|max_inference_chunksize", 16),
        (r"(.*_)?(d_state|state_size)|hidden_size_per_layer_input", 16),
        (r"block_size", 8),  # of BigBird, whose attention is sparse in rows that are longer than 7 blocks
        (r"(.*_)?(chunk_size|block_size|attn_chunk_length)", 16),
        (r"sliding_window(_size)?|(attention_|keep_)?window_size|local_attention(_window_len)?", 16),
        (r"attention_chunk_size|indexer_budget|heavily_compressed_attention", 16),
        (r"index_topk|index_block_size|indexer_compress_ratio", 8),
        (r"index_topk_blocks", 2),
        (r"((n_routed|num_local|num|moe_num)_)?experts|zero_expert_num", 4),
        (r"num_experts_per_tok(en)?|moe_(topk|top_k|k)|top_k_experts", 2),
        (r"n_group|num_expert_group|n_groups|mamba_n_?groups|o_groups", 2),
        (r"topk_group|num_mem_blocks|num_random_blocks", 1),
        (r"(.*_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|rel_extent", 512),
        (r"context_length|max_(target|source)_positions", 512),
    )
)
# Fields that hold the number of blocks, and lists that have an entry for each where no field does.
_NUM_BLOCKS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "num_blocks", "num_layers_per_stack",
)  # fmt: skip
_KINDS = ("layers_block_type", "layer_types")
_NUM_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # blocks that differ from the rest
_NUM_LAST = ("num_kv_shared_layers",)
_INDICES = re.compile(r".*(_layers|_idxs|_layer_ids)")
# Fields of a pattern that no list spells out, with values that show each kind in two blocks.
_PERIODS = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "decoder_sparse_step": 2,
}  # fmt: skip
_SHARED = ("layers_block_type", "hybrid")  # blocks that have the weights of one of them (Zamba), which needs another
_PER_LAYER = "per_layer_config"  # a mapping from the number of a block, as text, to fields of that block


def miniature(config: PreTrainedConfig, **fields: Any) -> PreTrainedConfig:  # noqa: ANN401  # any value of a config
    """The config with one block of each kind, two at least, and small sizes; `fields` are set as they are."""
    return type(config).from_dict({**_smaller_config(config.to_dict()), **fields})


def _smaller_config(fields: Fields, *, rotated: int | None = None) -> Fields:
    num_blocks = next((fields[name] for name in _NUM_BLOCKS if _is_number(fields.get(name))), None)
    if num_blocks is None:
        num_blocks = next((len(fields[name]) for name in _KINDS if isinstance(fields.get(name), list)), 0)
    rotated = fields.get("qk_rope_head_dim") or rotated
    smaller = {name: _smaller(name, value) for name, value in fields.items()}
    smaller |= _head_sizes(fields, smaller, rotated)
    return {**smaller, **_blocks(fields, smaller, num_blocks, rotated)}


def _smaller(name: str, value: Any) -> Any:  # noqa: ANN401  # any value of a config
    if _is_number(value):
        return 2 if name.endswith("token_id") else min(value, _size_of(name, value))
    if isinstance(value, list):
        return 2 if name.endswith("token_id") else [_smaller(name, each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if "model_type" in value:
        return _smaller_config(dict(value))
    if name != "rope_parameters" or all(isinstance(each, Mapping) for each in value.values()):
        return {key: _smaller(name if name == "rope_parameters" else str(key), each) for key, each in value.items()}
    plain = {key: each for key, each in value.items() if not isinstance(each, list) and key != "type"}
    return {**plain, "rope_type": "default"} if plain else plain


def _size_of(name: str, default: int) -> int:
    return next((size for pattern, size in _SIZES if pattern.fullmatch(name)), default)


def _head_sizes(fields: Fields, smaller: Fields, rotated: int | None) -> Fields:
    """Sizes of heads that depend on others: in proportion to their rotated part, or to the width of a state."""
    found: Fields = {}
    if rotated:
        sizes = {name: fields[name] for name in _OF_ROTATED if _is_number(fields.get(name))}
        found = {name: max(1, size * min(rotated, _ROTATED) // rotated) for name, size in sizes.items()}
    if "expand" in fields and "num_heads" in fields and "head_dim" in fields:  # Mamba 2
        found["num_heads"] = fields["expand"] * smaller["hidden_size"] // smaller["head_dim"]
    if fields.get("mamba_d_ssm"):  # Falcon H1
        found["mamba_d_ssm"] = smaller["mamba_n_heads"] * smaller["mamba_d_head"]
    elif all(
        _is_number(fields.get(name)) for name in ("mamba_expand", "mamba_n_heads", "mamba_d_head")
    ):  # Granite, Bamba
        inner = smaller["mamba_expand"] * smaller["hidden_size"]
        found["mamba_n_heads"] = min(smaller["mamba_n_heads"], inner)
        found["mamba_d_head"] = inner // found["mamba_n_heads"]
    if "attention_hidden_size" in fields and "attention_head_dim" in fields:  # Zamba: a hidden state and the first one
        found["attention_hidden_size"] = (
            fields["attention_hidden_size"] * smaller["hidden_size"] // fields["hidden_size"]
        )
        found["attention_head_dim"] = found["attention_hidden_size"] // smaller["num_attention_heads"]
    if fields.get("num_key_value_heads") and fields["num_key_value_heads"] == fields.get("num_attention_heads"):
        found["num_key_value_heads"] = smaller["num_attention_heads"]
    return found


def _blocks(fields: Fields, smaller: Fields, num_blocks: int, rotated: int | None) -> Fields:
    """What the fields say of each block, for one block of each kind in the order in which they come first."""
    by_block = [
        name
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == num_blocks and not _are_indices(name, value)
    ]
    indices = [name for name, value in fields.items() if isinstance(value, list) and _are_indices(name, value)]
    firsts = [name for name in _NUM_FIRST if _is_number(fields.get(name))]
    lasts = [name for name in _NUM_LAST if _is_number(fields.get(name))]
    of_one = {int(block): own for block, own in (fields.get(_PER_LAYER) or {}).items()}
    kinds: dict[str, int] = {}
    for block in range(num_blocks):
        kind = (
            [fields[name][block] for name in by_block],
            [block in fields[name] for name in indices],
            [block < fields[name] for name in firsts],
            [block >= num_blocks - fields[name] for name in lasts],
            of_one.get(block),
        )
        kinds.setdefault(repr(kind), block)
    shared = [block for block, kind in enumerate(fields.get(_SHARED[0]) or ()) if kind == _SHARED[1]]
    blocks = sorted({*kinds.values(), *shared[:2]})
    if len(blocks) == 1 and num_blocks > 1:
        blocks *= 2
    found: Fields = {name: len(blocks) for name in _NUM_BLOCKS if _is_number(fields.get(name))}
    found |= {name: min(value, fields[name]) for name, value in _PERIODS.items() if name in fields}
    found |= {name: [smaller[name][block] for block in blocks] for name in by_block}
    found |= {name: [place for place, block in enumerate(blocks) if block in fields[name]] for name in indices}
    found |= {name: sum(block < fields[name] for block in blocks) for name in firsts}
    found |= {name: sum(block >= num_blocks - fields[name] for block in blocks) for name in lasts}
    if of_one:
        found[_PER_LAYER] = {
            str(place): _smaller_config(of_one[block], rotated=rotated)
            for place, block in enumerate(blocks)
            if block in of_one
        }
    return found


def _are_indices(name: str, value: list[Any]) -> bool:
    """True of the numbers of some blocks, ascending; false of a list with a value for each block."""
    is_named = _INDICES.fullmatch(name) is not None
    return is_named and all(_is_number(each) for each in value) and sorted(set(value)) == value


def _is_number(value: Any) -> bool:  # noqa: ANN401  # any value of a config
    return isinstance(value, int) and not isinstance(value, bool)
