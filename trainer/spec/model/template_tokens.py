"""The chat templates that shardwise brings, and the special tokens that each writes around what is said.

A tokenizer that lacks them is given them, and a model without room for them larger embeddings; both must be known
before anything is loaded, so the table stands here and not in the templates.
"""

from collections.abc import Mapping

TEMPLATE_TOKENS: Mapping[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "llama2": (),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "mistral_v1": (),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "plain": (),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "zephyr": (),
}
