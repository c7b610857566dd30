"""Generated rows of the forms that people have, with a marker in every string, and which of them an answer holds."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

MARKER = re.compile(r"mk\d+x\d+y")
FLAGS: list[tuple[str, Any, Any]] = [  # key, value of a turn that is learned, of one that is not
    ("weight", 1, 0), ("train", True, False), ("loss", True, False), ("masked", False, True), ("step_loss_mask", 1, 0),
    ("loss_mask", 1, 0), ("training", True, False), ("trainable", True, False), ("loss_scale", 1.0, 0.0),
]  # fmt: skip
SHELLS = ["{}", "{}", "a {} b", " {}\n", '"{}"', "x\\y {}", "it's {}\nnow"]


class MarkedRow:
    """One row; `learned` and `excluded` are the markers of answers that are and are not to be learned."""

    def __init__(self, seed: int) -> None:
        self._draw, self._seed, self._num = random.Random(seed), seed, 0
        self.learned, self.excluded = set[str](), set[str]()
        self.form = list(self._forms)[seed % len(self._forms)]
        self.row: dict[str, Any] = self._forms[self.form](self)
        self._add("some other column", self.row, 0.2, lambda: {"a": self._text()})
        kwargs = self._one([{"enable_thinking": False}, {"unknown": self._text()}])
        self._add("chat_template_kwargs", self.row, 0.15, lambda: kwargs)

    def _is(self, share: float) -> bool:
        return self._draw.random() < share

    def _one(self, choices: Any) -> Any:
        return self._draw.choice(sorted(choices) if isinstance(choices, set) else choices)

    def _add(self, key: str, target: dict[str, Any], share: float, make: Any) -> None:
        if self._is(share):
            target[key] = make()

    def _marker(self, is_learned: bool | None = None) -> str:
        self._num += 1
        marker = f"mk{self._seed}x{self._num}y"
        if is_learned is not None:
            (self.learned if is_learned else self.excluded).add(marker)
        return marker

    def _text(self, is_learned: bool | None = None) -> str:
        return str(self._one(SHELLS)).format(self._marker(is_learned))

    def _tools(self) -> list[dict[str, Any]]:
        properties = {self._marker(): {"type": "string", "description": self._text()}}
        parameters = {"type": "object", "properties": properties}
        function = {"name": self._marker(), "description": self._text(), "parameters": parameters}
        return [{"type": "function", "function": function}]

    def _call(self, is_learned: bool) -> dict[str, Any]:
        texts = [{}, {"city": self._text(is_learned)}, {"days": 3, "where": {"x": [self._text(is_learned)]}}]
        function = {"name": self._marker(is_learned), "arguments": self._one(texts)}
        return {"type": "function", "id": self._marker(), "function": function}

    def _answer(
        self, *, calls: int = 0, keys: tuple[str, str, str] = ("role", "content", "assistant")
    ) -> dict[str, Any]:
        is_learned, flags = True, {}
        if self._is(0.25):
            key, learned, excluded = self._one(FLAGS)
            is_learned = self._is(0.5)
            flags = {key: learned if is_learned else excluded}
        message = {keys[0]: keys[2], keys[1]: self._text(is_learned), **flags}
        if calls:
            message["tool_calls"] = [self._call(is_learned) for _ in range(calls)]
            message[keys[1]] = self._one(["", message[keys[1]]])
        self._add(
            self._one(["reasoning_content", "thinking", "reasoning"]), message, 0.2, lambda: self._text(is_learned)
        )
        self._add(self._one(["name", "note"]), message, 0.1, lambda: {"k": self._text()})
        return message

    def _asked(self) -> dict[str, Any]:
        message = {"role": "user", "content": self._text()}
        self._add("name", message, 0.1, self._text)
        return message

    def _beside(self, share: float = 0.4) -> dict[str, Any]:
        row: dict[str, Any] = {}
        self._add("system", row, share, self._text)
        self._add("tools", row, share, lambda: self._one([self._tools(), json.dumps(self._tools())]))
        return row

    def _agent(self) -> dict[str, Any]:
        messages = []
        for _ in range(self._one([1, 2])):
            messages.append(self._asked())
            for num_calls in self._one([[1], [2], [1, 1]]):
                messages.append(self._answer(calls=num_calls))
                for call in messages[-1]["tool_calls"]:
                    result = {"role": "tool", "content": self._text()}
                    self._add("tool_call_id", result, 0.8, lambda call=call: call["id"])
                    self._add("name", result, 0.3, lambda call=call: call["function"]["name"])
                    messages.append(result)
            messages.append(self._answer())
        return {"messages": messages, **self._beside()}

    def _sharegpt(self) -> dict[str, Any]:
        keys = ("from", "value", "gpt")
        asked = ({"from": "human", "value": self._text()} for _ in range(2))
        turns = [turn for question in asked for turn in (question, self._answer(keys=keys))]
        return {"conversations": turns, **self._beside()}

    def _llama_factory(self) -> dict[str, Any]:
        call = {"name": self._marker(True), "arguments": {"q": self._text(True)}}
        turns = [("human", self._text()), ("function_call", json.dumps(call)), ("observation", self._text())]
        turns.append(("gpt", self._text(True)))
        tools = [tool["function"] for tool in self._tools()]
        return {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": json.dumps(tools)}

    def _alpaca(self) -> dict[str, Any]:
        row = {"instruction": self._text(), "input": self._one(["", self._text()]), "output": self._text(True)}
        self._add("history", row, 0.3, lambda: [[self._text(), self._text(True)]])
        return row | self._beside(0.2)

    def _dolly(self) -> dict[str, Any]:
        asked = {name: self._text() for name in ("instruction", "context", "category")}
        return {**asked, "response": self._text(True)}

    def _kto(self) -> dict[str, Any]:
        is_good = self._is(0.5)
        answered = self._text(is_good)
        if self._is(0.5):
            return {"prompt": self._text(), "completion": answered, "label": is_good}
        turns = [{"from": "human", "value": self._text()}, {"from": "gpt", "value": answered}]
        return {"conversations": turns, "kto_tag": str(is_good).lower()}

    def _whole_conversations(self) -> dict[str, Any]:
        question = [self._asked()]
        answers = {name: [*question, self._answer()] for name in ("chosen", "rejected")}
        return {"prompt": self._one([question[0]["content"], self._text()]), **answers, **self._beside()}

    def _openai_pair(self) -> dict[str, Any]:
        asked = {"messages": [self._asked()], "tools": self._tools(), "parallel_tool_calls": True}
        return {"input": asked, "preferred_output": [self._answer()], "non_preferred_output": [self._answer()]}

    _forms = {
        "messages": lambda self: {"messages": [self._asked(), self._answer(), self._asked(), self._answer()]},
        "sharegpt": _sharegpt,
        "llama_factory": _llama_factory,
        "agent": _agent,
        "alpaca": _alpaca,
        "dolly": _dolly,
        "text pair": lambda self: {"prompt": self._text(), "completion": self._text(True), **self._beside(0.2)},
        "completion": lambda self: {"prompt": [self._asked()], "completion": [self._answer()], **self._beside()},
        "preference": lambda self: {
            "prompt": [self._asked()], "chosen": [self._answer()], "rejected": [self._answer()], **self._beside()
        },
        "whole conversations": _whole_conversations,
        "openai pair": _openai_pair,
        "kto": _kto,
    }  # fmt: skip


def markers_in(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, frozenset[str]]]:
    """Every marker with the keys that lead to it; JSON in a string is looked into."""
    if isinstance(value, str):
        yield from ((marker, frozenset(keys)) for marker in MARKER.findall(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from markers_in(str(key), keys)
        yield from markers_in(each, (*keys, str(key)))
    for each in value if isinstance(value, list) else ():
        yield from markers_in(each, keys)
