"""Chat templates: rendered as transformers renders them, and those of ours in exactly the published formats."""

import json
import re
import shutil
import signal
from contextlib import suppress
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from chat_formats import CHATS, FORMATS
from chat_tokenizers import byte_level_folder
from conversations import CONVERSATIONS, TOOLS, TRL_TEMPLATES, assistant, system, trl_template, user
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from shardwise.trainer.runtime.data.chat.template import (
    TEMPLATE_DAY,
    TEMPLATE_NAMES,
    ChatTemplate,
    TemplateRefusalError,
    load_chat_template,
    missing_tokens,
)
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer
from shardwise.trainer.spec.errors import InputError

TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
EXCHANGES = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]


def named(name):
    return ChatTemplate(load_chat_template(name, None).source, TOKENS, name=name)


def rendered_by_transformers(source, messages, tools, *, add_generation_prompt):
    """The text and what is marked in it; None for a conversation that the template refuses."""
    try:
        rendered: Any = chat_template_utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=bool(re.search(r"\{%-?\s*generation", source)) and not add_generation_prompt,
            **TOKENS,
        )  # fmt: skip
    except Exception:  # noqa: BLE001 - whatever it answers, ours is to be a refusal
        return None
    (text,), spans = rendered
    return text, tuple(map(tuple, spans[0])) if spans else ()


def rendered_by_us(template, messages, tools, *, add_generation_prompt):
    try:
        text, spans = template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except TemplateRefusalError:
        return None
    return text, () if add_generation_prompt else spans


@pytest.mark.parametrize("name", sorted(path.stem for path in TRL_TEMPLATES.glob("*.jinja")))
def test_every_template_is_rendered_and_marked_as_by_transformers(name, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: TEMPLATE_DAY))
    source = trl_template(name)
    template = ChatTemplate(source, TOKENS)
    num_accepted = 0
    for (kind, messages), tools, prompts in product(CONVERSATIONS.items(), (None, TOOLS), (False, True)):
        if tools is not None and not ("tool" in kind or kind == "system"):
            continue
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        ours = rendered_by_us(template, given, tools, add_generation_prompt=prompts)
        assert ours == rendered_by_transformers(source, given, tools, add_generation_prompt=prompts)
        num_accepted += ours is not None
    assert num_accepted or name in ("llava_next", "llava_next_training")  # these take only lists of parts


REFUSED = [
    ("mistral", [user("a"), user("b")], "message 2 is of user"),
    ("llama2", [user("a"), user("b")], "message 2 is of user"),
    ("gemma", [system("a"), user("b")], "system.*gemma3"),
    ("gemma3", [system("s"), assistant("b")], "message 2 is of assistant"),
    ("alpaca", EXCHANGES, "one instruction.*one response"),
    ("phi3", [{"role": "critic", "content": "a"}], "system, user and assistant"),
    ("qwen", [{"role": "critic", "content": "a"}], "system, user, assistant and tool, not critic"),
    ("zephyr", CONVERSATIONS["tools"], "tools"),
    ("chatml", CONVERSATIONS["tools"], "tools"),
    ("llama3", CONVERSATIONS["tools"], "tools"),
]


@pytest.mark.parametrize(("name", "messages", "fact"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_with_the_reason(name, messages, fact):
    with pytest.raises(TemplateRefusalError, match=rf"\b{name}\b.*{fact}"):
        named(name).render(messages)


def test_a_date_is_always_the_same_and_is_told_of():
    template = ChatTemplate(trl_template("llama3_2"), TOKENS)
    assert template.prints_date
    assert "Today Date: 26 Jul 2024" in template.render(EXCHANGES).text
    assert not ChatTemplate(trl_template("llama3_1"), TOKENS).prints_date


def test_a_template_cannot_reach_python():
    for attack in ("{{ messages.__class__ }}", "{{ messages.append(1) }}", "{{ strftime_now.__self__ }}"):
        text = ChatTemplate("{{ 1 }}" + attack, TOKENS)
        with suppress(TemplateRefusalError):
            assert text.render(EXCHANGES).text == "1"


@pytest.mark.parametrize(
    ("attack", "error", "fact"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", InputError, "does not end"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TemplateRefusalError, "recursion"),
        ("{{ 'x' * 9999999999 }}", TemplateRefusalError, "repeated"),
        ("{{ 9999999999 * [1] }}", TemplateRefusalError, "repeated"),
        ("{{ 9 ** 999999999 }}", TemplateRefusalError, "power"),
        ("{{ range(999999999) }}", TemplateRefusalError, "Range"),
        ("{{ ''.format.__globals__ }}{{ raise_exception('no') }}", TemplateRefusalError, "no"),
        ("{% include '/etc/passwd' %}", TemplateRefusalError, "loader"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", TemplateRefusalError, "unsafe"),
        ("{{ '{0.__class__}'.format(1) }}{{ raise_exception('no') }}", TemplateRefusalError, "unsafe|no"),
        ("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", TemplateRefusalError, "generation"),
    ],
)
def test_a_template_has_limits(attack, error, fact, monkeypatch):
    if error is InputError:  # the others end long before the limit of a render
        monkeypatch.setattr("shardwise.trainer.runtime.data.chat.template._RENDER_S", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(error, match=fact):
        ChatTemplate(attack, TOKENS).render(EXCHANGES)
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_alarm_that_is_set_while_a_template_is_rendered_stays():
    """As by TERM, which gives a process some seconds to clean up."""

    class Alarm:
        def __str__(self):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            return ""

    before = signal.getsignal(signal.SIGALRM)
    alarm: Any = Alarm()
    ChatTemplate("{{ messages[0].content }}", TOKENS).render([user(alarm)])
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return byte_level_folder(tmp_path_factory.mktemp("tokenizer") / "folder", bos="<s>", eos="</s>")


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    return shutil.copytree(tokenizer_folder, tmp_path / "folder")


def put(folder, **settings):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_the_tokenizers_template_knows_its_tokens(folder):
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ image_token }}{{ audio_token }}"
    eos = {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False}
    put(folder, chat_template=source, eos_token=eos, image_token="#", extra_special_tokens={"audio_token": "%"})
    text = load_chat_template(None, folder).render(EXCHANGES).text
    assert text == "<s>U1</s>#%"
    assert text == AutoTokenizer.from_pretrained(folder).apply_chat_template(EXCHANGES, tokenize=False)


def test_files_come_before_settings_the_jobs_choice_before_both_and_tools_have_a_template_for_them(folder):
    assert load_chat_template(None, folder) is None
    put(folder, chat_template=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    template = load_chat_template(None, folder)
    assert (template.render(EXCHANGES).text, template.render(EXCHANGES, TOOLS).text) == ("plain", "tools")
    assert load_chat_template("tool_use", folder).render(EXCHANGES).text == "tools"
    (folder / "chat_template.jinja").write_text("file")
    assert load_chat_template(None, folder).render(EXCHANGES).text == "file"
    (folder / "mine.jinja").write_text("mine{{ eos_token }}")
    assert load_chat_template(str(folder / "mine.jinja"), folder).render(EXCHANGES).text == "mine</s>"


@pytest.mark.parametrize(
    ("settings", "choice", "fact"),
    [
        ([{"name": each, "template": "a"} for each in ("default", "rag")], "lama3", r"lama3\b(?s:.*)alpaca.*rag"),
        ([{"name": "default"}], None, r"tokenizer_config\.json.*chat_template"),
        ("a\n{% genera %}", None, r"line 2: .*'genera'"),
    ],
)
def test_a_template_that_cannot_be_loaded_is_an_input_error(settings, choice, fact, folder):
    put(folder, chat_template=settings)
    with pytest.raises(InputError, match=fact):
        load_chat_template(choice, folder)


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_the_tokens_that_a_template_is_said_to_need_are_those_it_writes(name, folder, tmp_path):
    """The others have all of them but those of Mistral."""
    *_, messages = (chat for chat, text in zip(CHATS, FORMATS[name], strict=True) if text is not None)
    text = named(name).render(messages).text
    markers = set(re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>|\[/?INST\]", text))
    bare = load_tokenizer(byte_level_folder(tmp_path / "bare", bos=None, eos="</s>", special=("</s>",)))
    is_plain_text = name in ("llama2", "mistral_v1", "zephyr")
    assert set(missing_tokens(named(name), bare)) == (set() if is_plain_text else markers)
    assert missing_tokens(named(name), load_tokenizer(folder)) == (("[INST]", "[/INST]") if name == "mistral" else ())
