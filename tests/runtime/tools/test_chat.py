"""Talking to what a run trained: what the model is given, when it stops, the program at a terminal and in a pipe."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import byte_level_folder
from engine_plan_factory import TINY_LLAMA
from export_factory import run_of, save_run, write_base
from msgspec.structs import replace

from shardwise.launch.commands.convert import reply_to
from shardwise.launch.options import ChatOptions
from shardwise.trainer.runtime.data.chat.template import load_chat_template
from shardwise.trainer.runtime.export import folder as export_folder
from shardwise.trainer.runtime.models.methods import quantised_layers
from shardwise.trainer.runtime.tools.chat import ChatModel, Conversation, Interrupts, Sampling, load_chat_model
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Method

CONFIG = {**TINY_LLAMA, "vocab_size": 1024, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """Of byte-level BPEs that know ChatML's two tokens."""
    root = tmp_path_factory.mktemp("tokenizers")
    found = {name: byte_level_folder(root / name, bos=None, eos="<|endoftext|>") for name in ("chat", "plain")}
    (found["chat"] / "chat_template.jinja").write_text(load_chat_template("chatml", found["chat"]).source)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "base", CONFIG)


@pytest.fixture(scope="module")
def runs(base, tokenizers, tmp_path_factory):
    @cache
    def run(method: Method, kind: str) -> Path:
        return save_run(tmp_path_factory.mktemp("run"), run_of(base, method, config=CONFIG, tokenizer=tokenizers[kind]))

    return run


@pytest.fixture
def interrupts():
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts()
    signal.signal(signal.SIGINT, before)


def talked(run_dir: Path) -> tuple[ChatModel, list[str]]:
    """The model of a run's last checkpoint, and the prompts that it will have been given."""
    chat_model, prompts = load_chat_model(run_dir, checkpoint="last"), list[str]()
    model: Any = chat_model.model
    generate = model.generate

    def recorded(**inputs):
        prompts.append(str(chat_model.tokenizer.decode(inputs["input_ids"][0])))
        return generate(**inputs)

    model.generate = recorded
    return chat_model, prompts


GREEDY = Sampling(max_new_tokens=8, temperature=0.0)


def test_the_whole_talk_is_the_prompt_in_the_words_of_the_template(runs, interrupts):
    chat_model, prompts = talked(runs(Method.FULL, "chat"))
    talk = Conversation(chat_model, GREEDY, "Be brief.", interrupts)
    first, _ = talk.answer("Hello 1?"), talk.answer("And 2?")
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello 1?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [
        opening,
        f"{opening}{first}<|im_end|>\n<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_a_talk_goes_on_from_its_texts(runs, interrupts):
    run_dir = runs(Method.FULL, "chat")
    chat_model, prompts = talked(run_dir)
    talk, again = (Conversation(chat_model, GREEDY, None, interrupts) for _ in range(2))
    first, second = talk.answer("Hello 1?\nOr not?"), talk.answer("And 2?")
    again.resume(["Hello 1?\nOr not?", first])
    assert again.answer("And 2?") == second and prompts[2] == prompts[1] and "Or not?<|im_end|>" in prompts[2]
    options = ChatOptions(run_dir, "last", GREEDY.max_new_tokens, GREEDY.temperature)
    reply = reply_to(["Hello 1?\nOr not?", first, "And 2?"], options)
    assert reply.text == second.strip() and "on cpu, by the tokenizer's chat template" in reply.note
    with pytest.raises(InputError, match=r"^the question has \d{3} tokens"):
        reply_to(["xyz" * 300], options)


def test_without_a_template_each_line_is_continued_by_itself(runs, interrupts):
    chat_model, prompts = talked(runs(Method.FULL, "plain"))
    talk = Conversation(chat_model, GREEDY, None, interrupts)
    assert talk.answer("row 1") and talk.answer("row 2")
    assert prompts == ["row 1", "row 2"]
    with pytest.raises(InputError, match=r"--system: .*chat template"):
        Conversation(chat_model, GREEDY, "Be brief.", interrupts)


def test_old_turns_are_left_out_where_the_talk_outgrows_the_model(runs, interrupts):
    chat_model, prompts = talked(runs(Method.FULL, "chat"))
    talk = Conversation(chat_model, GREEDY, "Be brief.", interrupts)
    for number in range(12):
        talk.answer(f"question {number} " + "cat " * 8)
    assert chat_model.max_positions == 256
    assert all(len(chat_model.tokenizer(prompt)["input_ids"]) <= 256 - 8 for prompt in prompts)
    assert "question 0 " in prompts[1] and "question 0 " not in prompts[-1]
    assert "question 10 " in prompts[-1] and prompts[-1].startswith("<|im_start|>system")
    with pytest.raises(InputError, match=r"\d{3} tokens.* 248 "):
        talk.answer("xyz" * 300)


@pytest.mark.parametrize("method", [Method.FULL, Method.QLORA])
def test_a_checkpoint_and_its_export_answer_alike(method, runs, base, tokenizers, interrupts):
    """Adapters on the base they were trained on, which is held in 4 bit for qlora."""
    run_dir = runs(method, "chat")
    chat_model = load_chat_model(run_dir, checkpoint="step-4")
    assert bool(quantised_layers(chat_model.model)) == (method is Method.QLORA)
    expected = Conversation(chat_model, GREEDY, None, interrupts).answer("Hello?")
    plan = run_of(base, method, config=CONFIG, tokenizer=tokenizers["chat"])
    if method is Method.FULL:
        export_folder.write_model_folder(chat_model.model, plan, run_dir / "export")
    else:
        weights = {name: each.detach() for name, each in chat_model.model.named_parameters() if ".lora_" in name}
        export_folder.write_adapter_folder(weights, plan, run_dir / "export")
    exported = load_chat_model(run_dir, checkpoint=None)
    assert exported.title.endswith("/export") and exported.end_ids == chat_model.end_ids
    assert Conversation(exported, GREEDY, None, interrupts).answer("Hello?") == expected


def command(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "shardwise.launch.cli", "chat", str(run_dir), *words]


def test_a_pipe_gives_one_answer_for_each_line_and_nothing_else(runs):
    answer = subprocess.run(
        command(runs(Method.FULL, "plain"), "--max-new-tokens", "6", "--temperature", "0", "--checkpoint", "last"),
        input="row 1\n\nrow 2\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("\n") and ">" not in answer.stdout[:1]
    opening = answer.stderr.strip().splitlines()
    assert len(opening) == 1 and all(fact in opening[0] for fact in ("step 4", "cpu", "chat template"))


def test_what_cannot_be_talked_to_is_error_2(runs, base, tmp_path):
    run_dir = save_run(tmp_path / "run", run_of(base, Method.FULL, config=CONFIG))
    with pytest.raises(InputError, match=r"/run: .*tokenizer"):
        load_chat_model(run_dir, checkpoint=None)
    with pytest.raises(InputError, match=r"step 9\b.*step-4"):
        load_chat_model(runs(Method.FULL, "plain"), checkpoint="step-9")
    answer = subprocess.run(command(run_dir, "--temperature", "-1"), input="", capture_output=True, text=True)
    assert answer.returncode == 2 and "temperature" in answer.stderr, answer.stderr


def read_until(descriptor: int, words: str, seconds: float = 500.0) -> str:
    seen, end = "", time.monotonic() + seconds
    while words not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{words!r} did not come; seen: {seen!r}"
        seen += os.read(descriptor, 4096).decode(errors="replace")
    return seen


def pressed_until_the_end(leader: int, process: subprocess.Popen[bytes]) -> int:
    """The exit code after Ctrl-C; pressed again, as Python's readline sleeps over one that comes just as it prompts."""
    for _ in range(20):
        os.write(leader, b"\x03")
        try:
            return process.wait(5)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("Ctrl-C at the prompt ends nothing")


@pytest.mark.cold  # the terminal's own signals go to the process that is its leader
def test_at_a_terminal_ctrl_c_ends_the_answer_and_then_the_program(base, tokenizers, tmp_path):
    long = {**CONFIG, "max_position_embeddings": 100_000}
    plan = run_of(base, Method.FULL, config=CONFIG, tokenizer=tokenizers["plain"])
    run_dir = save_run(tmp_path / "run", replace(plan, model_path=None, model_config=long))
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(run_dir, "--max-new-tokens", "90000", "--temperature", "0.9"),
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(follower)
    try:
        assert "Ctrl-D" in read_until(leader, "> ")
        os.write(leader, b"row 1 2 3\n")
        read_until(leader, "row 1 2 3\r\n")
        read_until(leader, " ")  # words of the answer
        os.write(leader, b"\x03")
        read_until(leader, "\n> ")
        assert pressed_until_the_end(leader, process) == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_line_without_a_template_begins_as_a_document_of_the_training_did(runs, interrupts):
    chat_model, prompts = talked(runs(Method.FULL, "plain"))
    (opening,) = chat_model.tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
    Conversation(chat_model._replace(prefix=(opening,)), GREEDY, None, interrupts).answer("row 1")
    assert prompts == ["<|im_start|>row 1"]
