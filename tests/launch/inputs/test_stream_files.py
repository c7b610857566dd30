"""A stream from outside: what is said of it, and that a run is resumed on the files it was started with."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from prepare_request_factory import REQUEST

from launch.commands.data import describe_data
from launch.inputs.prepare_data import refuse_other_stream
from trainer.planning.run.data_estimate import estimate_data
from trainer.spec import codec
from trainer.spec.data.request import LISTING_NAME, SourceFile
from trainer.spec.errors import InputError
from trainer.spec.job.sections import Job

FILES = tuple(SourceFile(path=f"/data/{n}.jsonl", size_bytes=100 + n, mtime_ns=10**18) for n in range(3))
HUB = "hf://datasets/org/rows@{}/a.jsonl"
PROFILE = replace(
    estimate_data(num_bytes=10**6, seq_len=8, vocab_size=300, eval_share=None, window_bytes=10**5), fingerprint="then"
)


@pytest.fixture
def refuse(tmp_path):
    """Resumes a run that read the first files where now there are the second."""

    def resume(then, now, *, fingerprint="now"):
        run_dir, cache_dir = tmp_path / "run", tmp_path / "cache"
        for folder, files in ((run_dir / "stream", then), (cache_dir, now)):
            folder.mkdir(parents=True)
            codec.write(folder / LISTING_NAME, replace(REQUEST, files=tuple(files)))
        data = replace(PROFILE, fingerprint=fingerprint, cache_dir=str(cache_dir))
        refuse_other_stream(Path(run_dir), data, PROFILE)

    return resume


CHANGES = [
    (FILES[:1], [replace(FILES[0], size_bytes=7)], ("0.jsonl of 100 bytes", "0.jsonl of 7 bytes")),
    (FILES[:1], [replace(FILES[0], mtime_ns=10**18 + 10**9)], ("01:46:40", "01:46:41")),
    (FILES[:1], FILES[:2], ("/data/1.jsonl is new",)),
    (FILES[:2], FILES[:1], ("/data/1.jsonl is missing",)),
    (
        [replace(FILES[0], path=HUB.format("a" * 40), hub=HUB.format("a" * 40))],
        [replace(FILES[0], path=HUB.format("b" * 40), hub=HUB.format("b" * 40))],
        (HUB.format("a" * 40), HUB.format("b" * 40)),
    ),
]


@pytest.mark.parametrize(("then", "now", "facts"), CHANGES, ids=["size", "time", "new", "gone", "commit"])
def test_a_file_that_changed_is_refused_with_both_values(refuse, tmp_path, then, now, facts):
    with pytest.raises(InputError) as caught:
        refuse(then, now)
    assert [fact for fact in ("--resume", f"{tmp_path}/run", *facts) if fact not in str(caught.value)] == []


def test_many_changes_are_counted(refuse):
    with pytest.raises(InputError, match="1 more"):
        refuse(FILES, [replace(file, size_bytes=1) for file in FILES])


def test_the_same_files_elsewhere_are_the_same_stream(refuse):
    moved = [replace(file, path=f"/elsewhere{file.path}") for file in FILES]
    refuse(FILES, moved)


def test_an_unchanged_fingerprint_asks_nothing(refuse):
    refuse(FILES, FILES[:1], fingerprint="then")


def test_what_is_counted_of_a_stream_is_said_to_be_of_its_first_window():
    profile = replace(PROFILE, num_documents=12, num_targets=900, cache_dir=None)
    first, second, *_ = describe_data(profile, Job())
    assert first.startswith("12 texts") and "first window" in first and "900 tokens of the window" in second
    assert "window" not in list(describe_data(replace(profile, is_stream=False), Job()))[1]
