"""The formats of chats as their authors published them, with the tokens of the models that they belong to.

What stands between « and » is learned, up to and with the token that ends the turn, and nothing else is.
"""

from typing import Any, NamedTuple

from conversations import assistant, system, user

SINGLE = [user("What is 2+2?"), assistant("It is four.")]
MULTI = [user("Hi"), assistant("Hello."), user("And now?"), assistant("Bye.")]
WITH_SYSTEM = [system("Be brief."), *MULTI]
CHATS = (SINGLE, MULTI, WITH_SYSTEM)


class Family(NamedTuple):
    """A tokenizer of a kind with its tokens, and the template that the job names."""

    template: str
    eos: str
    bos: str | None = None
    is_sentencepiece: bool = False


LLAMA3: dict[str, Any] = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
GEMMA: dict[str, Any] = {"bos": "<bos>", "eos": "<eos>", "is_sentencepiece": True}
OLDER: dict[str, Any] = {"bos": "<s>", "eos": "</s>", "is_sentencepiece": True}
FAMILIES = {
    "alpaca": Family("alpaca", "<|endoftext|>"), "chatml": Family("chatml", "<|endoftext|>"),
    "gemma": Family("gemma", **GEMMA), "gemma3": Family("gemma3", **GEMMA), "llama2": Family("llama2", **OLDER),
    "llama3": Family("llama3", **LLAMA3), "mistral": Family("mistral", **OLDER),
    "mistral_v1": Family("mistral_v1", **OLDER), "phi3": Family("phi3", "<|endoftext|>"),
    "plain": Family("plain", "<|endoftext|>"), "qwen": Family("qwen", "<|im_end|>"),
    "zephyr": Family("zephyr", **OLDER), "TRL gemma": Family("gemma", **GEMMA), "TRL gemma3": Family("gemma3", **GEMMA),
    "TRL llama3": Family("llama3", **LLAMA3), "TRL llama3_1": Family("llama3_1", **LLAMA3),
    "TRL phi3": Family("phi3", "<|endoftext|>"), "TRL qwen2_5": Family("qwen2_5", "<|im_end|>"),
    "TRL qwen3": Family("qwen3", "<|im_end|>"),
}  # fmt: skip
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n"
)
QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
DATES = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
CHATML_SINGLE = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n«It is four.<|im_end|>»\n"
CHATML_SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
CHATML_MULTI = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n«Bye.<|im_end|>»\n"
)
LLAMA3_SINGLE = (
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«It is four.<|eot_id|>»"
)
LLAMA3_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
LLAMA3_MULTI = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Bye.<|eot_id|>»"
)
GEMMA_SINGLE = "<bos><start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n«It is four.<end_of_turn>»\n"
GEMMA_MULTI = (
    "Hi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n"
    "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n«Bye.<end_of_turn>»\n"
)
PHI3_MULTI = (
    "<|user|>\nHi<|end|>\n<|assistant|>\n«Hello.<|end|>»\n<|user|>\nAnd now?<|end|>\n<|assistant|>\n«Bye.<|end|>»\n"
)
FORMATS: dict[str, tuple[str, str | None, str | None]] = {  # of CHATS; None: has no place for it
    "alpaca": (f"{ALPACA}What is 2+2?\n\n### Response:\n«It is four.<|endoftext|>»", None, None),
    "chatml": (CHATML_SINGLE, CHATML_MULTI, CHATML_SYSTEM + CHATML_MULTI),
    "gemma": (GEMMA_SINGLE, f"<bos><start_of_turn>user\n{GEMMA_MULTI}", None),
    "gemma3": (
        GEMMA_SINGLE,
        f"<bos><start_of_turn>user\n{GEMMA_MULTI}",
        f"<bos><start_of_turn>user\nBe brief.\n\n{GEMMA_MULTI}",
    ),
    "llama2": (
        "<s>[INST] What is 2+2? [/INST]« It is four. </s>»",
        "<s>[INST] Hi [/INST]« Hello. </s>»<s>[INST] And now? [/INST]« Bye. </s>»",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]« Hello. </s>»<s>[INST] And now? [/INST]« Bye. </s>»",
    ),
    "llama3": (f"<|begin_of_text|>{LLAMA3_SINGLE}", f"<|begin_of_text|>{LLAMA3_MULTI}", LLAMA3_SYSTEM + LLAMA3_MULTI),
    "mistral": (
        "<s>[INST] What is 2+2?[/INST]« It is four.</s>»",
        "<s>[INST] Hi[/INST]« Hello.</s>»[INST] And now?[/INST]« Bye.</s>»",
        "<s>[INST] Be brief.\n\nHi[/INST]« Hello.</s>»[INST] And now?[/INST]« Bye.</s>»",
    ),
    "mistral_v1": (
        "<s> [INST] What is 2+2? [/INST]« It is four.</s>»",
        "<s> [INST] Hi [/INST]« Hello.</s>» [INST] And now? [/INST]« Bye.</s>»",
        "<s> [INST] Be brief.\n\nHi [/INST]« Hello.</s>» [INST] And now? [/INST]« Bye.</s>»",
    ),
    "phi3": (
        "<|user|>\nWhat is 2+2?<|end|>\n<|assistant|>\n«It is four.<|end|>»\n<|endoftext|>",
        f"{PHI3_MULTI}<|endoftext|>",
        f"<|system|>\nBe brief.<|end|>\n{PHI3_MULTI}<|endoftext|>",
    ),
    "plain": (
        "User: What is 2+2?\nAssistant:« It is four.<|endoftext|>»\n",
        "User: Hi\nAssistant:« Hello.<|endoftext|>»\nUser: And now?\nAssistant:« Bye.<|endoftext|>»\n",
        "Be brief.\n\nUser: Hi\nAssistant:« Hello.<|endoftext|>»\nUser: And now?\nAssistant:« Bye.<|endoftext|>»\n",
    ),
    "qwen": (QWEN + CHATML_SINGLE, QWEN + CHATML_MULTI, CHATML_SYSTEM + CHATML_MULTI),
    "zephyr": (
        "<|user|>\nWhat is 2+2?</s>\n<|assistant|>\n«It is four.</s>»\n",
        "<|user|>\nHi</s>\n<|assistant|>\n«Hello.</s>»\n<|user|>\nAnd now?</s>\n<|assistant|>\n«Bye.</s>»\n",
        "<|system|>\nBe brief.</s>\n"
        "<|user|>\nHi</s>\n<|assistant|>\n«Hello.</s>»\n<|user|>\nAnd now?</s>\n<|assistant|>\n«Bye.</s>»\n",
    ),
    "TRL llama3_1": (
        f"{DATES}<|eot_id|>{LLAMA3_SINGLE}",
        f"{DATES}<|eot_id|>{LLAMA3_MULTI}",
        f"{DATES}Be brief.<|eot_id|>{LLAMA3_MULTI}",
    ),
    "TRL qwen3": (
        CHATML_SINGLE.replace("«", "«<think>\n\n</think>\n\n"),
        CHATML_MULTI.replace("«Bye", "«<think>\n\n</think>\n\nBye"),
        CHATML_SYSTEM + CHATML_MULTI.replace("«Bye", "«<think>\n\n</think>\n\nBye"),
    ),
}
for name, ours in (("gemma", "gemma"), ("gemma3", "gemma3"), ("llama3", "llama3"), ("phi3", "phi3")):
    FORMATS[f"TRL {name}"] = FORMATS[ours]
FORMATS["TRL qwen2_5"] = FORMATS["qwen"]
