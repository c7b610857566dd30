"""From a file of chats to the labels of a micro batch: of every template exactly the answers are learned."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_formats import CHATS, FAMILIES, FORMATS, Family
from chat_tokenizers import byte_level_folder, metaspace_folder
from conversations import TRL_TEMPLATES
from prepare_request_factory import listed_request
from table_files import lines_of
from tokenizers import Tokenizer

from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.chat.template import TEMPLATE_NAMES
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.spec.job.sections import LossOn


def plain(marked: str) -> str:
    return marked.replace("«", "").replace("»", "")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def folder(eos: str, bos: Any, is_sentencepiece: bool) -> Path:
        out = tmp_path_factory.mktemp("tokenizers") / "folder"
        if not is_sentencepiece:
            return byte_level_folder(out, bos=bos, eos=eos)
        special = (bos, eos, "<start_of_turn>", "<end_of_turn>")
        return metaspace_folder(out, special=special, bos=bos, eos=eos, ends_with_words=True)

    return folder


Document = list[tuple[int, bool]]  # token ids, and which of them have a label


def prepared(
    folder: Path, family: Family, name: str, chats: list[Any], tmp_path: Path, **settings: Any
) -> tuple[Tokenizer, list[Document]]:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of({"messages": chat} for chat in chats))
    template = str(TRL_TEMPLATES / f"{family.template}.jinja") if name.startswith("TRL ") else family.template
    request = listed_request(
        path, cache_root=tmp_path / "cache", tokenizer=str(folder), chat_template=template, vocab_size=2048,
        seq_len=256, **settings,
    )  # fmt: skip
    profile = prepare(request, lambda _: None)
    train = TokenRows.open(Path(profile.cache_dir), "train")
    [batch], num_terms = step_micro_batches(
        train, step=0, seed=0, sequences_per_step=len(train), rank=0, num_ranks=1, micro_batch=len(train),
        accumulation=1,
    )  # fmt: skip
    assert num_terms == batch.num_targets == profile.num_targets
    tokenizer = Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")
    assert train.layout.is_packed is settings["packing"]
    return tokenizer, list(documents_of(batch, train))


def documents_of(batch: MicroBatch, rows: TokenRows) -> Iterator[Document]:
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


def marked(document: Document, tokenizer: Tokenizer, family: Family) -> str:
    runs = groupby(document, lambda token: token[1])
    texts = [(is_learned, _text([token for token, _ in run], tokenizer, family)) for is_learned, run in runs]
    return "".join(f"«{text}»" if is_learned else text for is_learned, text in texts)


def _text(ids: list[int], tokenizer: Tokenizer, family: Family) -> str:
    if not family.is_sentencepiece:
        return tokenizer.decode(ids, skip_special_tokens=False)
    text = "".join(tokenizer.id_to_token(token) for token in ids).replace("\u2581", " ")
    return re.sub(r"<0x([0-9A-F]{2})>", lambda found: chr(int(found[1], 16)), text)


def of_family(name: str) -> tuple[list[Any], list[str]]:
    pairs = zip(CHATS, FORMATS[name], strict=True)
    taken = [(chat, text) for chat, text in pairs if text is not None]
    family = FAMILIES[name]
    # Sentencepiece puts a space before a text that starts with none of its special tokens.
    special = (family.bos or "", "<start_of_turn>") if family.is_sentencepiece else ("",)
    return [chat for chat, _ in taken], [text if text.startswith(special) else f" {text}" for _, text in taken]


def test_all_of_our_templates_are_here():
    assert set(FAMILIES) == set(FORMATS)
    assert set(TEMPLATE_NAMES) == {name for name in FAMILIES if not name.startswith("TRL ")}


@pytest.mark.parametrize("loss_on", LossOn)
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_what_the_job_names_has_labels(name, loss_on, folder_of, tmp_path):
    """The answers with the tokens that end them, the last of them, or all but the first token of a document."""
    family = FAMILIES[name]
    chats, expected = of_family(name)
    packing = loss_on is not LossOn.ASSISTANT
    tokenizer, documents = prepared(
        folder_of(*family[1:]), family, name, chats, tmp_path, packing=packing, loss_on=loss_on
    )
    found = [marked(each, tokenizer, family) for each in documents]
    if loss_on is LossOn.ALL:
        assert all(is_learned is (place > 0) for each in documents for place, (_, is_learned) in enumerate(each))
        found, expected = list(map(plain, found)), list(map(plain, expected))
    elif loss_on is LossOn.COMPLETION:
        expected = [plain(text[: text.rindex("«")]) + text[text.rindex("«") :] for text in expected]
    assert sorted(found) == sorted(expected)
