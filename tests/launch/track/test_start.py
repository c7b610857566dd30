"""Missing requirements of trackers are reported before a run starts, with the remedy; no key is shown."""

import os
import signal
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace
from pasted_pip import requirements_in
from tracker_factory import tracker_environment

from shardwise.launch.track import start as track_start
from shardwise.launch.track.start import check_trackers, wandb_mode
from shardwise.trainer.spec.errors import InputError, InputProblemsError
from shardwise.trainer.spec.job.sections import Job, LogJob, NodeNetwork, SlurmJob, WandbMode

KEY = "canary" + "0123456789" * 4


def job(**log):
    return Job(log=LogJob(**log))


def problems(tmp_path, checked, **environment):
    with pytest.raises(InputProblemsError) as caught:
        check_trackers(checked, tracker_environment(tmp_path, **environment))
    return caught.value.problems


@pytest.mark.parametrize(
    ("requested", "environment", "mode"),
    [
        (WandbMode.OFF, {"WANDB_MODE": "online"}, WandbMode.OFF),
        (WandbMode.ONLINE, {}, WandbMode.ONLINE),
        (WandbMode.ONLINE, {"WANDB_MODE": "offline"}, WandbMode.OFFLINE),
        (WandbMode.ONLINE, {"WANDB_MODE": "dryrun"}, WandbMode.OFFLINE),
        (WandbMode.ONLINE, {"WANDB_MODE": "disabled"}, WandbMode.OFF),
        (WandbMode.OFFLINE, {"WANDB_MODE": "online"}, WandbMode.ONLINE),
        (WandbMode.OFFLINE, {"WANDB_MODE": ""}, WandbMode.OFFLINE),
    ],
)
def test_wandb_mode_decides_how_and_never_whether(requested, environment, mode):
    assert wandb_mode(job(wandb=requested), environment) is mode


def test_online_needs_a_login_and_no_key_is_shown(tmp_path):
    online, environment = job(wandb=WandbMode.ONLINE), tracker_environment(tmp_path)
    check_trackers(job(wandb=WandbMode.OFFLINE), {**environment, "PATH": "/nonexistent"})
    (line,) = problems(tmp_path, online)
    assert all(fact in line for fact in ("log.wandb: ", "wandb login", "WANDB_API_KEY", "log.wandb=offline"))
    (line,) = problems(tmp_path, online, WANDB_API_KEY="much-too-short")
    assert "WANDB_API_KEY" in line and "much-too-short" not in line
    check_trackers(online, {**environment, "WANDB_API_KEY": KEY})
    (tmp_path / ".netrc").write_text(f"machine wandb.example.org\n  login user\n  password {KEY}\n")
    check_trackers(online, {**environment, "WANDB_BASE_URL": "https://wandb.example.org"})


def test_nodes_without_a_network_write_offline_and_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(track_start, "installed_version", lambda _name: None)
    lines = problems(tmp_path, job(wandb=WandbMode.OFFLINE, tensorboard=True))
    for name, line in zip(("wandb", "tensorboard"), lines, strict=True):
        assert line.startswith(f"log.{name}: ") and set(requirements_in(line, tmp_path)) == {name}
    with pytest.raises(InputError, match=r"WANDB_MODE.*'on'"):
        wandb_mode(job(wandb=WandbMode.ONLINE), {"WANDB_MODE": "on"})
    isolated = replace(job(wandb=WandbMode.ONLINE), slurm=SlurmJob(network=NodeNetwork.NONE))
    assert wandb_mode(isolated, {}) is WandbMode.ONLINE and wandb_mode(isolated, {}, on_node=True) is WandbMode.OFFLINE
    for environment in ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "WANDB_MODE": "online"}):
        assert wandb_mode(isolated, environment) is WandbMode.OFFLINE


@pytest.mark.parametrize(
    ("notify", "variables", "fact"),
    [
        (("no-such-program", "--to", "me"), {}, "no-such-program"),
        (("$TEAM_WEBHOOK",), {}, "$TEAM_WEBHOOK"),
        (("$TEAM_WEBHOOK",), {"TEAM_WEBHOOK": "ftp://hidden"}, "$TEAM_WEBHOOK"),
        (("$TEAM_WEBHOOK",), {"TEAM_WEBHOOK": "https:///hidden"}, "$TEAM_WEBHOOK"),
        (("$TEAM_WEBHOOK",), {"TEAM_WEBHOOK": "https://example.org/hook"}, None),
        (("http://127.0.0.1:9/",), {}, None),  # it is not tried
        (("sh", "-c", "true"), {}, None),
    ],
)
def test_a_command_that_is_not_there_or_a_variable_without_a_url_is_refused(tmp_path, notify, variables, fact):
    if fact is None:
        check_trackers(job(notify=notify), {**tracker_environment(tmp_path), **variables})
    else:
        (line,) = problems(tmp_path, job(notify=notify), **variables)
        assert line.startswith("log.notify: ") and fact in line and "hidden" not in line


def test_w54_the_public_login_starts_the_service_of_wandb(tmp_path):
    """Its service retries the server, here a missing one, so the test does not wait for the login."""
    login = "import wandb; wandb.login(prompt=False, verify=False)"
    environment = {**tracker_environment(tmp_path), "WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    deadline = time.monotonic() + 120
    process = subprocess.Popen([sys.executable, "-c", login], env=environment, start_new_session=True)
    try:
        while not any(tmp_path.rglob("core-debug-*.log")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_w54_the_check_for_a_login_starts_no_service(tmp_path):
    check = "from shardwise.launch.track.wandb import login_result; print('login:', login_result().problem is None)"
    environment = {**tracker_environment(tmp_path), "WANDB_API_KEY": KEY}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True)
    assert "login: True" in done.stdout
    assert not any(tmp_path.rglob("core-debug-*.log"))
