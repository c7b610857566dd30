"""The end of a run is reported: to a URL by a POST, to a command on its standard input, never by a shell."""

import json
from contextlib import contextmanager

import pytest
from http_answers import answering
from report_factory import make_report
from tracker_factory import write_program
from werkzeug.wrappers import Response

from shardwise.launch.track.notify import NotifyError, NotifyTracker, message
from shardwise.launch.track.tracker import NOT_SAVED, End, Incident
from shardwise.trainer.spec.report import Ending

FINISHED = End(make_report())


class Listener:
    """Keeps the requests that it gets, of any method, and answers each with its status and headers."""

    def __init__(self, status):
        self.status, self.headers, self.got, self.address = status, {}, [], ""

    def answer(self, request):
        self.got.append((request.full_path.rstrip("?"), request.headers, request.get_json(silent=True)))
        return Response("", self.status, self.headers)


@contextmanager
def listening(status=200):
    listener = Listener(status)
    with answering(listener.answer) as url:
        listener.address = url.removeprefix("http://")
        yield listener


def notify_end(run_dir, *notify, end=FINISHED):
    NotifyTracker(run_dir, name="bot-1", notify=notify, command_timeout_s=300).end(end)


def test_the_message_names_the_run_its_progress_and_its_host(tmp_path):
    report = make_report(ending=Ending.PREEMPTED, step=7, num_steps=30, final_loss=2.5, error=None)
    received = message(End(report), run_dir=tmp_path, name="bot-1")
    assert received.pop("host")
    progress = {"name": "bot-1", "ending": "preempted", "step": 7, "num_steps": 30, "loss": 2.5, "error": None}
    assert received == progress | {"run_dir": str(tmp_path)}
    died = message(End(None, "the supervisor died"), run_dir=tmp_path, name="bot-1")
    assert (died["ending"], died["step"], died["error"]) == ("failed", 0, "the supervisor died")


def test_a_checkpoint_that_was_not_saved_is_notified_while_the_run_goes_on(tmp_path, capsys):
    with listening() as server:
        tracker = NotifyTracker(tmp_path, name="bot-1", notify=(f"http://{server.address}/",))
        tracker.incident(Incident("stalled", "no heartbeat"))
        tracker.incident(Incident(NOT_SAVED, "no checkpoint at step 6: the disk is full"))
        server.status = 500
        tracker.incident(Incident(NOT_SAVED, "no checkpoint at step 9: the disk is full"))
        server.status = 200
        tracker.end(FINISHED)
    assert "notify: 127.0.0.1 was not notified: it returned status 500" in capsys.readouterr().err
    received = [(body["ending"], body["error"]) for _, _, body in server.got]
    assert received[0] == (None, "no checkpoint at step 6: the disk is full")
    assert received[-1] == ("finished", None) and len(received) == 3


def test_a_url_gets_a_post_and_its_password_is_in_a_header_alone(tmp_path, monkeypatch):
    with listening() as server:
        notify_end(tmp_path, f"http://me:pa%20ss@{server.address}/hook?to=me")
        monkeypatch.setenv("TEAM_WEBHOOK", f"http://{server.address}/other")
        notify_end(tmp_path, "$TEAM_WEBHOOK")
    (path, headers, received), (other, _, again) = server.got
    assert (path, headers["Content-Type"], received["ending"]) == ("/hook?to=me", "application/json", "finished")
    assert headers["Authorization"] == "Basic bWU6cGEgc3M="
    assert "pa" not in headers["Host"] and "ss@" not in json.dumps(received)
    assert (other, again["ending"]) == ("/other", "finished")
    monkeypatch.delenv("TEAM_WEBHOOK")
    with pytest.raises(NotifyError, match=r"\$TEAM_WEBHOOK"):
        notify_end(tmp_path, "$TEAM_WEBHOOK")


def test_an_error_names_the_host_and_nothing_else_of_the_url(tmp_path):
    with listening(403) as server:
        places = {server.address: "403", "127.0.0.1:9": "refused", "127.0.0.1:99999": "was not notified"}
        for place, fact in places.items():
            with pytest.raises(NotifyError) as caught:
                notify_end(tmp_path, f"http://me:word@{place}/services/T0/secret")
            assert "127.0.0.1" in str(caught.value) and fact in str(caught.value)
            assert "secret" not in str(caught.value) and "word" not in str(caught.value)


def test_a_command_gets_its_arguments_unchanged_and_the_message_on_standard_input(tmp_path):
    keep = f"json.dump([sys.argv[1:], json.load(sys.stdin)], open({str(tmp_path / 'received')!r}, 'w'))"
    program = write_program(tmp_path, f"import json, sys\n{keep}\n")
    notify_end(tmp_path, str(program), "$HOME", "; touch x", "two arguments")
    arguments, received = json.loads((tmp_path / "received").read_text())
    assert arguments == ["$HOME", "; touch x", "two arguments"]
    assert received["name"] == "bot-1"


@pytest.mark.parametrize(
    ("text", "limit_s", "error"),
    [
        ("import sys\nsys.exit('first\\nno such person')", 300, r"^program .* 1: no such person$"),
        ("import time\ntime.sleep(600)", 0.3, r"program .* 0\.3 s"),
        (None, 300, r"missing .*No such file"),
    ],
)
def test_a_command_that_does_not_end_well_is_an_error(tmp_path, text, limit_s, error):
    program = tmp_path / "missing" if text is None else write_program(tmp_path, text)
    with pytest.raises(NotifyError, match=error):
        NotifyTracker(tmp_path, name="bot-1", notify=(str(program),), command_timeout_s=limit_s).end(FINISHED)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_no_credential_leaves_the_host(tmp_path, status):
    with listening(200) as other, listening(status) as server:
        for host in ("127.0.0.1", "localhost"):
            server.headers["Location"] = f"http://{other.address.replace('127.0.0.1', host)}/services/secret"
            with pytest.raises(NotifyError, match=f"127.0.0.1 was not notified: .*{status}.* {host};") as caught:
                notify_end(tmp_path, f"http://me:word@{server.address}/hook")
            assert "secret" not in str(caught.value)
        assert other.got == [] and len(server.got) == 2


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_every_status_of_success_is_one(tmp_path, status):
    with listening(status) as server:
        notify_end(tmp_path, f"http://{server.address}/hook")
    assert len(server.got) == 1
