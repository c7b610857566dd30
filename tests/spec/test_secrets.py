"""Secrets of the environment are found and never shown; text that only resembles one is not changed."""

import errno
import io
import json
import os
import sys

import pytest

from shardwise.trainer.spec import codec, secrets
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.value import Value

SECRET = "canary-4f1c9e77"


class Message(Value, frozen=True, kw_only=True):
    text: str
    count: int = 0


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DB_PASSWORD",
     "my_secret", "SLACK_APIKEY", "SSH_PRIVATE_KEY", "GOOGLE_CREDENTIALS", "PGPASSWORD", "MYSQL_PASS", "GITHUB_PAT",
     "OPENAI_KEY", "CLIENT_SECRETS", "NOTIFY_URL", "ACCESS_TOKENS", "API_KEYS", "HFTOKEN", "MYSQL_PWD", "DB_PWD",
     "SSHPASS", "JWT", "DSN", "SENTRY_DSN", "CONNECTION_STRING", "AZURE_STORAGE_CONNECTION_STRING", "DB_CONNSTR",
     "AZURE_SAS", "SAS", "SLACK_URL", "COOKIE"],
)  # fmt: skip
def test_variables_that_are_named_like_secrets_are(name):
    assert secrets.redact(f"401 for {SECRET}!", {name: SECRET}) == "401 for [redacted]!"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "parallelism"), ("HF_TOKEN_PATH", "/home/someone/token"),
        ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE"), ("GIT_PASSWORD_FILE", "/run/secrets/git"), ("HF_TOKEN", "short"),
        ("MONKEY", "gibbon-or-lemur"), ("PWD", "/home/someone"), ("SSH_ASKPASS", "/usr/bin/askpass"),
        ("PATH", "/usr/bin:/bin"), ("KEYBOARD", "mechanical"), ("OLDPWD", "/home/other"), ("INIT_PWD", "/home/third"),
        ("SASL_MECHANISM", "scram-sha-256"), ("DSNMP_LEVEL", "verbose-one"), ("CONNECTION_STRINGS_FILE", "/etc/mine"),
    ],
)  # fmt: skip
def test_what_only_looks_like_one_is_not(name, value):
    assert secrets.redact(f"with {value} here", {name: value}) == f"with {value} here"


def test_a_token_that_was_stored_by_a_login_is_one(tmp_path):
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text(f"{SECRET}\n")
    assert secrets.secret_values({"HOME": str(tmp_path)}) == (SECRET,)
    moved = tmp_path / "moved"
    moved.write_text(SECRET[::-1])
    assert secrets.secret_values({"HOME": str(tmp_path), "HF_TOKEN_PATH": str(moved)}) == (SECRET[::-1],)
    moved.write_bytes(b"\xff\xfe")
    assert secrets.secret_values({"HF_TOKEN_PATH": str(moved)}) == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("DefaultEndpointsProtocol=https;AccountKey=abcDEF123/+==;x=1",
         "DefaultEndpointsProtocol=https;AccountKey=[redacted];x=1"),
        ("Endpoint=sb://a/;SharedAccessKey=abcDEF123=", "Endpoint=sb://a/;SharedAccessKey=[redacted]"),
        ("https://a.blob.core.windows.net/b?sv=1&sig=abcDEF%2F123%3D&se=2",
         "https://a.blob.core.windows.net/b?sv=1&sig=[redacted]&se=2"),
        ("no such repository for hf_AbCdEfGhIjKlMnOpQrStUvWx", "no such repository for [redacted]"),
        ("https://me:pa55@example.org/x.git", "https://[redacted]@example.org/x.git"),
        ("see https://example.org/a:b@c and hf_datasets", "see https://example.org/a:b@c and hf_datasets"),
    ],
)  # fmt: skip
def test_forms_of_secrets_are_found_wherever_they_come_from(text, shown):
    assert secrets.redact(text, {}) == shown


def test_of_two_secrets_the_longer_goes_first_and_one_is_found_as_json_writes_it():
    environment = {"A_TOKEN": SECRET, "B_TOKEN": f"{SECRET}-and-more"}
    assert secrets.redact(f"{SECRET}-and-more", environment) == "[redacted]"
    secret = f'{SECRET}"\\'
    assert secrets.redact(json.dumps({"key": secret}), {"HF_TOKEN": secret}) == '{"key": "[redacted]"}'


@pytest.fixture
def canary(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f'{SECRET}"quoted')
    secrets._own_values.cache_clear()
    yield f'{SECRET}"quoted'
    secrets._own_values.cache_clear()


def test_a_stream_shows_none_and_is_otherwise_the_stream_it_was(canary):
    stream = io.StringIO()
    redacted = secrets.RedactedStream(stream)
    assert redacted.write(canary) == len(canary)
    redacted.writelines([canary, "\n"])
    assert stream.getvalue() == "[redacted][redacted]\n" and redacted.getvalue() == stream.getvalue()
    assert not redacted.isatty()


def test_output_is_redacted_in_the_block_and_no_longer_after(canary, capsys):
    with secrets.redacted_output():
        sys.stdout.write(canary)
        sys.stderr.write(canary)
    sys.stdout.write(" plain")
    assert capsys.readouterr() == ("[redacted] plain", "[redacted]")


def test_files_that_quote_messages_hold_none(canary, tmp_path):
    codec.write_redacted(tmp_path / "message.json", Message(text=f"denied: {canary}"))
    assert codec.read(tmp_path / "message.json", Message).text == "denied: [redacted]"


def test_a_secret_of_digits_leaves_numbers_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("DB_PASSWORD", "12345678")
    secrets._own_values.cache_clear()
    codec.write_redacted(tmp_path / "message.json", Message(text="as 12345678", count=12345678))
    secrets._own_values.cache_clear()
    assert codec.read(tmp_path / "message.json", Message) == Message(text="as [redacted]", count=12345678)


class _Broken(io.StringIO):
    """A stream whose disk is full, or whose reader has ended."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF])
def test_a_stream_that_fails_is_dropped_unless_it_is_needed(number):
    stream = secrets.RedactedStream(_Broken(OSError(number, os.strerror(number))))
    stream.write("a line")
    stream.flush()
    assert stream.problem is not None and stream.problem.errno == number
    stream.is_needed = True
    with pytest.raises(BrokenPipeError if number == errno.EPIPE else EnvironmentFaultError):
        stream.write("another")


def test_characters_that_a_terminal_obeys_are_shown_as_json_writes_them():
    assert secrets.printable("a\x1b[2J\x9b\u202e\r\x00\x7f") == r"a\u001b[2J\u009b\u202e\r\u0000\u007f"
    plain = "Grüße\t日本\u3000語 \U0001f468\u200d\U0001f469\n\xa0"
    assert secrets.printable(plain) == plain
