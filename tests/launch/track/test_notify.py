"""Whoever is to be told of an end is told: a URL by a POST, a command on its standard input, never by a shell."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from report_factory import make_report
from tracker_factory import write_program

from shardwise.launch.track.notify import NotifyError, NotifyTracker, message
from shardwise.launch.track.tracker import End
from shardwise.trainer.spec.report import Ending

FINISHED = End(make_report())


class _Server(HTTPServer):
    def __init__(self, status):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.got = status, []


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers), json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format, *args):  # noqa: A002 - the name in the class above
        pass


@contextmanager
def listening(status=200):
    with _Server(status) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def tell(run_dir, *notify, end=FINISHED):
    NotifyTracker(run_dir, name="bot-1", notify=notify).end(end)


def test_the_message_says_who_how_far_and_where(tmp_path):
    report = make_report(ending=Ending.PREEMPTED, step=7, num_steps=30, final_loss=2.5, error=None)
    told = message(End(report), run_dir=tmp_path, name="bot-1")
    assert {**told, "host": None} == {
        "name": "bot-1",
        "ending": "preempted",
        "step": 7,
        "num_steps": 30,
        "loss": 2.5,
        "error": None,
        "run_dir": str(tmp_path),
        "host": None,
    }
    assert told["host"]


def test_a_url_gets_a_post(tmp_path):
    with listening() as server:
        tell(tmp_path, f"http://127.0.0.1:{server.server_port}/hook?to=me")
    ((path, headers, told),) = server.got
    assert (path, headers["Content-Type"], told["ending"]) == ("/hook?to=me", "application/json", "finished")


def test_a_url_in_a_variable_is_read_when_somebody_is_told(tmp_path, monkeypatch):
    with listening() as server:
        monkeypatch.setenv("TEAM_WEBHOOK", f"http://127.0.0.1:{server.server_port}/hook")
        tell(tmp_path, "$TEAM_WEBHOOK")
    ((path, _, told),) = server.got
    assert (path, told["ending"]) == ("/hook", "finished")


def test_a_variable_that_is_gone_by_then_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("TEAM_WEBHOOK", raising=False)
    with pytest.raises(NotifyError, match=r"\$TEAM_WEBHOOK"):
        tell(tmp_path, "$TEAM_WEBHOOK")


def test_user_and_password_go_into_a_header_and_nowhere_else(tmp_path):
    with listening() as server:
        tell(tmp_path, f"http://me:pa%20ss@127.0.0.1:{server.server_port}/")
    ((path, headers, told),) = server.got
    assert headers["Authorization"] == "Basic bWU6cGEgc3M="
    assert "@" not in path and "pa" not in headers["Host"] and "ss@" not in json.dumps(told)


def test_an_answer_that_refuses_names_the_host_and_no_more(tmp_path):
    with listening(403) as server, pytest.raises(NotifyError) as caught:
        tell(tmp_path, f"http://me:word@127.0.0.1:{server.server_port}/services/T0/secret")
    assert "127.0.0.1" in str(caught.value) and "403" in str(caught.value)
    assert "secret" not in str(caught.value) and "word" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:word@127.0.0.1:9/secret", "http://me:word@127.0.0.1:99999/secret"])
def test_a_host_that_is_not_there_is_a_sentence_without_the_url(url, tmp_path):
    with pytest.raises(NotifyError) as caught:
        tell(tmp_path, url)
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value) and "word" not in str(caught.value)


def test_a_command_gets_its_words_as_they_are_and_the_message_on_standard_input(tmp_path):
    text = f"import json, sys\njson.dump([sys.argv[1:], json.load(sys.stdin)], open({str(tmp_path / 'told')!r}, 'w'))\n"
    program = write_program(tmp_path, text)
    tell(tmp_path, str(program), "$HOME", "; touch x", "two words")
    words, told = json.loads((tmp_path / "told").read_text())
    assert words == ["$HOME", "; touch x", "two words"]
    assert told["name"] == "bot-1"


def test_a_command_that_fails_is_its_exit_code_and_its_last_line(tmp_path):
    program = write_program(tmp_path, "import sys\nsys.exit('first\\nno such person')")
    with pytest.raises(NotifyError, match=r"^program .* 1: no such person$"):
        tell(tmp_path, str(program))


def test_a_command_that_hangs_is_ended(tmp_path):
    program = str(write_program(tmp_path, "import time\ntime.sleep(600)"))
    with pytest.raises(NotifyError, match=r"program .* 0\.3 s"):
        NotifyTracker(tmp_path, name="bot-1", notify=(program,), command_timeout_s=0.3).end(FINISHED)


def test_a_command_that_cannot_be_started_is_a_sentence(tmp_path):
    with pytest.raises(NotifyError, match=r"gone .*No such file"):
        tell(tmp_path, str(tmp_path / "gone"))


def test_a_supervisor_that_died_is_a_failure(tmp_path):
    told = message(End(None, "the supervisor died"), run_dir=tmp_path, name="bot-1")
    assert (told["ending"], told["step"], told["error"]) == ("failed", 0, "the supervisor died")
