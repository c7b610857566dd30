"""A pytest plugin: however a run of tests ends, nothing of it goes on running.

TERM and HUP end the tests as Ctrl-C does: fixtures are torn down, then the exit code is 128 plus the signal's number.
After KILL, a keeper removes what is left (`suite_remains`); each run also does so when it starts, in case the keeper
was killed as well. With pytest-xdist each worker has a keeper of its own, and the signals are passed on to workers.
"""

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType

import pytest
import suite_remains
from suite_remains import MARK, remove_remains, suite_name, suites_of

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_ENDED_BY = pytest.StashKey[signal.Signals]()
_HANDLED = pytest.StashKey[list[signal.Signals]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    handled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]  # nohup: HUP stays ignored
    session.config.stash[_HANDLED] = handled
    for number in handled:
        signal.signal(number, _handler(session))
    suite = suite_name(os.getpid()) if Path("/proc/self/stat").exists() else None
    if suite is not None:
        os.environ.pop(MARK, None)
        remove_remains()
        _start_keeper(suite)
        os.environ[MARK] = suite


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    number = session.config.stash.get(_ENDED_BY, None)
    if number is not None and not hasattr(session.config, "workerinput"):  # xdist expects of a worker pytest's own code
        session.exitstatus = 128 + number


def pytest_unconfigure(config: pytest.Config) -> None:
    """From here on there is nothing to tear down: a signal ends the process as it would any other."""
    for number in config.stash.get(_HANDLED, ()):
        signal.signal(number, signal.SIG_DFL)


def _handler(session: pytest.Session) -> "signal._HANDLER":
    suite_pid = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != suite_pid:  # a process that a test has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif _ENDED_BY not in session.config.stash:  # a second signal does not cut the teardown short
            session.config.stash[_ENDED_BY] = signal.Signals(number)
            reason = f"ended by {signal.Signals(number).name}"
            session.shouldstop = reason  # if a test catches the exception
            if session.config.pluginmanager.hasplugin("dsession"):
                _pass_on(number)
            raise KeyboardInterrupt(reason)  # pytest then tears down its fixtures

    return end


def _pass_on(number: int) -> None:
    """Sends the signal to the workers of pytest-xdist: children that carry the name of this run."""
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if os.environ[MARK] in suites_of(pid):
                os.kill(pid, number)


def _close_all(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _start_keeper(suite: str) -> None:
    """Starts the process that outlives this one; the pipe between them is never closed but by the end of this one."""
    read_end, write_end = os.pipe()
    held = [write_end]
    os.register_at_fork(after_in_child=lambda: _close_all(held))
    python = Path("/proc/self/exe").resolve()  # not sys.executable: nothing of the virtual environment is needed
    argv, nothing = [str(python), "-I", "-S", suite_remains.__file__, suite], subprocess.DEVNULL
    subprocess.run(argv, stdin=read_end, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True, check=True)
    os.close(read_end)
