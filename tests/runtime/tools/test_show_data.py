"""What a person sees of a row: every character of it, and which tokens are learned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import byte_level_folder
from conversations import assistant, user
from prepare_request_factory import listed_request

from shardwise.trainer.runtime.data.chat.rendering import Renderer
from shardwise.trainer.runtime.data.chat.template import load_chat_template
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.sources import Chat
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer
from shardwise.trainer.runtime.tools.show_data import READ_BEGIN, READ_END, first_example, show
from shardwise.trainer.spec.job.sections import LossOn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_level_folder(tmp_path_factory.mktemp("tokenizers") / "folder", bos=None, eos="<|endoftext|>")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_each_stretch_stands_behind_its_name_or_in_a_terminal_in_its_place(folder, tokenizer):
    renderer = Renderer(tokenizer, load_chat_template("chatml", folder), LossOn.AUTO, 100)
    row: Any = renderer.render(Chat([user("What is\n2+2?"), assistant("It is four.")]))
    num_learned = sum(row.is_learned)
    assert show(row.ids, row.is_learned, tokenizer, width=80, colour=False).splitlines() == [
        f"{len(row.ids)} tokens: {num_learned} learned, {len(row.ids) - num_learned} only read",
        r"read    | <|im_start|>user\n",
        r"        | What is\n",
        r"        | 2+2?<|im_end|>\n",
        r"        | <|im_start|>assistant\n",
        r"learned | It is four.<|im_end|>",
        r"read    | \n",
    ]
    lines = show(row.ids, row.is_learned, tokenizer, width=80, colour=True).splitlines()
    assert lines[1:] == [
        "\x1b[2m<|im_start|>user\x1b[0m", "\x1b[2mWhat is\x1b[0m", "\x1b[2m2+2?<|im_end|>\x1b[0m",
        "\x1b[2m<|im_start|>assistant\x1b[0m", "\x1b[1mIt is four.<|im_end|>\x1b[0m",
    ]  # fmt: skip


def test_documents_of_a_packed_row_are_told_apart(tokenizer):
    [one, other] = tokenizer.encode(["Hi there", "Bye"])
    lines = show([*one, *other], None, tokenizer, width=40, colour=False, document_starts=[0, len(one)]).splitlines()
    total = len(one) + len(other)
    assert lines[0] == f"{total} tokens: {total - 2} learned, 2 only read; 2 documents"
    assert lines[1] == f"--- document 1, {len(one)} tokens ".ljust(40, "-")
    second = lines.index(f"--- document 2, {len(other)} tokens ".ljust(40, "-"))
    assert "".join(line[10:] for line in lines[2:second]) == "Hi there"
    assert "".join(line[10:] for line in lines[second + 1 :]) == "Bye"
    [ids] = tokenizer.encode(["a\x1b[31mb\rc"])
    text = show(ids, None, tokenizer, width=80, colour=False)
    assert "\x1b" not in text, "control characters are spelt out"
    assert r"\x1b[31mb\r" in text.replace("\n        | ", "").replace("\nlearned | ", "")


@pytest.mark.parametrize("colour", [False, True])
def test_the_first_answer_is_shown_behind_a_long_prompt(folder, tmp_path, colour):
    rows = tmp_path / "rows.jsonl"
    prompt = "FIRST " + "weather " * 1500 + "LAST"
    rows.write_text(json.dumps({"prompt": prompt, "completion": " It is four."}) + "\n")
    settings = {"tokenizer": str(folder), "vocab_size": 1024, "seq_len": 8192}
    profile = prepare(listed_request(rows, cache_root=tmp_path / "cache", **settings), lambda _: None)
    assert profile.cache_dir is not None
    shown = first_example(Path(profile.cache_dir), width=80, colour=colour)
    counts = re.match(r"(\d+) tokens: (\d+) learned, (\d+) only read\n", shown)
    assert counts and int(counts[1]) == int(counts[2]) + int(counts[3]) > 1500 and 0 < int(counts[2]) < 20
    left_out = re.search(r"\n\.\.\. (\d+) tokens that are only read \.\.\.\n", shown)
    assert left_out and int(left_out[1]) == int(counts[3]) - READ_BEGIN - READ_END
    assert "FIRST" in shown[: left_out.start()] and "LAST" in shown[left_out.end() :]
    assert ("\x1b[1m" if colour else "learned | ") + " It is four.<|endoftext|>" in shown
    assert "tokens more in this row" not in shown
