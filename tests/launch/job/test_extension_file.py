"""An extensions file is read, not run: its hooks, its digest, and what is wrong with it in one line."""

from hashlib import sha256

import pytest

from launch.inputs.trusted_code import read_extension
from trainer.spec.errors import InputError
from trainer.spec.messages.extension import Hook


def written(folder, text):
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


def test_hooks_are_found_by_name_without_running_the_file(tmp_path):
    text = "raise SystemExit('ran')\ndef helper(): pass\ndef on_step(step, metrics): pass\ndef format_row(row): pass\n"
    found = read_extension(written(tmp_path, text))
    assert found.hooks == (Hook.FORMAT_ROW, Hook.ON_STEP)
    assert found.sha256 == sha256(text.encode()).hexdigest()
    assert found.path == str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    "signature",
    ["loss(logits, labels)", "loss(logits, labels, /)", "loss(*parts)", "loss(a, b, weight=1.0)", "loss(a, b, *, c=1)"],
)
def test_any_signature_that_can_be_called_so_is_taken(tmp_path, signature):
    found = read_extension(written(tmp_path, f"def {signature}: return 0\n"))
    assert found.hooks == (Hook.LOSS,)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("def loss(logits): pass\n", ("line 1", "loss(logits, labels)")),
        ("def loss(a, b, c): pass\n", ("line 1", "loss(logits, labels)")),
        ("def loss(a, b, *, c): pass\n", ("line 1", "loss(logits, labels)")),
        ("\nasync def on_step(step, metrics): pass\n", ("line 2", "on_step", "async")),
        ("x = 1\n", ("format_row, build_model, loss, on_step",)),
        ("def fromat_row(row): pass\n", ("did you mean format_row?",)),
        ("def loss(:\n", ("Python", "line 1")),
        ("def loss(a, b): pass\0\n", ("Python",)),
        ("class loss: pass\n", ("format_row, build_model, loss, on_step",)),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_line(tmp_path, text, facts):
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_extension(path)
    assert str(caught.value).startswith(f"extensions: {path}")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(("name", "reason"), [("mine.py", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, reason):
    with pytest.raises(InputError, match=f"^extensions: {tmp_path / name}.*{reason}"):
        read_extension(str(tmp_path / name))
