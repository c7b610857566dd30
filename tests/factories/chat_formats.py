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


class Format(NamedTuple):
    turn: str  # of a question and an answer
    begin: str = ""
    system: str | None = None  # between the beginning and the first turn
    without_system: str = ""  # in its place
    in_question: str | None = None  # a system message, in front of the first question
    end: str = ""

    @property
    def texts(self) -> tuple[str, str | None, str | None]:
        """Of CHATS; None where the format has no place for a system message."""
        before, turns = self.begin + self.without_system, self.turn.format("Hi", "Hello.")
        more = self.turn.format("And now?", "Bye.") + self.end
        with_system = None
        if self.system is not None or self.in_question is not None:
            first = self.turn.format(f"{self.in_question or ''}Hi", "Hello.")
            with_system = self.begin + (self.system or "") + first + more
        return before + self.turn.format("What is 2+2?", "It is four.") + self.end, before + turns + more, with_system


CHATML = Format(
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n«{}<|im_end|>»\n",
    system="<|im_start|>system\nBe brief.<|im_end|>\n",
)
QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
GEMMA_FORMAT = Format("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n«{}<end_of_turn>»\n", begin="<bos>")
LLAMA3_FORMAT = Format(
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«{}<|eot_id|>»",
    begin="<|begin_of_text|>",
    system="<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
)
DATES = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
MISTRAL = Format("[INST] {}[/INST]« {}</s>»", begin="<s>", in_question="Be brief.\n\n")
ROLES = Format("<|user|>\n{}<|end|>\n<|assistant|>\n«{}<|end|>»\n", system="<|system|>\nBe brief.<|end|>\n")
FORMATS = {
    name: form.texts
    for name, form in {
        "chatml": CHATML,
        "gemma": GEMMA_FORMAT,
        "gemma3": GEMMA_FORMAT._replace(in_question="Be brief.\n\n"),
        "llama2": Format("<s>[INST] {} [/INST]« {} </s>»", in_question="<<SYS>>\nBe brief.\n<</SYS>>\n\n"),
        "llama3": LLAMA3_FORMAT,
        "mistral": MISTRAL,
        "mistral_v1": MISTRAL._replace(turn=" [INST] {} [/INST]« {}</s>»"),
        "phi3": ROLES._replace(end="<|endoftext|>"),
        "plain": Format("User: {}\nAssistant:« {}<|endoftext|>»\n", system="Be brief.\n\n"),
        "qwen": CHATML._replace(without_system=QWEN),
        "zephyr": Format(*((part or "").replace("<|end|>", "</s>") for part in ROLES[:3])),
        "TRL llama3_1": LLAMA3_FORMAT._replace(begin=DATES, without_system="<|eot_id|>", system="Be brief.<|eot_id|>"),
    }.items()
}
FORMATS["alpaca"] = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nWhat is 2+2?\n\n### Response:\n«It is four.<|endoftext|>»",
    None,
    None,
)
FORMATS |= {f"TRL {name}": FORMATS[name] for name in ("gemma", "gemma3", "llama3", "phi3")}
FORMATS["TRL qwen2_5"] = FORMATS["qwen"]


def _thinking(text: str | None) -> str:
    """The last answer with an empty thought."""
    thought = "«<think>\n\n</think>\n\n"
    return (text or "").replace("«It", f"{thought}It").replace("«Bye", f"{thought}Bye")


FORMATS["TRL qwen3"] = (_thinking(CHATML.texts[0]), _thinking(CHATML.texts[1]), _thinking(CHATML.texts[2]))
