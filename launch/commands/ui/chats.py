"""Conversations with the models of runs that have ended: one reply at a time, each by a process that loads the model.

A conversation lasts as long as the server and is bounded: its oldest questions and replies are removed.
"""

import time
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from shardwise.launch.commands.convert import reply_to
from shardwise.launch.options import ChatOptions
from shardwise.trainer.spec.errors import InputError, ShardwiseError

MOST_TURNS, MOST_CHARACTERS, LONGEST_QUESTION = 20, 32_000, 2_000
_MOST_REPLY_TOKENS = 256


class Turn(NamedTuple):
    """A question and the model's reply."""

    question: str
    reply: str


class Talk(NamedTuple):
    """A conversation as it is now."""

    turns: tuple[Turn, ...] = ()
    num_removed: int = 0  # of the oldest turns
    waiting: str = ""  # the question that is being computed
    since_s: float = 0.0  # by the monotonic clock, of that question
    problem: str = ""  # why the last question has no reply
    note: str = ""  # where the model runs, and whether earlier turns are part of its prompt

    def with_turn(self, turn: Turn, note: str) -> "Talk":
        """The conversation with one turn more, and without the oldest ones beyond the bounds."""
        turns = (*self.turns, turn)
        retained = turns[-MOST_TURNS:]
        while len(retained) > 1 and sum(len(text) for each in retained for text in each) > MOST_CHARACTERS:
            retained = retained[1:]
        return Talk(retained, self.num_removed + len(turns) - len(retained), note=note)


class Chats:
    """The conversations of one server, by the names of runs."""

    def __init__(self) -> None:
        self._talks: dict[str, Talk] = {}
        self._lock, self._model = Lock(), Lock()  # the second one is held while a model is in memory

    def talk(self, name: str) -> Talk:
        """The conversation with the model of a run; an empty one before the first question."""
        with self._lock:
            return self._talks.get(name, Talk())

    def begin(self, name: str, path: Path, question: str) -> Thread:
        """Starts the reply to a question; InputError for none, a long one, or while another is being computed."""
        question = question.replace("\r\n", "\n").strip()
        if not question:
            raise InputError("there is no question")
        if len(question) > LONGEST_QUESTION:
            raise InputError(f"the question has {len(question):,} characters; it may have {LONGEST_QUESTION:,}")
        if not self._model.acquire(blocking=False):
            raise InputError("another question is being computed; its model has the memory")
        talk = self.talk(name)._replace(waiting=question, since_s=time.monotonic(), problem="")
        self._store(name, talk)
        thread = Thread(target=self._reply, args=(name, path, talk), daemon=True)
        thread.start()
        return thread

    def forget(self, name: str) -> None:
        """Ends a conversation; InputError while a reply is being computed."""
        if self.talk(name).waiting:
            raise InputError("a question is being computed; wait for its reply")
        self._store(name, Talk())

    def _reply(self, name: str, path: Path, talk: Talk) -> None:
        earlier = [text for turn in talk.turns for text in turn]
        try:
            reply = reply_to((*earlier, talk.waiting), ChatOptions(path, max_new_tokens=_MOST_REPLY_TOKENS))
            self._store(name, talk.with_turn(Turn(talk.waiting, reply.text), reply.note))
        except ShardwiseError as error:
            self._store(name, talk._replace(waiting="", problem=f"{talk.waiting}\n{error}"))
        except Exception as error:  # noqa: BLE001 - the page shows it; the server goes on
            self._store(name, talk._replace(waiting="", problem=f"internal error: {type(error).__name__}: {error}"))
        finally:
            self._model.release()

    def _store(self, name: str, talk: Talk) -> None:
        with self._lock:
            self._talks[name] = talk
