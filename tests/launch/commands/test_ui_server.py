"""`shardwise ui` over HTTP: who is let in, what is refused, and what a hostile folder of runs can do."""

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import pytest
from msgspec.structs import replace
from reported_run import report_for, step_rows, tiny_plan, write_run
from run_factory import write_submission
from slurm_jobs import write_program
from workplace_factory import wait_for

from shardwise.launch.commands.ui.chats import MOST_TURNS, Talk, Turn
from shardwise.launch.commands.ui.runs import Runs
from shardwise.launch.commands.ui.server import PORT, UiServer, run_ui
from shardwise.launch.options import UiOptions
from shardwise.launch.rundir.lock import locked
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError

HOSTILE = "<img src=x onerror=alert(1)>"
SECRET = "hf_" + "a1B2" * 8


class Answer(NamedTuple):
    status: int
    text: str
    headers: http.client.HTTPMessage


def ask(
    server: UiServer, path: str, *, method: str = "GET", cookie: bool = True, body: str | None = None, **headers: str
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    own = {"Cookie": f"{server.cookie_name}={server.session}"} if cookie else {}
    try:
        connection.request(method, path, body, {**own, **headers})
        reply = connection.getresponse()
        return Answer(reply.status, reply.read().decode(), reply.headers)
    finally:
        connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good runs, and five that somebody made to do harm."""
    folder = tmp_path_factory.mktemp("runs")
    plan = tiny_plan()
    write_run(folder / "good", plan=plan)
    write_run(folder / "failed", plan=plan, report=report_for(plan, error=f"could not push with {SECRET}"))
    write_run(folder / HOSTILE, plan=plan, rows=[{"step": 1, "loss": "<b>1</b>", "lr": [], "step_s": {}}] * 3)
    write_run(folder / "large", plan=plan, rows=[{"step": 10**400, "loss": 1.0, "attempt": 1}] * 3)
    os.mkfifo(write_run(folder / "fifo", plan=plan, rows=[]) / "pipe")
    (folder / "fifo" / "metrics.jsonl").unlink()
    (folder / "fifo" / "pipe").rename(folder / "fifo" / "metrics.jsonl")
    for name in ("linked", os.fsdecode(b"not-\xff-text")):
        run = write_run(folder / name, plan=plan, rows=[])
        (run / "report.json").unlink()
        (run / "report.json").symlink_to("/etc/passwd")
        (run / "attempts" / "²").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "empty" / "plan.json").write_text('{"name": "' + "x" * 10_000)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[UiServer]:
    with UiServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_a_request_without_the_cookie_sees_nothing(server: UiServer):
    for path in ("/", "/run?name=good", "/plan", "/api/", "/api/run?name=good", "/nothing"):
        answer = ask(server, path, cookie=False)
        assert answer.status == 403 and "good" not in answer.text and server.session not in answer.text
    assert ask(server, "/", cookie=False, Cookie=f"{server.cookie_name}={server.token}").status == 403
    assert ask(server, "/", cookie=False, Cookie='\x01=;;="').status == 403


def test_the_token_becomes_a_strict_cookie_and_leaves_the_address(server: UiServer):
    assert ask(server, "/?token=wrong", cookie=False).status == 403
    answer = ask(server, f"/run?name=good&token={server.token}", cookie=False)
    cookie = answer.headers["Set-Cookie"]
    assert answer.status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert 'content="0;url=/run?name=good"' in answer.text and server.token not in answer.text
    elsewhere = ask(server, f"//evil.example/x?token={server.token}", cookie=False)
    assert 'content="0;url=/"' in elsewhere.text
    assert ask(server, "/run?name=good", cookie=False, Cookie=cookie.partition(";")[0]).status == 200
    ticket = server.new_ticket()
    assert [ask(server, f"/?token={ticket}", cookie=False).status for _ in range(2)] == [200, 403], "valid once"


def test_a_foreign_host_is_refused_with_a_valid_cookie_and_a_tunnel_may_have_another_port(server: UiServer):
    for host in ("evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[::1]", "10.0.0.1"):
        answer = ask(server, "/", Host=host)
        assert answer.status == 421 and "good" not in answer.text, host
    assert {ask(server, "/", Host=host).status for host in ("localhost:9000", "127.0.0.1", "LOCALHOST")} == {200}


def test_only_short_reading_requests_are_served(server: UiServer):
    assert [ask(server, "/", method=method).status for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [405] * 4
    for name in ("Content-Length", "Transfer-Encoding"):
        assert ask(server, "/", method="GET", cookie=True, body=None, **{name: "5"}).status == 413
    assert ask(server, "/run?name=" + "x" * 5000).status == 414
    assert ask(server, "/plan?" + "&".join(f"f{n}=1" for n in range(60))).status == 400
    head = ask(server, "/", method="HEAD")
    assert head.status == 200 and head.text == ""


def test_every_answer_forbids_scripts_frames_and_other_origins(server: UiServer):
    for path in ("/", "/plan?model=none", "/api/run?name=good", "/ui.css", "/ui.js", "/icon.svg", "/nothing"):
        headers = ask(server, path).headers
        policy = headers["Content-Security-Policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/ui.css/../../../etc/passwd", "/run?name=../../../etc",
     "/run?name=/etc", "/run?name=.", "/run?name=", "/run", "/api/run?name=good/../failed", "/run?name=good%00",
     "/run?name=good&name=failed", "/compare?run=good&run=../good", "//etc/passwd", "/api//ui.js"],
)  # fmt: skip
def test_no_address_leads_out_of_the_folder(server: UiServer, path: str):
    answer = ask(server, path)
    assert answer.status == 404 and "root:" not in answer.text


def test_what_files_hold_is_shown_as_text_without_secrets(server: UiServer, folder: Path):
    listed = ask(server, "/")
    assert listed.status == 200 and "<img src=x" not in listed.text and "&lt;img src=x onerror" in listed.text
    for name in sorted(path.name for path in folder.iterdir()):
        query = f"name={quote(name, errors='surrogateescape')}"
        page, state = ask(server, f"/run?{query}"), ask(server, f"/api/run?{query}")
        assert (page.status, state.status) == (200, 200), (name, page.text)
        assert not [text for text in ("<img src=x", "<b>1", "root:") if text in page.text]
        assert "root:" not in state.text and "<img src=x" not in "".join(json.loads(state.text)["parts"].values())
    both = urlencode({"run": [HOSTILE, "good"]}, doseq=True)
    assert "<img src=x" not in ask(server, f"/compare?{both}").text
    for path in ("/run?name=failed", "/api/run?name=failed"):
        text = ask(server, path).text
        assert SECRET not in text and "[redacted]" in text


@pytest.mark.parametrize("other", ["theme=dark mode", 'state={"a": 1}', "flag", "ключ=1", 'open="', "a=b=c", "\x01"])
def test_cookies_of_other_programs_on_this_host_lock_nobody_out(server: UiServer, other: str):
    own, foreign = f"{server.cookie_name}={server.session}", f"{server.cookie_name}=x"
    for cookies, status in ((f"{other}; {own}", 200), (f"{own}; {other}", 200), (f"{other}; {foreign}", 403)):
        assert ask(server, "/", cookie=False, Cookie=cookies.encode().decode("latin-1")).status == status


def test_clients_that_send_a_byte_at_a_time_leave_room_for_others(server: UiServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwise.launch.commands.ui.server._PATIENCE_S", 0.5)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port))) for _ in range(32)]
        deadline = time.monotonic() + 20
        while slow and time.monotonic() < deadline:
            for each in list(slow):
                try:
                    each.sendall(b"G")
                except OSError:
                    slow.remove(each)
            time.sleep(0.02)
        assert not slow, "each is closed though none was silent for long"
        assert ask(server, "/").status == 200


def test_connections_above_the_limit_are_closed(server: UiServer):
    address = ("127.0.0.1", server.server_port)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
        closed, _, _ = select.select(idle, [], [], 10)
        assert 1 <= len(closed) <= 10
        with contextlib.suppress(ConnectionResetError):
            assert closed[0].recv(1) == b""


def test_new_steps_are_added_to_those_that_were_read(tmp_path: Path):
    run = write_run(tmp_path / "one", has_report=False, rows=step_rows(range(1, 11)))
    runs = Runs(tmp_path)
    assert len(runs.whole("one").run.curve) == 10
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in step_rows(range(11, 16))) + '{"step": 16, "lo')
    whole = runs.whole("one")
    assert [step.step for step in whole.run.curve] == list(range(1, 16)) and whole.look.num_steps == 15
    codec.write(run / "report.json", report_for(tiny_plan()))
    ended = runs.whole("one")
    assert not ended.is_live and runs.whole("one").run is ended.run, "read once, until a file changes"
    (run / "report.json").write_bytes((run / "report.json").read_bytes() + b"\n")
    assert runs.whole("one").run is not ended.run
    (run / "plan.json").unlink()
    with pytest.raises(InputError, match="no such run"):
        runs.whole("one")


def test_the_list_is_sorted_by_time_and_a_run_is_a_folder_of_its_own(tmp_path: Path):
    for age, name in enumerate(("new", "old")):
        run = write_run(tmp_path / name)
        os.utime(run / "plan.json", (1e9 - age, 1e9 - age))
    found, total = Runs(tmp_path).summaries()
    assert [each.name for each in found] == ["new", "old"] and total == 2
    status = found[0].status
    assert status is not None and (status.loss, status.duration_s) == (4.5, 12.0) and not found[0].is_live
    assert [each.name for each in Runs(tmp_path / "old").summaries()[0]] == ["old"]
    assert Runs(tmp_path / "nothing").summaries() == ([], 0)


def test_the_speed_in_the_list_is_that_of_all_devices(tmp_path: Path):
    report = report_for(tiny_plan())
    rate = report.measured.speed.tokens_per_s_per_gpu
    write_run(tmp_path / "one", report=replace(report, plan=replace(report.plan, num_ranks=4)))
    ((found,), _) = Runs(tmp_path).summaries()
    assert found.status is not None and rate is not None
    assert found.status.tokens_per_s == pytest.approx(4 * rate)


def test_a_run_in_the_list_is_live_until_its_process_ends(tmp_path: Path):
    """No file changes when a process is killed."""
    run, runs = write_run(tmp_path / "one", has_report=False), Runs(tmp_path)
    with locked(run):
        assert runs.summaries()[0][0].is_live
    assert not runs.summaries()[0][0].is_live


def test_a_run_in_the_list_is_live_until_its_job_has_left_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwise.launch.commands.ui.runs.QUERY_S", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_program(tmp_path / "squeue", f"#!/bin/sh\n/bin/cat {tmp_path}/answer\n")
    run = write_run(tmp_path / "runs" / "one", has_report=False)
    write_submission(run, "12")
    runs, row = Runs(tmp_path / "runs"), f"12|RUNNING|N/A|1:00:00|1|cpu|N/A||None|{run}/train.sbatch\n"
    for answer in (row, ""):
        (tmp_path / "answer").write_text(answer)
        assert runs.summaries()[0][0].is_live is bool(answer)


def test_a_port_that_is_in_use_is_named_with_the_remedy(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFaultError, match=f"--port {port}.*without --port"):
            run_ui(UiOptions(tmp_path, port, opens_browser=False), Console())
    with pytest.raises(InputError, match="is no folder"):
        run_ui(UiOptions(tmp_path / "none", opens_browser=False), Console())


def test_the_command_prints_its_address_serves_it_and_ends_with_ctrl_c(tmp_path: Path):
    command = [sys.executable, "-m", "shardwise.launch.cli", "ui", str(tmp_path), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port, token = re.match(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})\n", process.stdout.readline()).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
        connection.request("GET", f"/?token={token}")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == ExitCode.DONE
        assert process.stderr is not None and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
    assert PORT > 1024


def test_the_page_of_a_run_has_its_log_its_settings_and_other_axes_and_scales(server: UiServer, folder: Path):
    run = folder / "good"
    (run / "console.log").write_text("".join(f"line {number} <b>\n" for number in range(300)) + f"{SECRET}\n")
    (run / "job.yaml").write_text("train:\n  lr: 0.25  # command line\n")
    page = ask(server, "/run?name=good&x=time&scale=log").text
    assert "line 299 &lt;b&gt;" in page and "line 50 &lt;b&gt;" not in page and SECRET not in page
    assert "log, last 200 lines" in page and "lr: 0.25  # command line" in page
    assert '<option value="time" selected>' in page and '<option value="log" selected>' in page
    assert ">time in steps</p>" in page and ">step</p>" not in page
    assert ">step</p>" in ask(server, "/run?name=good&x=<script>&scale=../").text
    for link in ("console.log", "job.yaml"):
        (run / link).unlink()
        (run / link).symlink_to("/etc/passwd")
    assert "root:" not in ask(server, "/run?name=good").text


def test_settings_of_the_query_are_columns_of_the_list_and_others_are_offered(server: UiServer, folder: Path):
    plan = tiny_plan()
    faster = replace(plan, job=replace(plan.job, train=replace(plan.job.train, lr=0.125)))
    write_run(folder / "faster", plan=faster, rows=[])
    page = ask(server, "/?column=train.lr&column=train.seed&column=train.lr&column=<x>&column=train.nothing").text
    titles = re.findall(r'data-sort="\d+">([^<]*)</button>', page)
    assert titles[-3:] == ["started", "train.lr", "train.seed"]
    (row,) = (each for each in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if ">faster</a>" in each)
    assert '<td class="setting" data-name="train.lr" data-by="0.125">0.125</td>' in row
    offered = dict(re.findall(r'name="column" value="([^"]*)"( checked)?>', page))
    assert offered["train.lr"] == offered["train.seed"] == " checked" and offered["train.method"] == ""
    assert "data.packing" not in offered, "a setting that is the same in all runs"
    assert 'class="setting"' not in ask(server, "/").text


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[UiServer]:
    """A server whose pages may act, with a run that has ended and the job of a trainer that fails at once."""
    job = tmp_path / "job.yaml"
    job.write_text("model: {name: qwen2.5-0.5b}\ndata: {train: none.jsonl}\n")
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "going", has_report=False)
    with UiServer(tmp_path / "runs", 0, job) as server:
        server.allow_actions()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def act(server: UiServer, fields: dict[str, str], **changes: str | None) -> Answer:
    """A form of a page of the server, or one with other headers; None leaves a header out."""
    headers = {
        "Cookie": f"{server.cookie_name}={server.session}",
        "Origin": server.address,
        "Content-Type": "application/x-www-form-urlencoded",
        **changes,
    }
    sent = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    form = urlencode({"nonce": server.runs.nonce, **fields})
    return ask(server, "/act", method="POST", cookie=False, body=form, **sent)


STOP = {"action": "stop", "name": "going"}


def test_an_action_needs_the_cookie_the_own_origin_and_the_value_of_our_pages(acting: UiServer):
    flag = acting.runs.folder / "going" / "cancelled"
    for origin in (None, "null", "http://evil.example", f"http://127.0.0.1:{acting.server_port + 1}"):
        assert act(acting, STOP, Origin=origin).status == 403, origin
    for site in ("cross-site", "same-site"):
        assert act(acting, STOP, Sec_Fetch_Site=site).status == 403, site
    for nonce in ("", acting.token):
        assert act(acting, {**STOP, "nonce": nonce}).status == 403, nonce
    assert act(acting, STOP, Cookie=None).status == 403
    assert act(acting, STOP, Host="evil.example", Origin="http://evil.example").status == 421
    assert act(acting, {**STOP, "x": "y" * 40_000}).status == 413
    assert ask(acting, "/act?action=stop&name=going").status == 404, "an address alone does nothing"
    with locked(acting.runs.folder / "going"):
        assert act(acting, {**STOP, "name": "../runs/going"}).status == 409
        assert act(acting, {"action": "remove", "name": "going"}).status == 409
    assert not flag.exists()


def test_without_the_option_nothing_acts_and_no_page_has_a_button(server: UiServer, folder: Path):
    assert act(server, {"action": "stop", "name": "good", "nonce": ""}).status == 405
    with locked(folder / "linked"):
        assert "<form method" not in ask(server, "/run?name=linked").text


def test_a_run_is_stopped_as_by_the_command(acting: UiServer, monkeypatch: pytest.MonkeyPatch):
    run = acting.runs.folder / "going"
    assert "nothing to cancel" in act(acting, {**STOP, "name": "good"}).text
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom shardwise.launch.rundir.lock import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:
        try:
            assert trainer.stdout is not None and trainer.stdout.readline() == b"locked\n"
            page = ask(acting, "/run?name=going").text
            assert acting.runs.nonce is not None and f'value="{acting.runs.nonce}"' in page and "Stop this run" in page
            answer = act(acting, STOP)
            assert answer.status == 200 and "requested to save a checkpoint and end" in answer.text
            assert trainer.wait(timeout=20) == -signal.SIGINT and (run / "cancelled").exists()
        finally:
            trainer.kill()


def test_only_the_own_job_is_started_and_a_mistake_in_it_is_shown(acting: UiServer):
    own = str(acting.runs.own_file)
    for fields in ({"model": "qwen2.5-0.5b"}, {"model": own, "card": "RTX-4090"}, {"model": "/etc/passwd"}):
        assert act(acting, {"action": "start", **fields}).status == 409
    assert acting.runs.started == []
    answer = act(acting, {"action": "start", "model": own, "tokens": "1k"})
    assert answer.status == 409 and "none.jsonl" in answer.text, "what cannot be planned is not started"
    assert acting.runs.started == []


def test_a_started_job_is_a_process_of_its_own_whose_end_stands_in_the_list(acting: UiServer):
    """It has too little data to hold some out, so that it ends before it trains."""
    job = acting.runs.own_file
    assert job is not None
    rows = job.with_name("rows.jsonl")
    rows.write_text('{"text": "a b c"}\n' * 50)
    job.write_text(
        "model: {config: tiny-llama, tokenizer: train}\ntrain: {seq_len: 64, steps: 3}\n"
        f"data: {{train: {json.dumps(str(rows))}}}\n"
    )
    page = ask(acting, f"/plan?{urlencode({'model': str(job), 'method': 'full'})}").text
    (form,) = re.findall(r'<form method="post".*?</form>', page, re.DOTALL)
    fields = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', form)}
    assert fields["action"] == "start" and fields["method"] == "full" and fields["nonce"] == acting.runs.nonce
    answer = act(acting, fields)
    assert answer.status == 200 and f"shardwise train {job} train.method=full" in answer.text
    (started,) = acting.runs.started
    assert started.process.wait(timeout=60) not in (None, 0)
    listed = ask(acting, "/").text
    assert f"ended with {started.process.returncode}" in listed and "data.eval" in listed


def test_the_model_of_a_run_that_ended_is_asked_where_the_run_exported_one(acting: UiServer):
    run = acting.runs.folder / "good"
    assert "Chat with the model" not in ask(acting, "/run?name=good").text
    (run / "export").mkdir()
    assert 'href="/chat?name=good"' in ask(acting, "/run?name=good").text
    assert '<textarea id="question" name="question" required maxlength="2000"' in ask(acting, "/chat?name=good").text
    asking = {"action": "ask", "name": "good"}
    refused = [act(acting, {**asking, "question": text}) for text in ("", "x" * 2001)]
    refused += [act(acting, {"action": each, "name": "none", "question": "why"}) for each in ("ask", "forget")]
    assert [each.status for each in refused] == [409] * 4
    assert ask(acting, "/chat?name=../runs/good").status == 404


def test_a_question_without_a_reply_stands_on_the_page_with_its_reason(acting: UiServer):
    (acting.runs.folder / "good" / "export").symlink_to("/etc")
    sent = act(acting, {"action": "ask", "name": "good", "question": f"{HOSTILE}\r\nwhy"})
    assert sent.status == 303 and sent.headers["Location"] == "/chat?name=good#question"
    wait_for(lambda: not acting.runs.chats.talk("good").waiting, "the reply")
    page = ask(acting, "/chat?name=good").text
    assert "is a link" in page and HOSTILE not in page and "&lt;img src=x onerror=alert(1)&gt;<br>why" in page


def test_a_talk_has_its_turns_until_it_is_forgotten_and_is_bounded(acting: UiServer):
    chats, talk = acting.runs.chats, Talk()
    for number in range(MOST_TURNS + 5):
        talk = talk.with_turn(Turn(f"question {number}", "reply"), note="")
    assert len(talk.turns) == MOST_TURNS and talk.num_removed == 5 and talk.turns[0].question == "question 5"
    long = talk.with_turn(Turn("x" * 30_000, ""), note="").with_turn(Turn("y" * 30_000, ""), note="")
    assert [turn.question[0] for turn in long.turns] == ["y"] and long.num_removed == MOST_TURNS + 6
    chats._talks["good"] = talk
    page = ask(acting, "/chat?name=good").text
    assert "question 24" in page and "question 4<" not in page and "5 older questions" in page
    assert act(acting, {"action": "forget", "name": "good"}).status == 303 and chats.talk("good").turns == ()
    chats._talks["good"] = talk._replace(waiting="why")
    assert "<button disabled>Send" in ask(acting, "/chat?name=good").text
    assert act(acting, {"action": "forget", "name": "good"}).status == 409 and chats.talk("good").turns
