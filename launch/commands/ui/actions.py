"""What pages can do where `--allow-actions` permits it: stop a run, chat with its model, start the explorer's own job.

A run is stopped by the code of `shardwise cancel`. A training is the command that the explorer shows, as a process of
its own session, which goes on when the pages end. Names are those of directories that exist; a command comes from the
form alone, of which every field is one that the explorer offers.
"""

import io
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from shardwise.launch.commands.follow import run_cancel
from shardwise.launch.commands.plan import machines, start_and_repeat
from shardwise.launch.commands.ui.explorer import HERE, Form, read_form
from shardwise.launch.commands.ui.pages import Query
from shardwise.launch.commands.ui.render import address
from shardwise.launch.commands.ui.runs import Runs, Started
from shardwise.launch.options import CancelOptions, parse_command_line
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import InputError

_EARLY_END_S = 1.0  # a mistake in the command shows within this time


class Done(NamedTuple):
    """What an action did."""

    text: str = ""
    run: str = ""  # of which it was an action
    shows: str = ""  # the address of the page that shows it, in place of the text


class Actions:
    """The actions of one server."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lock = Lock()  # one start at a time, so that two clicks start one training

    def act(self, query: Query) -> Done:
        """Does what a request names; InputError for anything else."""
        known: Mapping[str, Callable[[Query], Done]] = {
            "stop": self._stop,
            "start": self._start,
            "ask": self._ask,
            "forget": self._forget,
        }
        action = known.get(query.get("action", [""])[0])
        if action is None:
            raise InputError(f"there is no such action; there are {', '.join(known)}")
        return action(query)

    def _stop(self, query: Query) -> Done:
        output = io.StringIO()
        run_cancel(CancelOptions(str(self._path(query))), Console(output))
        return Done(output.getvalue(), _name(query))

    def _ask(self, query: Query) -> Done:
        self._runs.chats.begin(_name(query), self._path(query), query.get("question", [""])[0])
        return Done(shows=address("/chat", name=_name(query)) + "#question")

    def _forget(self, query: Query) -> Done:
        self._path(query)
        self._runs.chats.forget(_name(query))
        return Done(shows=address("/chat", name=_name(query)) + "#question")

    def _path(self, query: Query) -> Path:
        name = _name(query)
        path = self._runs.names().get(name)
        if path is None:
            raise InputError(f"{name}: there is no such run in {self._runs.folder}")
        return path

    def _start(self, query: Query) -> Done:
        command = training_of(read_form(query, self._runs.own_file), self._runs)
        with self._lock:
            started = self._begin(command)
        with suppress(subprocess.TimeoutExpired):
            started.process.wait(_EARLY_END_S)
        return Done(f"{command}\n{started.state}")

    def _begin(self, command: str) -> Started:
        if any(each.command == command and each.process.poll() is None for each in self._runs.started):
            raise InputError(f"it runs already: {command}")
        output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the server
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.launch.cli", *shlex.split(command)[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._runs.started.append(Started(command, process, output))
        return self._runs.started[-1]


def _name(query: Query) -> str:
    return query.get("name", [""])[0]


def training_of(form: Form, runs: Runs) -> str:
    """The command that trains the plan of a form; InputError if it is not the own job of this machine."""
    if runs.own_file is None or form.model != str(runs.own_file) or form.card != HERE:
        raise InputError("only the job file of the command line is started, on this machine: shardwise ui JOB.yaml")
    _, options = parse_command_line(form.arguments)
    ((_, inputs),) = machines(options)
    *before, training = start_and_repeat(options, inputs)[0]
    if before:
        raise InputError(f"it is a model without data; write its job first: {before[0]}")
    return training
