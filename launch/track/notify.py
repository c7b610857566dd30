"""`log.notify` as a tracker: reports the end of a run to a URL or a command.

The notification is one JSON object: a URL gets it as the body of a POST, a command on its standard input. No shell runs
the command, and it ends with the process of the trackers. The URL may be in an environment variable, which is read only
when the notification is sent. Messages name the host or the program alone, since the rest of a URL is often all that
protects it. No redirect is followed: the content and the credentials go to the host that the job names, or nowhere.
"""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.launch.track.tracker import NOT_SAVED, End, Incident, Tracker, show
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.job.kinds import HintError, check_url, is_url, variable_of
from shardwise.trainer.spec.secrets import printable, redact

POST_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0


class NotifyError(Exception):
    """The notification was not sent; the message names no secret."""


class NotifyTracker(Tracker):
    """Sends a notification at the end, and one when a checkpoint could not be saved."""

    name = "notify"

    def __init__(
        self, run_dir: Path, *, name: str, notify: tuple[str, ...], command_timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._run_dir, self._name, self._notify = run_dir, name, notify
        self._command_timeout_s = command_timeout_s

    def incident(self, incident: Incident) -> None:
        """Sends one that has no ending, while the run goes on; a failure leaves the one of the end."""
        if incident.title != NOT_SAVED:
            return
        try:
            self._send(problem_message(incident, run_dir=self._run_dir, name=self._name))
        except NotifyError as error:
            show(f"{self.name}: {error}")

    def end(self, end: End) -> None:
        """Sends the notification; NotifyError if that fails."""
        self._send(message(end, run_dir=self._run_dir, name=self._name))

    def _send(self, notification: Mapping[str, Any]) -> None:
        content = json.dumps(notification).encode()
        variable = variable_of(self._notify)
        if variable is not None:
            post(url_in(variable), content)
        elif is_url(self._notify):
            post(self._notify[0], content)
        else:
            run_command(self._notify, content, timeout_s=self._command_timeout_s)


def url_in(variable: str, environment: Mapping[str, str] = os.environ) -> str:
    """The URL in an environment variable; NotifyError, which does not show the value, if it is not a URL."""
    url = environment.get(variable, "").strip()
    if not url:
        raise NotifyError(f"${variable} is not set in this environment; it should hold the URL to notify")
    try:
        check_url(url)
    except HintError as error:
        raise NotifyError(f"${variable} does not hold a URL: {error}") from None
    return url


def message(end: End, *, run_dir: Path, name: str) -> dict[str, Any]:
    """The notification."""
    report = end.report
    tree = {
        "name": name,
        "ending": "failed" if report is None else str(report.ending),
        "step": 0 if report is None else report.step,
        "num_steps": None if report is None else report.num_steps,
        "loss": None if report is None else report.final_loss,
        "error": end.error if report is None else report.error,
        "run_dir": str(run_dir.absolute()),
        "host": socket.gethostname(),
    }
    return dict(codec.redacted(tree))


def problem_message(incident: Incident, *, run_dir: Path, name: str) -> dict[str, Any]:
    """The notification of a problem while the run goes on: its `ending` is null."""
    return {**message(End(None, incident.text), run_dir=run_dir, name=name), "ending": None, "step": None}


def post(url: str, content: bytes) -> None:
    """Posts JSON; NotifyError without a 2xx within POST_TIMEOUT_S, whatever the server sends meanwhile."""
    from urllib.parse import urlsplit

    outcome: list[NotifyError | None] = []

    def send() -> None:
        try:
            _post(url, content)
            outcome.append(None)
        except NotifyError as error:
            outcome.append(error)

    sender = threading.Thread(target=send, name="notify", daemon=True)
    sender.start()
    sender.join(POST_TIMEOUT_S)
    problem = outcome[0] if outcome else NotifyError(f"{urlsplit(url).hostname} was not notified: no response in time")
    if problem is not None:
        raise problem


def _post(url: str, content: bytes) -> None:
    """A user and a password in the URL are sent as a header (RFC 7617)."""
    from base64 import b64encode
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import unquote, urlsplit
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        """urllib would repeat a POST as a GET, with its headers, at any host."""

        def redirect_request(self, *_: object) -> None:
            return None

    parts = urlsplit(url)
    headers = {"Content-Type": "application/json", "User-Agent": "shardwise"}
    userinfo, _, place = parts.netloc.rpartition("@")
    if userinfo:
        headers["Authorization"] = "Basic " + b64encode(unquote(userinfo).encode()).decode()
    request = Request(parts._replace(netloc=place).geturl(), data=content, headers=headers, method="POST")  # noqa: S310 - the job file allows http and https alone
    try:
        with build_opener(NoRedirect).open(request, timeout=POST_TIMEOUT_S) as response:
            response.read(1)
    except HTTPError as error:
        error.close()
        target = urlsplit(error.headers.get("Location") or "").hostname or parts.hostname
        hint = f", a redirect to {target}; name the final URL in log.notify" if error.code // 100 == 3 else ""
        raise NotifyError(f"{parts.hostname} was not notified: it returned status {error.code}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = redact(printable(str(getattr(error, "reason", error)).replace(url, "the URL").strip()))
        raise NotifyError(f"{parts.hostname} was not notified: {reason}") from None


def run_command(command: Sequence[str], content: bytes, *, timeout_s: float) -> None:
    """Runs a command with the JSON on its standard input."""
    program = Path(command[0]).name
    argv = [str(Path(command[0]).expanduser()), *command[1:]]
    try:
        completed = subprocess.run(argv, input=content, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotifyError(f"{program} did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise NotifyError(f"{program} could not be started: {error.strerror}") from None
    if completed.returncode != 0:
        lines = redact(completed.stderr.decode(errors="replace")).strip().splitlines()
        raise NotifyError(
            f"{program} ended with exit code {completed.returncode}" + (f": {lines[-1]}" if lines else "")
        )
