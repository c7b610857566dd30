"""Which tokens of an example are learned: compared with TRL's marked templates, token by token, and with strings."""

import random
import re
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from chat_tokenizers import byte_level_folder
from conversations import CONVERSATIONS, assistant, system, trl_template, user
from tokenizers import AddedToken
from transformers import AutoTokenizer

from shardwise.trainer.runtime.data.chat.rendering import Renderer
from shardwise.trainer.runtime.data.chat.template import ChatTemplate, load_chat_template
from shardwise.trainer.runtime.data.sources import Chat, Completion, Preference, TokenIds
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer, named_tokens
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LossOn

BOS, EOS = "<|begin_of_text|>", "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_level_folder(tmp_path_factory.mktemp("tokenizers") / "bytes", bos=BOS, eos=EOS)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def of_transformers(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def renderer(folder, tokenizer):
    """Of a template of TRL's by its name, or of one of ours."""

    @cache
    def renderer(name, loss_on=LossOn.AUTO, seq_len=4096):
        return Renderer(tokenizer, template_of(name, folder), loss_on, seq_len)

    return renderer


def template_of(name, folder):
    if name.startswith("our "):
        return load_chat_template(name.removeprefix("our "), folder)
    return ChatTemplate(trl_template(name), named_tokens(folder))


def learned(rendered, tokenizer):
    """The stretches that are learned, as text."""
    assert isinstance(rendered, TokenIds), rendered
    runs = groupby(zip(rendered.ids, rendered.is_learned, strict=True), lambda pair: pair[1])
    return [tokenizer.tokenizer.decode([id_ for id_, _ in run], skip_special_tokens=False) for yes, run in runs if yes]


# What TRL's twin of a template marks beyond what is learned here, as tokens:
LINE_END = {"\n"}  # after the token that ends the turn: the template writes it, not the model
MORE_IN_THE_TWIN = {
    "cohere2": set(),
    "deepseekv3": {"<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>"},  # closes what the tool said
    "gemma3": LINE_END,
    "llama3": set(),
    "nemotron_3_nano": {"\n", "<think>"},  # <think>\n is in the generation prompt of an answer that reasons
    "phi3": {"\n", EOS},  # eos follows <|end|> at the end of the text only; generation has stopped by then
    "qwen2_5": LINE_END,  # also the one before the answer, which the generation prompt holds
    "qwen3_8": {"\n", "<think>", "\n\n"},  # "<think>\n" is in the prompt; "\n\n" begins in it
}
REFUSED = {  # by these templates, which have no place for tools, reasoning or a system message
    "cohere2": {"tools", "tool without text"},
    "deepseekv3": {"reasoning", "tool without text"},
    "gemma3": {"tools", "tool without text"},
    "llama3": {"tools", "tool without text"},
    "phi3": {"tools", "tool without text"},
}


@pytest.mark.parametrize("name", MORE_IN_THE_TWIN)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_what_is_learned_is_what_trl_marks_but_for_what_the_model_does_not_write(
    name, conversation, renderer, tokenizer, of_transformers
):
    """The same ids, and nothing is learned that TRL does not mark; what it marks besides is in the table."""
    messages = CONVERSATIONS[conversation]
    rendered = renderer(name).render(Chat(messages))
    if conversation in REFUSED.get(name, ()):
        assert isinstance(rendered, str)
        return
    twin = of_transformers.apply_chat_template(
        messages, chat_template=trl_template(f"{name}_training"), return_assistant_tokens_mask=True, return_dict=True,
    )  # fmt: skip
    assert learned(rendered, tokenizer)
    assert rendered.ids == twin["input_ids"]
    pairs = list(zip(rendered.ids, rendered.is_learned, twin["assistant_masks"], strict=True))
    assert not [id_ for id_, ours, theirs in pairs if ours and not theirs]
    more = {of_transformers.decode([id_]) for id_, ours, theirs in pairs if theirs and not ours}
    assert more <= MORE_IN_THE_TWIN[name]


CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TAGGED_CALL = f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"


@pytest.mark.parametrize(("name", "conversation", "expected"), [
    ("llama3_1", "system", ["Hello<|eot_id|>", "x<|eot_id|>"]),
    ("llama3_1", "tool without text", [CALL.replace("arguments", "parameters") + "<|eot_id|>", "Mild.<|eot_id|>"]),
    ("qwen3", "reasoning", ["Hello<|im_end|>", "<think>\nwell\n</think>\n\ny<|im_end|>"]),
    ("qwen3", "tool without text", [TAGGED_CALL, "<think>\n\n</think>\n\nMild.<|im_end|>"]),
    ("qwen3_5_nothink", "empty answer", ["<|im_end|>", "y<|im_end|>"]),
    ("gptoss", "two exchanges",
     ["<|channel|>final<|message|>Hello<|end|>", "<|channel|>final<|message|>Bye<|return|>"]),
    # no token of its own ends a turn: the next one's does, and eos the last
    ("glm4moe", "two exchanges", ["\n<think></think>\nHello<|user|>", f"\n<think></think>\nBye{EOS}"]),
    ("our chatml", "outer spaces", [" Hello \n<|im_end|>", "  x<|im_end|>"]),
    ("our qwen", "tool without text", [TAGGED_CALL, "Mild.<|im_end|>"]),
    ("our llama3", "outer spaces", ["Hello<|eot_id|>", "x<|eot_id|>"]),
])  # fmt: skip
def test_the_learned_strings_of_real_templates(name, conversation, expected, renderer, tokenizer):
    assert learned(renderer(name).render(Chat(CONVERSATIONS[conversation])), tokenizer) == expected


@pytest.mark.parametrize("name", ["phi3", "our phi3"])
def test_a_token_that_swallows_the_space_after_it_is_not_learned_for_that(name, tmp_path):
    """As those of Phi-3 do."""
    folder = byte_level_folder(tmp_path / "folder", bos=None, eos=EOS)
    tokenizer = load_tokenizer(folder)
    swallowing = [AddedToken(text, rstrip=True, normalized=False) for text in ("<|assistant|>", "<|end|>")]
    tokenizer.tokenizer.add_special_tokens(swallowing)
    renderer = Renderer(tokenizer, template_of(name, folder), LossOn.AUTO, 100)
    rendered = renderer.render(Chat([user("a"), assistant("  b"), user("c"), assistant("d")]))
    assert len(tokenizer.tokenizer.encode("<|end|>\n", add_special_tokens=False).ids) == 1
    assert learned(rendered, tokenizer) == ["b<|end|>", "d<|end|>"]


MULTI = [system("s"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")]


@pytest.mark.parametrize("name", ["qwen2_5", "our chatml"])
def test_loss_on_completion_learns_the_last_answer_and_assistant_every_one(name, renderer, tokenizer):
    last = learned(renderer(name, LossOn.COMPLETION).render(Chat(MULTI)), tokenizer)
    every = learned(renderer(name, LossOn.ASSISTANT).render(Chat(MULTI)), tokenizer)
    assert [run.strip()[0] for run in every] == ["b", "d"]
    assert last == every[1:]
    assert learned(renderer(name).render(Chat(MULTI)), tokenizer) == every
    split = Completion(MULTI[:4], MULTI[4:5])
    assert learned(renderer(name).render(split), tokenizer) == last
    assert learned(renderer(name, LossOn.ASSISTANT).render(split), tokenizer) == every
    everything = TokenIds(renderer(name).render(Chat(MULTI)).ids)
    assert renderer(name, LossOn.ALL).render(Chat(MULTI)) == everything
    assert renderer(name, LossOn.ALL).render(Completion("a", "b")).is_learned is None


def test_random_conversations_are_cut_where_the_template_cuts_them(renderer, tokenizer):
    """Contents that hold white space, line ends and look-alikes of the template, in every order."""
    draw = random.Random(0)
    pieces = [" ", "\n", "x", "Hi there", "<|im_end|>", "<|im_start|>assistant\n", "user", "\u65e5", "<|im_end|>\n"]
    for _ in range(200):
        said = ["".join(draw.choices(pieces, k=draw.randint(1, 5))) + "." for _ in range(6)]
        messages = [(user, assistant)[place % 2](content) for place, content in enumerate(said)]
        rendered = renderer("qwen2_5").render(Chat(messages))
        text = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        spans = []
        for message in messages:
            text += f"<|im_start|>{message['role']}\n"
            begin = len(text)
            text += f"{message['content']}<|im_end|>\n"
            if message["role"] == "assistant":
                spans.append((begin, len(text) - 1))
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        assert rendered.ids == encoding.ids
        assert rendered.is_learned == [any(b <= first < e for b, e in spans) for first, _ in encoding.offsets]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("a"), assistant("b"), assistant("c"), user("d"), user("e"), assistant("f")], ["b", "c", "f"]),
        ([assistant("Welcome"), user("a"), assistant("b")], ["Welcome", "b"]),
    ],
)
def test_turns_need_not_alternate(messages, expected, renderer, tokenizer):
    found = learned(renderer("qwen2_5").render(Chat(messages)), tokenizer)
    assert found == [f"{answer}<|im_end|>" for answer in expected]


def test_arguments_in_json_text_are_given_as_the_template_reads_them(renderer, tokenizer):
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = assistant("", tool_calls=[{"type": "function", "function": function}])
    assert learned(renderer("qwen2_5").render(Chat([user("a"), call])), tokenizer) == [TAGGED_CALL]


def test_parts_of_text_are_one_text_where_the_template_reads_no_parts(renderer):
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    whole = renderer("qwen3").render(Chat([user("Hi there"), assistant("b")]))
    assert renderer("qwen3").render(Chat([user(parts), assistant("b")])) == whole
    assert isinstance(renderer("gemma3").render(Chat([user(parts), assistant(parts)])), TokenIds)
    picture = [{"type": "image", "url": "x"}]
    assert "message 1" in renderer("qwen3").render(Chat([user(picture), assistant("b")]))


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("qwen2_5", Chat([]), "no messages"),
        ("qwen2_5", Chat([user("a"), {"content": "b"}]), "message 2 has no role"),
        ("qwen2_5", Chat([user("a")]), "nothing of it is learned"),
        ("qwen2_5", Chat([user("a\ufdd0"), assistant("b")]), r"U\+FDD0"),
        ("qwen2_5", Completion("a", [user("b")]), "nothing of it is learned"),
        ("qwen2_5", Preference("a", "b", "b"), "chosen and rejected are the same"),
        ("qwen2_5", TokenIds([1, 2, 3], [True, False, False]), "nothing of it is learned"),
        ("gemma", Chat([user("a"), user("b")]), "Conversation roles must alternate"),
        ("deepseekv3", Chat(CONVERSATIONS["reasoning"]), r"omits the content of message 2 \(assistant\)"),
        ("gptoss", Chat(CONVERSATIONS["empty answer"]), r"message 2 .*data\.chat_template"),
    ],
)
def test_what_cannot_be_used_is_answered_with_the_reason(name, content, fact, renderer):
    """And the others of its batch are rendered."""
    reason, rendered = renderer(name).render_many([content, Chat([user("a"), assistant("b")])])
    assert re.search(fact, reason)
    assert isinstance(rendered, TokenIds)


def test_too_long_is_a_reason_with_both_numbers(renderer):
    chat = Chat([user("a"), assistant("weather " * 50)])
    num_tokens = len(renderer("our chatml").render(chat).ids)
    reason = renderer("our chatml", seq_len=num_tokens - 1).render(chat)
    assert re.fullmatch(rf"too long: .*\b{num_tokens}\b.*\b{num_tokens - 1}\b", reason)
    assert isinstance(renderer("our chatml", seq_len=num_tokens).render(chat), TokenIds)
    pair = Preference([user("a")], [assistant("b")], [assistant("weather " * 50)])
    assert renderer("our chatml", seq_len=30).render(pair).startswith("too long: rejected: ")


def test_text_is_its_ids_alone(renderer, tokenizer):
    [ids] = tokenizer.encode(["The weather"])
    assert renderer("qwen2_5", seq_len=1).render("The weather") == TokenIds(ids)
    assert "data.loss_on" in renderer("qwen2_5", LossOn.ASSISTANT).render("The weather")
    with pytest.raises(InputError, match=r"data\.chat_template"):
        Renderer(tokenizer, None, LossOn.AUTO, 100).render(Chat(MULTI))


def test_a_completion_follows_the_prompt_as_generation_sees_it(renderer, tokenizer):
    for prompt, completion in (("Q: two plus two =", " four"), ("Q: two plus two = ", "four"), ("", "four")):
        rendered = renderer("qwen2_5").render(Completion(prompt, completion))
        [prompt_ids] = tokenizer.encode([prompt])
        assert rendered.ids[: len(prompt_ids)] == prompt_ids
        assert learned(rendered, tokenizer) == [completion + EOS]
        assert rendered.is_learned.index(True) == len(prompt_ids)


EXCHANGES = CONVERSATIONS["two exchanges"]
TEMPLATES: list[Any] = [
    (  # as that of Mistral 7B v0.3 does with all but a conversation that ends with the user
        "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}",
        [(CONVERSATIONS["system"], r"message 1 \(system\)"), (EXCHANGES, [f" Hello{EOS}", f" Bye{EOS}"])],
    ),
    ("<|{{ m.role }}|>{{ m.content | upper }}<|end|>", [(EXCHANGES, "rewrites")]),
    (
        "<|{{ m.role }}|>{{ m.content | upper if m.role == 'user' else m.content }}<|end|>",
        [(EXCHANGES, ["Hello<|end|>", "Bye<|end|>"])],
    ),
]


@pytest.mark.parametrize(("body", "cases"), TEMPLATES)
def test_a_template_that_drops_or_rewrites_what_matters_is_refused(body, cases, tokenizer, folder):
    prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}" if "role }}" in body else ""
    template = ChatTemplate("{% for m in messages %}" + body + "{% endfor %}" + prompt, named_tokens(folder))
    for messages, expected in cases:
        rendered = Renderer(tokenizer, template, LossOn.AUTO, 100).render(Chat(messages))
        if isinstance(expected, str):
            assert isinstance(rendered, str) and re.search(expected, rendered)
        else:
            assert learned(rendered, tokenizer) == expected
