"""Which files of a data set are a split: by README.md, by names, and as the library datasets decides."""

import pytest

from shardwise.launch.inputs.dataset_files import Part, files_of_part
from shardwise.trainer.spec.errors import InputError

TRAIN = Part(None, None)


def chosen(names, part=TRAIN, readme=None):
    return list(files_of_part(names, readme, part, origin="data.train: o/n"))


LAYOUTS = [
    ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
    ["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001-0a1b.parquet"],
    ["train.jsonl", "dev.jsonl", "test.jsonl"],
    ["my_train_v2.csv", "my-test.csv", "notes.csv"],
    ["train/a.jsonl", "train/deep/b.jsonl", "validation/a.jsonl", "other/c.jsonl"],
    ["en-train/a.jsonl", "en-test/a.jsonl"],
    ["testing.jsonl", "training.jsonl", "val.jsonl"],
    ["pretrain.jsonl", "contest.jsonl"],
    ["a.jsonl", "b/c.jsonl"],
    ["valid.jsonl"],
]


@pytest.mark.parametrize("names", LAYOUTS, ids=str)
def test_names_mean_what_they_mean_to_datasets(tmp_path, names):
    from datasets.data_files import DataFilesDict, get_data_patterns

    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    patterns = get_data_patterns(str(tmp_path))
    theirs = DataFilesDict.from_patterns(patterns, base_path=str(tmp_path))
    for split, files in theirs.items():
        expected = sorted(file.removeprefix(f"{tmp_path}/") for file in files)
        assert chosen(names, Part(None, str(split))) == expected, split


def test_train_is_taken_or_a_split_that_is_alone_and_of_two_formats_one():
    assert chosen(LAYOUTS[2]) == ["train.jsonl"]
    assert chosen(["valid.jsonl"]) == ["valid.jsonl"]
    assert chosen(["train.jsonl", "train.parquet"]) == ["train.parquet"]
    assert chosen(["train-a.jsonl.gz", "train-b.jsonl", "train.parquet"]) == ["train-a.jsonl.gz", "train-b.jsonl"]
    assert chosen(["train.txt", "train.md"]) == ["train.md", "train.txt"]


def readme(configs):
    return f"---\nlicense: mit\nconfigs:\n{configs}---\n# A data set\n\n---\nmore\n"


ONE = readme("- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
             "  - split: test\n    path: [data/test-*, 'more/**/*.jsonl']\n")  # fmt: skip
TWO = readme("- config_name: en\n  data_files: en/*.csv\n- config_name: de\n  data_dir: de\n")
DEFAULT = TWO.replace("data_files: en/*.csv", "data_files: en/*.csv\n  default: true")
NAMES = ["data/train-0.jsonl", "data/test-0.jsonl", "more/a.jsonl", "more/x/y/b.jsonl", "data/x/train-1.jsonl"]
LANGUAGES = ["en/a.csv", "en/deep/b.csv", "de/train.csv", "de/test.csv", "fr/a.csv"]


@pytest.mark.parametrize(
    "names, part, text, expected",
    [
        (NAMES, TRAIN, ONE, ["data/train-0.jsonl"]),
        (NAMES, TRAIN, ONE.replace("\n", "\r\n"), ["data/train-0.jsonl"]),
        (NAMES, Part("default", "test"), ONE, ["data/test-0.jsonl", "more/a.jsonl", "more/x/y/b.jsonl"]),
        (LANGUAGES, Part("en", None), TWO, ["en/a.csv"]),
        (LANGUAGES, Part("de", "test"), TWO, ["de/test.csv"]),
        (LANGUAGES, TRAIN, DEFAULT, ["en/a.csv"]),
        (NAMES, TRAIN, "# No front matter\n", ["data/train-0.jsonl", "data/x/train-1.jsonl"]),
        (NAMES, TRAIN, "---\nlicense: mit\n---\n", ["data/train-0.jsonl", "data/x/train-1.jsonl"]),
        (LANGUAGES, Part("fr", None), None, ["fr/a.csv"]),
        (["en/train/0000.parquet", "en/test/0000.parquet", "en/train/0001.parquet"], TRAIN, None,
         ["en/train/0000.parquet", "en/train/0001.parquet"]),
        (["en/partial-train/0000.parquet", "de/train/0000.parquet"], Part("en", None), None,
         ["en/partial-train/0000.parquet"]),
    ],
)  # fmt: skip
def test_the_front_matter_decides_where_it_lists_files(names, part, text, expected):
    assert chosen(names, part, text) == expected


@pytest.mark.parametrize(
    ("names", "part", "text", "facts"),
    [
        (NAMES, Part("fr", None), ONE, ("subset fr", "default")),
        (NAMES, Part(None, "dev"), ONE, ("split dev", "test, train")),
        (LANGUAGES, TRAIN, TWO, ("de, en", "{source: ..., subset: de}")),
        (["en/train/0000.parquet", "de/train/0000.parquet"], TRAIN, None, ("de, en", "{source: ..., subset: de}")),
        (LANGUAGES, Part("it", None), None, ("subset it", "de, en, fr")),
        (["test.csv", "dev.csv"], TRAIN, None, ("split train", "test, validation")),
        (["a.csv"], TRAIN, readme("- config_name: default\n  data_files: data/*.csv\n"), ("README.md", "split train")),
        (NAMES, TRAIN, "---\nconfigs: [\n---\n", ("README.md: line 2, column 1",)),
        ([f"{number}/a.csv" for number in range(10, 40)], Part("x", None), None, ("subset x", "20, 21 and 18 more")),
    ],
)
def test_a_part_that_is_not_there_is_named_with_those_that_are(names, part, text, facts):
    with pytest.raises(InputError, match=r"^data\.train: o/n") as caught:
        chosen(names, part, text)
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    assert len(str(caught.value).splitlines()) <= 2
