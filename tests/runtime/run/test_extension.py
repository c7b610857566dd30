"""A user's file runs as it was planned, and what it raises is reported with its line."""

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from shardwise.trainer.runtime.run.extension import load_hooks
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.extension import Extension, Hook


def extension_of(folder, text, *hooks):
    path = folder / "mine.py"
    path.write_text(text)
    return Extension(path=str(path), sha256=sha256(text.encode()).hexdigest(), hooks=hooks)


def test_a_hook_is_called_with_its_arguments(tmp_path):
    """In a module in which dataclasses work and that knows its file."""
    text = (
        "from dataclasses import dataclass\n@dataclass\nclass Row:\n    text: str\n"
        "def format_row(row): return row | {'text': Row(__file__).text}\n"
    )
    assert load_hooks(None) is None
    hooks = load_hooks(extension_of(tmp_path, text, Hook.FORMAT_ROW))
    assert hooks.has(Hook.FORMAT_ROW) and not hooks.has(Hook.LOSS)
    assert hooks.call(Hook.FORMAT_ROW, {"a": 1}) == {"a": 1, "text": str(tmp_path / "mine.py")}


def test_the_files_folder_does_not_become_a_place_to_import_from(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("x = 1\n")
    with pytest.raises(InputError, match=r"ModuleNotFoundError: .*neighbour_of_mine.*mine\.py, line 1"):
        load_hooks(extension_of(tmp_path, "import neighbour_of_mine\n", Hook.LOSS))
    assert str(tmp_path) not in sys.path


def test_what_a_hook_raises_is_reported_with_its_line(tmp_path):
    text = "def inner(row):\n    return row['missing']\ndef format_row(row):\n    return inner(row)\n"
    hooks = load_hooks(extension_of(tmp_path, text, Hook.FORMAT_ROW))
    with pytest.raises(InputError, match=r"format_row .*KeyError: 'missing'.*mine\.py, line 2"):
        hooks.call(Hook.FORMAT_ROW, {})


def test_a_file_that_changed_since_the_plan_or_is_missing_is_not_run(tmp_path):
    extension = extension_of(tmp_path, "def on_step(step, metrics): pass\n", Hook.ON_STEP)
    Path(extension.path).write_text("raise SystemExit\n")
    with pytest.raises(InputError, match=r"mine\.py.* changed"):
        load_hooks(extension)
    Path(extension.path).unlink()
    with pytest.raises(InputError, match=r"mine\.py.*No such file"):
        load_hooks(extension)
