"""Expressions of packages are compiled when they are used, and give what they would."""

import re
import subprocess
import sys

import pytest

from shardwise.trainer.spec.job.expressions import compiled_when_used


def test_an_expression_has_the_members_of_a_compiled_one():
    with compiled_when_used():
        text, content = re.compile(r"(\d+) # a number", re.VERBOSE), re.compile(rb"\d+")
    assert text.sub("n", "a 12 b 3") == "a n b n"
    assert content.findall(b"1 22") == [b"1", b"22"]
    assert text.flags & re.VERBOSE and text.groups == 1
    assert isinstance(re.compile("a"), re.Pattern)


def test_an_import_that_fails_leaves_nothing_behind_and_one_within_an_import_does_not_end_it():
    with pytest.raises(ImportError), compiled_when_used():
        raise ImportError
    assert isinstance(re.compile("a"), re.Pattern)
    with compiled_when_used():
        with compiled_when_used():
            pass
        assert not isinstance(re.compile("a"), re.Pattern)
    assert isinstance(re.compile("a"), re.Pattern)


@pytest.mark.cold
def test_those_of_pyyaml_are_not_compiled_by_reading_a_job_and_work_where_it_uses_them():
    words = (
        "from shardwise.launch.job.yaml_text import read_yaml, yaml; import re._compiler as compiler; made = []; "
        "compiled = compiler.compile; compiler.compile = lambda *words: made.append(words) or compiled(*words); "
        "assert read_yaml('key: [1, caf\\u00e9]', origin='') == {'key': [1, 'caf\\u00e9']}; print(len(made)); "
        "print(yaml.safe_load('[1.5, 2024-01-02, off]'))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1", "[1.5, datetime.date(2024, 1, 2), False]"], "one tells our numbers"
