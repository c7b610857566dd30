"""Tokenizers trained on the spot that hold the special tokens of chat templates, as folders that transformers loads."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardwise.trainer.runtime.export.gguf import _SPLITS

CORPUS = [
    "The weather in Paris is mild today, about 18 degrees. What is two plus two? It is four.",
    "system user assistant model tool You are a helpful assistant. <tool_call> get_weather arguments name city",
    "naïve café 日本語 русский текст \U0001f600 [INST] [/INST] ### Instruction: ### Response:\n\n think \n",
] * 20
SPECIAL = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|observation|>", "<bos>",
    "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|start|>",
    "<|channel|>", "<|message|>", "<|return|>", "<|call|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581outputs\u2581begin\uff5c>",
    "<\uff5ctool\u2581outputs\u2581end\uff5c>",
)  # fmt: skip
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def byte_level_folder(folder: Path, *, bos: str | None, eos: str, special: tuple[str, ...] = SPECIAL) -> Path:
    """A byte-level BPE as GPT-2, Llama 3 and Qwen have; `<think>` and its like are added tokens, but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _written(tokenizer, folder, bos=bos, eos=eos, special=special)


def qwen_folder(folder: Path, *, eos: str = "<|endoftext|>") -> Path:
    """Its rule of splitting is Qwen2's own."""
    byte_level_folder(folder, bos=None, eos=eos)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split = next(pattern for pattern, name in _SPLITS.items() if name == "qwen2")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def metaspace_folder(
    folder: Path, *, special: tuple[str, ...] = SPECIAL, bos: str = "<s>", eos: str = "</s>",
    ends_with_words: bool = False,
) -> Path:  # fmt: skip
    """As sentencepiece's of Llama 2, Mistral and Gemma: spaces are part of tokens, what is unknown becomes bytes.

    With `ends_with_words` no token goes on behind a space, as in theirs; else some do, which is harder.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=ends_with_words)
    tokenizer.normalizer = normalizers.Replace("\u3000", " ")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False,
        max_token_length=8,
    )  # fmt: skip
    tokenizer.train_from_iterator([text.replace("日本語", "") for text in CORPUS], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _written(tokenizer, folder, bos=bos, eos=eos, special=special)


def _written(tokenizer: Tokenizer, folder: Path, *, bos: str | None, eos: str, special: tuple[str, ...]) -> Path:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in NOT_SPECIAL])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": eos, "pad_token": eos} | ({} if bos is None else {"bos_token": bos})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
