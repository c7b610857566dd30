"""What pages can do where `--allow-actions` permits it: stop a run, ask its model, and start the explorer's own job.

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

from shardwise.launch.commands.convert import reply_to
from shardwise.launch.commands.follow import run_cancel
from shardwise.launch.commands.plan import machines, start_and_repeat
from shardwise.launch.commands.ui.explorer import HERE, Form, read_form
from shardwise.launch.commands.ui.pages import Query
from shardwise.launch.commands.ui.runs import Runs, Started
from shardwise.launch.options import CancelOptions, ChatOptions, parse_command_line
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import InputError

_MOST_REPLY_TOKENS = 256
_EARLY_END_S = 1.0  # a mistake in the command shows within this time


class Actions:
    """The actions of one server."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._asking = Lock()
        self._lock = Lock()  # one start at a time, so that two clicks start one training

    def act(self, query: Query) -> str:
        """Does what a request names; returns what was done. InputError for anything else."""
        known: Mapping[str, Callable[[Query], str]] = {"stop": self._stop, "start": self._start, "ask": self._ask}
        action = known.get(query.get("action", [""])[0])
        if action is None:
            raise InputError(f"there is no such action; there are {', '.join(known)}")
        return action(query)

    def _stop(self, query: Query) -> str:
        output = io.StringIO()
        run_cancel(CancelOptions(str(self._path(query))), Console(output))
        return output.getvalue()

    def _ask(self, query: Query) -> str:
        question = query.get("question", [""])[0].strip()
        if not question:
            raise InputError("there is no question")
        path = self._path(query)
        if not self._asking.acquire(blocking=False):
            raise InputError("another question is being computed; its model has the memory")
        try:
            return f"{question}\n\n{reply_to(question, ChatOptions(path, max_new_tokens=_MOST_REPLY_TOKENS))}"
        finally:
            self._asking.release()

    def _path(self, query: Query) -> Path:
        name = query.get("name", [""])[0]
        path = self._runs.names().get(name)
        if path is None:
            raise InputError(f"{name}: there is no such run in {self._runs.folder}")
        return path

    def _start(self, query: Query) -> str:
        command = training_of(read_form(query, self._runs.own_file), self._runs)
        with self._lock:
            started = self._begin(command)
        with suppress(subprocess.TimeoutExpired):
            started.process.wait(_EARLY_END_S)
        return f"{command}\n{started.state}"

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
