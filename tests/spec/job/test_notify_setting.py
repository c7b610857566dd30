"""`log.notify`: a URL is one argument, a command is a list of them, and no shell ever reads either."""

import pytest

from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.job.fields import job_tree
from shardwise.trainer.spec.job.kinds import without_secret
from shardwise.trainer.spec.job.reading import read_job

JOB = {"model": {"name": "a/b"}, "data": {"train": "x"}}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (None, None), ("none", None), ("https://example.org/hook?x=1", ("https://example.org/hook?x=1",)),
        ("  http://me:word@example.org:8080/ ", ("http://me:word@example.org:8080/",)),
        ("mail -s done me@example.org", ("mail", "-s", "done", "me@example.org")),
        ("tell 'two words' $HOME;rm", ("tell", "two words", "$HOME;rm")),
        (["tell", "two words"], ("tell", "two words")), ("${TEAM_WEBHOOK}", ("$TEAM_WEBHOOK",)),
        ("$HOME/tell", ("$HOME/tell",)),
    ],
)  # fmt: skip
def test_what_is_written_is_read(written, read):
    job = read_job({**JOB, "log": {"notify": written}}, origin="job.yaml")
    assert job.log.notify == read
    assert read_job(job_tree(job), origin="job.yaml").log.notify == read


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("", "a URL, $NAME of a variable that holds one, a command or a list of its arguments"),
        (3, "put it in quotes"), ("ftp://example.org", "a URL begins with http:// or https://"),
        ("https:///hook", "names no host"), ("https://example.org/a b", "holds a space"),
        ("tell 'it", "cannot be split into arguments"),
    ],
)  # fmt: skip
def test_what_is_neither_is_refused_with_what_is_expected(value, fact):
    with pytest.raises(InputProblemsError) as caught:
        read_job({**JOB, "log": {"notify": value}}, origin="job.yaml")
    (line,) = caught.value.problems
    assert line.startswith("job.yaml: log.notify is ")
    assert fact in line


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("https://hooks.example.org/services/T0/B1/secret", "https://hooks.example.org/[redacted]"),
        ("https://me:word@example.org:8443", "https://example.org:8443/[redacted]"),
        ("http://example.org?token=secret", "http://example.org/[redacted]"),
        ("http://example.org#secret", "http://example.org/[redacted]"),
        ("http://[::1]:80/@secret", "http://[::1]:80/[redacted]"),
        ("https://example.org/", "https://example.org/"),
        ("$TEAM_WEBHOOK", "$TEAM_WEBHOOK"),
    ],
)
def test_a_run_stores_the_host_of_a_url_alone(url, stored):
    assert without_secret((url,)) == (stored,)
    assert without_secret(("mail", url)) == ("mail", url) and without_secret(None) is None
