"""Chat templates: the tokenizer's own, one of ours by name, or a file, rendered as transformers renders them.

A template gets what `apply_chat_template` of transformers gives it (utils/chat_template_utils.py): `messages` without
keys that hold nothing, `tools`, `add_generation_prompt`, the tokenizer's named tokens, `raise_exception`, a `tojson`
that escapes no HTML, loop controls and {% generation %} blocks, in jinja2's immutable sandbox, as a template from a hub
is untrusted code; its time and the length of what it repeats have limits. transformers itself is not imported: that
takes a second in each process, and its generation blocks are placed wrongly inside macros.

`strftime_now` returns one fixed day, the default of the templates of Llama 3.1 and 3.2: today's date would make other
ids of the same data tomorrow, in a cache that is keyed by content, and after a resume. `prints_date` is true for
templates that use it.

The marks that a template puts around the assistant's text travel through jinja2 as noncharacters of Unicode, which text
never holds; a message that does is refused.

Messages are prepared as transformers does: keys that hold nothing are removed, since many templates print "None" for
them; reasoning is given under every name that a template may read; values that are not plain JSON (a date of a Parquet
file) become text, as a template must not be handed objects with methods. Beyond transformers: a list of parts that are
all text becomes one text where the template reads no lists, and the arguments of a tool call, in OpenAI's form JSON in
a string, become the object that templates print, or the string for a template that concatenates strings (DeepSeek's).
"""

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.trainer.runtime.data.sources import Message
from shardwise.trainer.runtime.data.tokenizer import END_OF_TEXT, TextTokenizer, named_tokens
from shardwise.trainer.spec.data.shapes import TEMPLATE_TOKENS
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

TEMPLATE_DAY = datetime(2024, 7, 26)
OPENS_LEARNED, CLOSES_LEARNED = "\ufdd0", "\ufdd1"
OPENS_SLOT, CLOSES_SLOT = "\ufdd2", "\ufdd3"
RESERVED = (OPENS_LEARNED, CLOSES_LEARNED, OPENS_SLOT, CLOSES_SLOT)
# What a template may raise on a conversation it was not made for; jinja2's own errors are TemplateErrors.
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_RENDER_S = 60.0  # of one conversation, which is a matter of microseconds
_MOST_REPEATED = 1 << 24
_MOST_POWER = 64
_ANOTHER = "it is broken, or made to do harm: name another with data.chat_template"
_TOKEN = re.compile(r"<\|[^\s|<>]+\|>|<\uff5c[^\s\uff5c<>]+\uff5c>|<(?:start|end)_of_turn>")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE_NAMES = tuple(TEMPLATE_TOKENS)
_TOOL_USE = "tool_use"  # transformers' name of the template for conversations with tools
_MORE_TEMPLATES = "additional_chat_templates"
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE = "a part of a message"


class TemplateRefusalError(Exception):
    """The template, or we, cannot put this conversation into text; the message is the reason."""


class TemplateFaultError(TemplateRefusalError):
    """The template raised an error, its own or one of jinja2."""


class ChatText(NamedTuple):
    """A conversation as text, and the stretches that the template marks as the assistant's, in characters."""

    text: str
    learned: tuple[tuple[int, int], ...]


class ChatTemplate:
    """One chat template, or two where a tokenizer has another for conversations with tools.

    `source` and `tool_source` belong into the name of a cache; `named_tokens` are the values of {{ bos_token }} and its
    like.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], *, name: str | None = None, tool_source: str | None = None
    ) -> None:
        """InputError for a source that jinja2 does not read; `name` is that of one of ours."""
        self.source, self.tool_source, self.name = source, tool_source, name
        self.named_tokens = dict(tokens)
        sources = [source] if tool_source is None else [source, tool_source]
        trees = [_parsed(text) for text in sources]
        self._plain, *others = (_environment().from_string(text) for text in sources)
        self._with_tools = others[0] if others else self._plain
        self.prints_date = any(name.name == "strftime_now" for tree in trees for name in tree.find_all(nodes.Name))
        self.marks_learned = all(_GENERATION.search(text) for text in sources)
        self.literals = tuple(literal for tree in trees for literal in _literals(tree))
        self.tested_text = frozenset(word for tree in trees for word in _tested_text(tree))
        self.variables = frozenset(name for tree in trees for name in meta.find_undeclared_variables(tree))
        self.names = frozenset(self.literals).union(
            node.attr for tree in trees for node in tree.find_all(nodes.Getattr)
        )  # among them those of all keys that it reads

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> ChatText:
        """The conversation as text; TemplateRefusalError with the reason where the template has no form for it.

        `arguments` are those that a row hands to its template, such as `enable_thinking`.
        """
        template = self._with_tools if tools else self._plain
        try:
            with _time_limit():
                text = template.render(
                    messages=list(messages),
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    **{"documents": None, **self.named_tokens, **(arguments or {})},
                )
        except MemoryError as error:
            raise InputError(f"the chat template fills the memory; {_ANOTHER}") from error
        except _FAULTS as error:
            message = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TemplateFaultError(f"the chat template refuses it: {message}") from error
        return _without_marks(text)


def load_chat_template(choice: str | None, tokenizer_folder: Path | None) -> ChatTemplate | None:
    """The template that `data.chat_template` chooses: one of TEMPLATE_NAMES, one of the tokenizer, or a file.

    None chooses the tokenizer's own, if it has one. `tokenizer_folder` is None for a tokenizer that is trained on the
    data. InputError for any other choice.
    """
    tokens = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    own: dict[str, str] = {}
    if tokenizer_folder is not None:
        tokens, own = named_tokens(tokenizer_folder), _templates_of(tokenizer_folder)
    if choice is None:
        if "default" not in own:
            return None
        return ChatTemplate(own["default"], tokens, tool_source=own.get(_TOOL_USE))
    if choice in TEMPLATE_NAMES:
        return ChatTemplate(_read(_TEMPLATES / f"{choice}.jinja"), tokens, name=choice)
    if choice in own:
        return ChatTemplate(own[choice], tokens)
    if Path(choice).is_file():
        return ChatTemplate(_read(Path(choice)), tokens)
    names = ", ".join([*TEMPLATE_NAMES, *sorted(own.keys() - {"default", _TOOL_USE})])
    raise InputError(f"data.chat_template: {choice} is no file and no template by that name;\nthere are {names}")


def missing_tokens(template: ChatTemplate, tokenizer: TextTokenizer) -> tuple[str, ...]:
    """Tokens that the template writes and the tokenizer would cut into pieces, in the order of the template.

    A model learns such a marker in pieces slowly, and no server stops there.
    """
    return tuple(token for token in written_tokens(template) if tokenizer.tokenizer.token_to_id(token) is None)


def written_tokens(template: ChatTemplate) -> tuple[str, ...]:
    """The special tokens of the template; of a template that is not ours, all that looks like one."""
    if template.name is not None:
        return TEMPLATE_TOKENS[template.name]
    return tuple(dict.fromkeys(_TOKEN.findall("\0".join(template.literals))))


def write_chat_template(template: ChatTemplate, folder: Path) -> None:
    """Writes the template where transformers looks first, before tokenizer_config.json."""
    (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    if template.tool_source is not None:
        (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
        (folder / _MORE_TEMPLATES / f"{_TOOL_USE}.jinja").write_text(template.tool_source, encoding="utf-8")


def _templates_of(folder: Path) -> dict[str, str]:
    """The tokenizer's templates by name; files come before tokenizer_config.json, as in transformers."""
    files = {path.stem: _read(path) for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = _read(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    if files or not path.is_file():
        return files
    try:
        found = json.loads(_read(path)).get("chat_template")
        if isinstance(found, list):
            return {each["name"]: each["template"] for each in found}
        return {} if found is None else {"default": found}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its chat_template cannot be read: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not text in UTF-8: {error.reason} at byte {error.start}") from error


def _parsed(source: str) -> nodes.Template:
    try:
        return _environment().parse(source)
    except TemplateSyntaxError as error:
        raise InputError(
            f"data.chat_template: jinja2 does not read the template: line {error.lineno}: {error.message}"
        ) from error


class _GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %} around the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{OPENS_LEARNED}{caller()}{CLOSES_LEARNED}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which limits ranges but neither products nor powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self,
        context: Context,
        operator: str,
        left: Any,  # noqa: ANN401 - any value of a template
        right: Any,  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401 - as above
        if operator == "**" and abs(right) > _MOST_POWER:
            raise OverflowError(f"a power above {_MOST_POWER}")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and len(repeated) * times > _MOST_REPEATED:
                raise OverflowError(f"more than {_MOST_REPEATED} characters of a repeated text")
        return super().call_binop(context, operator, left, right)


@contextmanager
def _time_limit() -> Iterator[None]:
    """InputError if a template takes longer than `_RENDER_S`; only the main thread of a process has an alarm."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise InputError(f"the chat template does not end: {_RENDER_S:g} s for one conversation; {_ANOTHER}")

    handler = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, _RENDER_S)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is end:  # else TERM has set an alarm of its own
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, loopcontrols],
        autoescape=False,  # a template makes text for a model, not HTML
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DAY.strftime
    return environment


def _to_json(
    value: Any,  # noqa: ANN401 - any JSON
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _without_marks(text: str) -> ChatText:
    if OPENS_LEARNED not in text and CLOSES_LEARNED not in text:
        return ChatText(text, ())
    pieces = re.split(f"([{OPENS_LEARNED}{CLOSES_LEARNED}])", text)
    if pieces[1::2] != [OPENS_LEARNED, CLOSES_LEARNED] * (len(pieces) // 4):
        raise TemplateRefusalError("the chat template puts one generation block inside another")
    length = 0
    begins, learned = 0, []
    for place, piece in enumerate(pieces):
        if place % 4 == 1:
            begins = length
        elif place % 4 == 3:
            learned.append((begins, length))
        else:
            length += len(piece)
    return ChatText("".join(pieces[::2]), tuple(learned))


def _literals(tree: nodes.Template) -> list[str]:
    """Every piece of text that stands in the template."""
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    return texts + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def _tested_text(tree: nodes.Template) -> list[str]:
    """Strings that the template may look for in a message, such as </think>: '...' in x, x.split('...')."""
    comparisons = tree.find_all(nodes.Compare)
    operands: list[nodes.Node] = [each.expr for each in comparisons if each.ops[0].op in ("in", "notin")]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            operands.extend(call.args)
    literals = [operand.value for operand in operands if isinstance(operand, nodes.Const)]
    return [each for each in literals if isinstance(each, str) and len(each.strip()) > 2]


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Copies of the messages as plain JSON without nulls; TemplateRefusalError where one is no message."""
    if not messages:
        raise TemplateRefusalError("has no messages")
    plain = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TemplateRefusalError(f"message {number} has no role")
        plain.append({key: _plain(value) for key, value in message.items() if value is not None})
    return plain


def prepared_messages(messages: Sequence[Message], *, supports_parts: bool) -> list[Message]:
    """The messages as a template reads them: reasoning under all of its names, parts as one text where it reads none.

    Empty reasoning is none: gpt-oss would write an empty analysis for it.
    TemplateRefusalError for parts other than text.
    """
    prepared = []
    for number, given in enumerate(messages, 1):
        message = {name: value for name, value in given.items() if value != "" or name not in REASONING_NAMES}
        reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        content = message.get("content")
        if isinstance(content, list) and not supports_parts:
            message = {**message, "content": _joined(content, number)}
        prepared.append(message)
    return prepared


def with_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    """The messages with the arguments of tool calls as objects, or as JSON in a string."""
    return [
        {**message, "tool_calls": [_with_arguments(call, as_text=as_text) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def with_functions(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools, each as OpenAI's form has it: with its `function` inside."""
    if tools is None:
        return None
    return [
        {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool for tool in tools
    ]


def supports_parts(template: ChatTemplate) -> bool:
    """True if the template reads content that is a list of parts."""
    try:
        text = template.render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]).text
    except TemplateRefusalError:
        return False
    return _PROBE in text and "'type'" not in text and '"type"' not in text  # printed as a list is not read


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, str):
        for character in RESERVED:
            if character in value:
                raise TemplateRefusalError(f"holds the noncharacter U+{ord(character):04X}, which no text has")
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)


def _joined(parts: Sequence[Any], number: int) -> str:
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise TemplateRefusalError(
            f"message {number} holds parts other than text, which the chat template does not read"
        )
    return "".join(part["text"] for part in parts)


def _with_arguments(call: Any, *, as_text: bool) -> Any:  # noqa: ANN401 - any JSON
    """One tool call, in OpenAI's form with a `function` or without."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], as_text=as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, dict):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if as_text or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return call
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
