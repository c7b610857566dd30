"""Which tokens of an example are learned: compared with TRL's marked templates, token by token, and with strings."""

import random
import re
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from chat_tokenizers import byte_level_folder
from conversations import CONVERSATIONS, TOOLS, assistant, system, tool_call, trl_template, user
from tokenizers import AddedToken
from transformers import AutoTokenizer

from shardwise.trainer.runtime.data.chat.rendering import PreferenceIds, Renderer
from shardwise.trainer.runtime.data.chat.template import ChatTemplate, load_chat_template
from shardwise.trainer.runtime.data.sources import EXCLUDED, Chat, Completion, Preference, TokenIds
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


@pytest.fixture(scope="module")
def own(folder, tokenizer):
    """A renderer of a whole template; or of one of which each turn is given, and what opens an answer."""

    def renderer(turn, opener="", *, is_whole=False, messages="messages"):
        begin, end = f"{{% for m in {messages} %}}<|start|>{{{{ m.role }}}}\n", "<|end|>{% endfor %}"
        prompt = f"{{% if add_generation_prompt %}}<|start|>assistant\n{opener}{{% endif %}}"
        source = turn if is_whole else begin + turn + end + prompt
        return Renderer(tokenizer, ChatTemplate(source, named_tokens(folder)), LossOn.AUTO, 500)

    return renderer


def check(rendered, expected, tokenizer):
    """What is learned is as expected, or the refusal holds the text that is."""
    if isinstance(expected, str):
        assert isinstance(rendered, str) and re.search(expected, rendered)
    else:
        assert learned(rendered, tokenizer) == expected


def learned(rendered, tokenizer):
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


TAGGED_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
ASKED, RESULT = user("Weather?"), {"role": "tool", "content": "18", "tool_call_id": "call00001"}
DESCRIBED = TOOLS[0]["function"] | {
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}}
}
PARIS, ROME = (tool_call("get_weather", city=city) | {"id": "call00001"} for city in ("Paris", "Rome"))
ROME["id"] = "call00002"
RESULTS = [RESULT, {**RESULT, "tool_call_id": "call00002"}]
AGENT = [  # several calls, an answer, and a further question
    ASKED, assistant("", reasoning_content="first", tool_calls=[PARIS]), RESULT,
    assistant("", reasoning_content="second", tool_calls=[ROME]), RESULT, assistant("Mild."),
    user("Sure?"), assistant("Yes.", reasoning_content="third"),
]  # fmt: skip
TEXT_AND_CALL = [ASKED, assistant("I look.", tool_calls=[PARIS]), RESULT, assistant("Mild.")]
TWO_CALLS = [ASKED, assistant("", tool_calls=[PARIS, ROME]), *RESULTS, assistant("Mild.")]
REASONED = [ASKED, assistant("Mild.", reasoning_content="warm")]


def qwen_call(city):
    parameter = f"<parameter=city>\n{city}\n</parameter>"
    return f"<tool_call>\n<function=get_weather>\n{parameter}\n</function>\n</tool_call>"


GPT_OSS = ' to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "{}"}}<|call|>'
FINAL = "<|channel|>final<|message|>Mild."
AGENTS: list[Any] = [  # template, conversation, what is learned, or what a refusal names
    ("qwen3_6", AGENT, [f"{qwen_call('Paris')}<|im_end|>", f"{qwen_call('Rome')}<|im_end|>", "Mild.<|im_end|>",
                        "third\n</think>\n\nYes.<|im_end|>"]),
    ("qwen3_5_nothink", AGENT[:6], [
        f"<think>\nfirst\n</think>\n\n{qwen_call('Paris')}<|im_end|>",
        f"<think>\nsecond\n</think>\n\n{qwen_call('Rome')}<|im_end|>", "Mild.<|im_end|>"]),
    ("qwen3_6", [*AGENT[:3], user("Sure?")], "omits the reasoning_content of message 2"),  # of the first try
    ("gptoss", TEXT_AND_CALL, [GPT_OSS.format("Paris"), f"{FINAL}<|return|>"]),
    ("gptoss", AGENT, [GPT_OSS.format("Paris"), GPT_OSS.format("Rome"), f"{FINAL}<|end|>",
                       "<|channel|>analysis<|message|>third<|end|><|start|>assistant"
                       "<|channel|>final<|message|>Yes.<|return|>"]),
    ("gptoss", AGENT[:2], [f"<|channel|>analysis<|message|>first<|end|><|start|>assistant{GPT_OSS.format('Paris')}"]),
    ("gptoss", TWO_CALLS, r"omits the tool_calls\.function\.name of message 2"),
    ("glm4moe", TWO_CALLS, [
        "\n<think></think>" + "".join(f"\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}"
                                      "</arg_value>\n</tool_call>" for city in ("Paris", "Rome")) + "<|observation|>",
        f"\n<think></think>\nMild.{EOS}"]),
    ("llama3_1", TEXT_AND_CALL, r"omits the content of message 2 \(assistant\)"),
    ("lfm2", TWO_CALLS, r"omits the tool_calls\.function\.name of message 2"),
    ("lfm2", REASONED, "omits the reasoning_content of message 2"),
    ("our qwen", REASONED, "omits the reasoning_content of message 2"),
    ("our chatml", [ASKED, assistant("Mild.", thinking="warm")], "omits the thinking of message 2"),
    ("deepseekv3", TWO_CALLS, "omits the name of tool 1"),
    ("qwen2_5", [ASKED, assistant("b"), assistant("c"), user("d"), user("e"), assistant("f")],
     ["b<|im_end|>", "c<|im_end|>", "f<|im_end|>"]),
    ("qwen2_5", [assistant("Welcome"), ASKED, assistant("b")], ["Welcome<|im_end|>", "b<|im_end|>"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "messages", "expected"), AGENTS)
def test_agents_are_learned_call_by_call_or_refused_with_the_key(name, messages, expected, renderer, tokenizer):
    has_calls = any("tool_calls" in message for message in messages)
    check(renderer(name).render(Chat(messages, TOOLS if has_calls else None)), expected, tokenizer)


# Forms that published templates of other models have: Mistral's (an id of nine characters, in the call), Kimi's (the id
# in the result alone), MiniMax's (an opened thought), Gemma 4's (a prompt that opens what a plain answer lacks).
CONTENT = "{{ m.content }}"
CALLED = "{% for c in m.tool_calls %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}"
ID = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{ c.id }}]"
OWN_FORMS: list[Any] = [  # what an answer has behind its header, a result, and the end of the prompt; what is learned
    (f"{CONTENT}{CALLED}{ID}{{% endfor %}}", CONTENT, "",
     ['<|call|>get_weather{"city": "Paris"}[call00001]<|end|>', "Mild.<|end|>"]),
    (f"{CONTENT}{CALLED}{{% endfor %}}", "{{ m.tool_call_id }}: {{ m.content }}", "",
     ['<|call|>get_weather{"city": "Paris"}<|end|>', "Mild.<|end|>"]),
    (f"{{% if m.thinking %}}<think>{{{{ m.thinking }}}}</think>{{% endif %}}{CONTENT}{CALLED}{{% endfor %}}", CONTENT,
     "<think>",
     ['first</think><|call|>get_weather{"city": "Paris"}<|end|>', "Mild.<|end|>"]),
    (f"{{{{ m.thinking or '' }}}}{CONTENT}{CALLED}{{% endfor %}}", CONTENT, "<|channel|>none<|message|>",
     ['first<|call|>get_weather{"city": "Paris"}<|end|>', "Mild.<|end|>"]),
    (f"{{{{ m.reasoning or '' }}}}{CONTENT}{CALLED}{{% endfor %}}", "{{ m.content | tojson }}", "",
     ['first<|call|>get_weather{"city": "Paris"}<|end|>', "Mild.<|end|>"]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "result", "opener", "expected"), OWN_FORMS)
def test_calls_are_found_whatever_stands_around_them(answer, result, opener, expected, tokenizer, own):
    answer, result = f"{{% if m.role == 'assistant' %}}{answer}", f"{{% elif m.role == 'tool' %}}{result}"
    one = own(f"{answer}{result}{{% else %}}{CONTENT}{{% endif %}}", opener)
    reasoning = {"reasoning": "first"} if "first" in expected[0] else {}
    messages = [ASKED, assistant("", tool_calls=[PARIS], **reasoning), RESULT, assistant("Mild.")]
    for tail in ([], [user("Sure?"), assistant("Yes.")]):
        rendered = one.render(Chat([*messages, *tail]))
        assert learned(rendered, tokenizer) == expected + ["Yes.<|end|>"] * (len(tail) // 2)


@pytest.mark.parametrize("value", [True, False, None, [], {}, [True], {"deep": None}, 3, "x"])
def test_an_argument_that_a_template_omits_is_refused_whatever_it_is(value, own):
    """As a template that looks at the kind of each argument may do."""
    messages = [ASKED, assistant("", tool_calls=[tool_call("get_weather", city="Paris", more=value)])]
    for condition, is_written in (("k == 'city'", False), ("true", True)):
        arguments = f"{{% for k, v in c.function.arguments.items() if {condition} %}}{{{{ k }}}}={{{{ v | tojson }}}}"
        calls = f"{{% for c in m.tool_calls %}}<|call|>{{{{ c.function.name }}}}{arguments}{{% endfor %}}{{% endfor %}}"
        rendered = own(CONTENT + calls).render(Chat(messages))
        assert is_written is not isinstance(rendered, str), rendered
        assert is_written or "omits the tool_calls.function.arguments.more" in rendered


def test_the_names_of_arguments_are_in_the_text(own):
    messages = [
        ASKED,
        assistant("", tool_calls=[tool_call("get_weather", **{"città": "Paris", "more": [{"deep": "a"}]})]),
    ]
    for arguments, is_learned in ((".values() | join(', ')", False), (" | tojson", True)):
        call = f"{{{{ c.function.name }}}}({{{{ c.function.arguments{arguments} }}}})"
        rendered = own(f"{CONTENT}{{% for c in m.tool_calls %}}{call}{{% endfor %}}").render(Chat(messages))
        assert is_learned is not isinstance(rendered, str)
        assert is_learned or "omits the name of the argument città of message 2" in str(rendered)


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_turns_of_a_prompt_that_the_template_rewrites_later_are_not_learned(name, renderer, tokenizer):
    """gpt-oss writes the text beside a call only until an answer follows it."""
    last = ["<|channel|>final<|message|>Mild.<|return|>"]
    one, of_last = renderer(name), renderer(name, LossOn.COMPLETION)
    rendered = [
        one.render(Completion(TEXT_AND_CALL[:3], TEXT_AND_CALL[3:], TOOLS)),
        one.render(Preference(TEXT_AND_CALL[:3], TEXT_AND_CALL[3:], [assistant("Cold.")], TOOLS)),
        of_last.render(Chat(TEXT_AND_CALL, TOOLS)),
    ]
    for each in rendered:
        assert not isinstance(each, str), each
        found = learned(each.chosen if isinstance(each, PreferenceIds) else each, tokenizer)
        assert [text.removeprefix("<|start|>assistant") for text in found] == last


@pytest.mark.parametrize("name", ["gptoss", "qwen3_6", "our qwen"])
def test_empty_reasoning_is_none(name, renderer):
    def rendered(**keys):
        return renderer(name).render(Chat([ASKED, assistant("Mild.", **keys)]))

    for key in ("reasoning_content", "thinking", "reasoning"):
        assert rendered(**{key: ""}) == rendered()
    assert rendered(reasoning_content="", reasoning="warm") == rendered(reasoning="warm")


def test_a_result_inside_the_turn_of_its_call_is_never_learned(own):
    """As Gemma 4 writes text that stands beside a call: behind the result."""
    call = "<|call|>{{ m.tool_calls[0].function | tojson }}{{ messages[loop.index].content }}"
    one = own(f"{{% if m.tool_calls %}}{call}{{% endif %}}{CONTENT}", messages="messages if m.role != 'tool'")
    rendered = one.render(Chat(TEXT_AND_CALL))
    assert isinstance(rendered, str) and "message 2" in rendered


BAD, GOOD = assistant("bad", **{EXCLUDED: True}), assistant("good")


@pytest.mark.parametrize("name", ["our chatml", "qwen2_5", "qwen2_5_training", "gptoss", "glm4moe"])
def test_an_excluded_answer_is_read_and_not_learned(name, renderer, tokenizer):
    for messages in ([ASKED, BAD, ASKED, GOOD], [ASKED, GOOD, ASKED, BAD]):
        rendered = renderer(name).render(Chat(messages))
        assert "bad" in tokenizer.tokenizer.decode(rendered.ids)
        (run,) = learned(rendered, tokenizer)
        assert "good" in run and "bad" not in run
        plain = [{key: value for key, value in message.items() if key != EXCLUDED} for message in messages]
        assert rendered.ids[:-1] == renderer(name).render(Chat(plain)).ids[: len(rendered.ids) - 1]  # glm adds eos
    pair = renderer(name).render(Preference([ASKED], [GOOD, ASKED, BAD], [assistant("poor")]))
    assert not isinstance(pair, str) and not any("bad" in run for run in learned(pair.chosen, tokenizer))
    assert "data.loss_on=all" in renderer(name, LossOn.ALL).render(Chat([ASKED, BAD]))
    assert "nothing of it is learned" in renderer(name, LossOn.COMPLETION).render(Chat([ASKED, GOOD, ASKED, BAD]))


def test_tools_and_arguments_of_the_template_are_in_every_shape_that_holds_messages(
    renderer, tokenizer, of_transformers
):
    """As `apply_chat_template` writes them."""
    kwargs, one = {"enable_thinking": False}, renderer("qwen3")
    messages = [ASKED, assistant("Mild.")]
    settings = {"tools": TOOLS, "chat_template": trl_template("qwen3"), "tokenize": False, **kwargs}
    expected = of_transformers.apply_chat_template(messages, **settings)
    prompt = of_transformers.apply_chat_template([ASKED], add_generation_prompt=True, **settings)
    for rendered in (
        one.render(Chat(messages, TOOLS, kwargs)),
        one.render(Completion([ASKED], messages[1:], TOOLS, kwargs)),
        one.render(Preference([ASKED], messages[1:], [assistant("Cold.")], TOOLS, kwargs)).chosen,
    ):
        assert tokenizer.tokenizer.decode(rendered.ids, skip_special_tokens=False) == expected
        num_read = rendered.is_learned.index(True)
        assert tokenizer.tokenizer.decode(rendered.ids[:num_read], skip_special_tokens=False) == prompt
    assert "<think>" in learned(one.render(Chat(messages, TOOLS)), tokenizer)[0]


def test_keys_that_the_template_need_not_write_are_counted_by_example(renderer):
    call = assistant("", tool_calls=[PARIS], reasoning_content="warm", note={"by": "x"}, score=3)
    chat = Chat(
        [{**ASKED, "name": "Al"}, call, RESULT, assistant("Mild.", rated=0), user("a"), assistant("b")],
        TOOLS,
        {"depth": "x", "enable_thinking": ["zq9"]},
    )
    pair = Preference([{**ASKED, "name": "Al"}], [assistant("a")], [assistant("b")])
    one = renderer("qwen3_6")
    one.take_unread()
    assert not any(isinstance(each, str) for each in one.render_many([chat, chat, pair]))
    keys, shortened = one.take_unread()
    assert shortened == {"messages.reasoning_content": 2}
    assert keys == {
        "messages.name": 3, "messages.tool_calls.id": 2, "messages.tool_call_id": 2, "messages.note.by": 2,
        "messages.score": 2, "messages.rated": 2, "chat_template_kwargs.depth": 2,
        "chat_template_kwargs.enable_thinking": 2,
    }  # fmt: skip
    assert one.take_unread() == ({}, {})


def test_what_a_template_leaves_out_of_tools_is_listed_or_refused_by_its_key(own, folder):
    """Names, descriptions and parameters are needed; more of a schema need not be written."""
    needed = ["function.name", "function.description", "function.parameters.properties | list"]
    for omitted, expected in ((None, None), (0, "name"), (1, "description"), (2, r"parameters\.properties")):
        listing = "".join(f"{{{{ tool.{each} }}}}" for place, each in enumerate(needed) if place != omitted)
        source = f"{{% for tool in tools %}}{listing}{{% endfor %}}{load_chat_template('chatml', folder).source}"
        one = own(source.replace("tools or ", ""), is_whole=True)
        rendered = one.render(Chat([ASKED, assistant("Mild.")], [TOOLS[0] | {"function": DESCRIBED}]))
        if expected is None:
            assert not isinstance(rendered, str), rendered
            assert one.take_unread().keys == {"tools.parameters.properties.description": 1}
        else:
            assert isinstance(rendered, str) and re.search(f"omits the {expected} of tool 1", rendered)


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


def test_arguments_in_json_text_and_tools_without_a_wrapping_are_given_as_templates_read_them(renderer, tokenizer):
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = assistant("", tool_calls=[{"type": "function", "function": function}])
    assert learned(renderer("qwen2_5").render(Chat([user("a"), call])), tokenizer) == [TAGGED_CALL]
    function["arguments"] = ""
    [without] = learned(renderer("qwen3_6").render(Chat([user("a"), call])), tokenizer)
    assert "<function=get_weather>\n</function>" in without
    bare, messages = [tool["function"] for tool in TOOLS], [ASKED, assistant("Mild.")]
    assert renderer("gptoss").render(Chat(messages, bare)) == renderer("gptoss").render(Chat(messages, TOOLS))


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
def test_a_template_that_drops_or_rewrites_what_matters_is_refused(body, cases, tokenizer, own):
    prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}" if "role }}" in body else ""
    for messages, expected in cases:
        one = own("{% for m in messages %}" + body + "{% endfor %}" + prompt, is_whole=True)
        check(one.render(Chat(messages)), expected, tokenizer)
