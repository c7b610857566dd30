"""From a file of chats to the labels of a micro batch: of every template exactly the answers are learned.

Each expectation is the whole row as it is trained on; what stands between « and » is learned, up to and with the token
that ends the turn, and nothing else is. The templates are ours by name and, as `TRL`, the models' own. Tokenizers are
byte-level as Llama's 3 and Qwen's, or sentencepiece-like as Mistral's and Gemma's.
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from chat_tokenizers import byte_level_folder, metaspace_folder
from conversations import TRL_TEMPLATES, assistant, system, user
from prepare_request_factory import listed_request
from tokenizers import Tokenizer

from trainer.runtime.chat_template import TEMPLATE_NAMES
from trainer.runtime.data import IGNORED_LABEL, MicroBatch, step_micro_batches
from trainer.runtime.prepare import prepare
from trainer.runtime.token_rows import TokenRows
from trainer.spec.job import LossOn

SINGLE = [user("What is 2+2?"), assistant("It is four.")]
MULTI = [user("Hi"), assistant("Hello."), user("And now?"), assistant("Bye.")]
WITH_SYSTEM = [system("Be brief."), *MULTI]
COMPLETION = {"prompt": SINGLE[:1], "completion": SINGLE[1:]}
SEQ_LEN = 256


class Family(NamedTuple):
    """A tokenizer of a kind with its tokens, and the template that the job names."""

    template: str
    eos: str
    bos: str | None = None
    is_sentencepiece: bool = False


LLAMA3 = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
GEMMA = {"bos": "<bos>", "eos": "<eos>", "is_sentencepiece": True}
OLDER = {"bos": "<s>", "eos": "</s>", "is_sentencepiece": True}
FAMILIES = {
    "alpaca": Family("alpaca", "<|endoftext|>"),
    "chatml": Family("chatml", "<|endoftext|>"),
    "gemma": Family("gemma", **GEMMA),
    "gemma3": Family("gemma3", **GEMMA),
    "llama2": Family("llama2", **OLDER),
    "llama3": Family("llama3", **LLAMA3),
    "mistral": Family("mistral", **OLDER),
    "mistral_v1": Family("mistral_v1", **OLDER),
    "phi3": Family("phi3", "<|endoftext|>"),
    "plain": Family("plain", "<|endoftext|>"),
    "qwen": Family("qwen", "<|im_end|>"),
    "zephyr": Family("zephyr", **OLDER),
    "TRL gemma": Family("gemma", **GEMMA),
    "TRL gemma3": Family("gemma3", **GEMMA),
    "TRL llama3": Family("llama3", **LLAMA3),
    "TRL llama3_1": Family("llama3_1", **LLAMA3),
    "TRL phi3": Family("phi3", "<|endoftext|>"),
    "TRL qwen2_5": Family("qwen2_5", "<|im_end|>"),
    "TRL qwen3": Family("qwen3", "<|im_end|>"),
}
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
EXPECTED: dict[str, tuple[str, str | None, str | None]] = {  # SINGLE, MULTI, WITH_SYSTEM; None: has no place for it
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
    EXPECTED[f"TRL {name}"] = EXPECTED[ours]
EXPECTED["TRL qwen2_5"] = EXPECTED["qwen"]


def only_last(marked: str) -> str:
    """The same with nothing but the last answer learned."""
    before, last, after = marked[: marked.rindex("«")], marked[marked.rindex("«") : -1], marked[-1]
    return before.replace("«", "").replace("»", "") + last + after


def everything(marked: str, first: str) -> str:
    """The same with all learned but the first token, which nothing comes before."""
    text = marked.replace("«", "").replace("»", "")
    assert text.startswith(first)
    return f"{first}«{text.removeprefix(first)}»"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[tuple[Any, ...], Path] = {}

    def folder(family: Family) -> Path:
        key = family[1:]
        if key not in made:
            out = tmp_path_factory.mktemp("tokenizers") / "folder"
            if family.is_sentencepiece:
                special = (*filter(None, (family.bos, family.eos)), "<start_of_turn>", "<end_of_turn>")
                markers = ("[INST]", "[/INST]") if family.template == "mistral" else ()
                made[key] = metaspace_folder(
                    out, special=(*special, *markers), bos=family.bos, eos=family.eos, ends_with_words=True
                )
            else:
                made[key] = byte_level_folder(out, bos=family.bos, eos=family.eos)
        return made[key]

    return folder


class Prepared(NamedTuple):
    """The documents of one micro batch: of each its token ids, and which of them have a label."""

    tokenizer: Tokenizer
    documents: list[list[tuple[int, bool]]]
    is_packed: bool


def prepared(folder: Path, family: Family, name: str, chats: list[Any], tmp_path: Path, **settings: Any) -> Prepared:
    """What a run would train on in its first step, from a file."""
    rows = [chat if isinstance(chat, dict) else {"messages": chat} for chat in chats]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = str(TRL_TEMPLATES / f"{family.template}.jinja") if name.startswith("TRL ") else family.template
    request = listed_request(
        path, cache_root=tmp_path / "cache", tokenizer=str(folder), chat_template=template, vocab_size=2048,
        seq_len=SEQ_LEN, **settings,
    )  # fmt: skip
    profile = prepare(request, lambda _: None)
    train = TokenRows.open(Path(profile.cache_dir), "train")
    [batch], num_terms = step_micro_batches(
        train, step=0, seed=0, sequences_per_step=len(train), rank=0, num_ranks=1, micro_batch=len(train),
        accumulation=1,
    )  # fmt: skip
    assert num_terms == batch.num_targets == profile.num_targets
    tokenizer = Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")
    return Prepared(tokenizer, list(documents_of(batch, train)), train.layout.is_packed)


def documents_of(batch: MicroBatch, rows: TokenRows) -> Iterator[list[tuple[int, bool]]]:
    """Documents as the positions tell them apart; padding belongs to none of them and has no label."""
    width = batch.input_ids.shape[1]
    positions = torch.arange(width).expand_as(batch.input_ids) if batch.position_ids is None else batch.position_ids
    numbers = rows.order(seed=0, sequences_per_step=len(rows)).rows_of_step(0)
    for ids, labels, place, number in zip(batch.input_ids, batch.labels, positions, numbers, strict=True):
        length = rows.length(number)
        assert (labels[length:] == IGNORED_LABEL).all()
        learned = labels != IGNORED_LABEL
        assert torch.equal(labels[learned], ids[learned])
        starts = [*torch.nonzero(place[:length] == 0).flatten().tolist(), length]
        for begin, end in pairwise(starts):
            yield list(zip(ids[begin:end].tolist(), learned[begin:end].tolist(), strict=True))


def marked(document: list[tuple[int, bool]], tokenizer: Tokenizer, family: Family) -> str:
    """The text of a document, each stretch of learned tokens in « »."""
    runs = groupby(document, lambda token: token[1])
    texts = [(is_learned, _text([token for token, _ in run], tokenizer, family)) for is_learned, run in runs]
    return "".join(f"«{text}»" if is_learned else text for is_learned, text in texts)


def _text(ids: list[int], tokenizer: Tokenizer, family: Family) -> str:
    if not family.is_sentencepiece:
        return tokenizer.decode(ids, skip_special_tokens=False)
    text = "".join(tokenizer.id_to_token(token) for token in ids).replace("\u2581", " ")
    return re.sub(r"<0x([0-9A-F]{2})>", lambda found: chr(int(found[1], 16)), text)


def of_family(name: str) -> tuple[list[Any], list[str]]:
    """Chats that the template has a place for, and how each is to come out."""
    pairs = zip((SINGLE, MULTI, WITH_SYSTEM), EXPECTED[name], strict=True)
    taken = [(chat, text) for chat, text in pairs if text is not None]
    return [chat for chat, _ in taken], [_as_tokenized(text, FAMILIES[name]) for _, text in taken]


def _as_tokenized(text: str, family: Family) -> str:
    """Sentencepiece puts a space before a text that starts with none of its special tokens."""
    needs_space = family.is_sentencepiece and not text.startswith((family.bos or "", "<start_of_turn>"))
    return f" {text}" if needs_space else text


def test_all_of_our_templates_are_here():
    assert set(FAMILIES) == set(EXPECTED)
    assert set(TEMPLATE_NAMES) == {name for name in FAMILIES if not name.startswith("TRL ")}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_answers_with_the_tokens_that_end_them_have_labels(name, packing, folder_of, tmp_path):
    family = FAMILIES[name]
    chats, expected = of_family(name)
    for loss_on in (LossOn.AUTO, LossOn.ASSISTANT):
        made = prepared(folder_of(family), family, name, chats, tmp_path, packing=packing, loss_on=loss_on)
        assert made.is_packed is packing
        assert sorted(marked(each, made.tokenizer, family) for each in made.documents) == sorted(expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_last_answer_has_labels_where_the_job_says_completion(name, folder_of, tmp_path):
    family = FAMILIES[name]
    chats, expected = of_family(name)
    made = prepared(folder_of(family), family, name, chats, tmp_path, loss_on=LossOn.COMPLETION)
    found = sorted(marked(each, made.tokenizer, family) for each in made.documents)
    assert found == sorted(map(only_last, expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_has_labels_but_the_first_token_of_each_document_where_the_job_says_all(name, folder_of, tmp_path):
    family = FAMILIES[name]
    chats, expected = of_family(name)
    made = prepared(folder_of(family), family, name, chats, tmp_path, loss_on=LossOn.ALL)
    firsts = [_text([document[0][0]], made.tokenizer, family) for document in made.documents]
    found = [marked(each, made.tokenizer, family) for each in made.documents]
    plain = [text.replace("«", "").replace("»", "") for text in found]
    by_text = {text.replace("«", "").replace("»", ""): text for text in expected}
    assert found == [everything(by_text[text], first) for text, first in zip(plain, firsts, strict=True)]
    assert set(plain) == set(by_text)


@pytest.mark.parametrize("loss_on", [LossOn.AUTO, LossOn.COMPLETION, LossOn.ASSISTANT])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_messages_has_no_labels_and_its_completion_has(name, loss_on, folder_of, tmp_path):
    family = FAMILIES[name]
    made = prepared(folder_of(family), family, name, [COMPLETION], tmp_path, loss_on=loss_on)
    assert [marked(each, made.tokenizer, family) for each in made.documents] == of_family(name)[1][:1]
