"""The job file: what each setting may be, every problem on its own line, and the way back to the file's spelling."""

from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.job.fields import BY_PATH, FIELDS, SECTIONS, children, job_tree
from shardwise.trainer.spec.job.kinds import Every, Warmup, shown
from shardwise.trainer.spec.job.other_names import OTHER_NAMES
from shardwise.trainer.spec.job.reading import Change, Layer, read_job, read_layers, read_value
from shardwise.trainer.spec.job.sections import Allowance, Job, ModelJob, NodeNetwork, WandbMode
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB

MODEL = {"name": "org/model"}
DATA = {"train": "text.txt"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tree(**settings: Any) -> dict[str, Any]:
    """A job of two lines with settings of some sections over it."""
    return {"model": MODEL, "data": DATA, **settings}


def at(path: str, value: Any) -> dict[str, Any]:
    """A good job with one setting, with other settings that it needs, and nothing that excludes it."""
    nested: Any = value
    for name in reversed(path.split(".")):
        nested = {name: nested}
    needed: dict[str, dict[str, Any]] = {
        "data.bad_rows_max": {"data": {"bad_rows": "skip"}}, "data.streaming": {"train": {"steps": 10}},
        "data.loss_on": {"data": {"format": "chat"}}, "limits.cost": {"price_per_gpu_hour": 2},
        "limits.nvme.size": {"limits": {"nvme": {"path": "/nvme"}}},
        "pin.offload": {"limits": {"nvme": {"path": "/nvme"}}}, "pin.fp8_recipe": {"pin": {"precision": "fp8"}},
        "model.config": {"model": {"tokenizer": "train"}}, "model.trust_remote_code": {"model": {"name": "org/code"}},
        "train.tokens_per_step": {"train": {"seq_len": 8}}, "train.seq_len": {"train": {"tokens_per_step": 4096000}},
    }  # fmt: skip
    base = tree() if path not in ("model.name", "model.config") else {"data": DATA}
    return merged(merged(base, needed.get(path, {})), nested)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for name, value in above.items():
        is_section = isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = merged(both[name], value) if is_section else value
    return both


def problems(job: Any) -> tuple[str, ...]:
    with pytest.raises(InputProblemsError) as caught:
        read_job(job, origin="job.yaml")
    return caught.value.problems


def value_of(job: Job, path: str) -> Any:
    *sections, _ = path.split(".")
    return getattr(reduce(getattr, sections, job), BY_PATH[path].attributes[0])


# --- what may be written, and what it means


SPELLINGS = [
    ("model.revision", "2024-01-01", "2024-01-01"),
    ("model.revision", "none", None),
    ("model.tokenizer", None, None),
    ("model.trust_remote_code", False, None),
    ("model.trust_remote_code", "org/code", "org/code"),
    ("model.flash_kernel", f"kernels-community/flash-attn2@{COMMIT}", f"kernels-community/flash-attn2@{COMMIT}"),
    ("data.train", "a.txt", (DataSource(source="a.txt"),)),
    ("data.train", ["a", {"source": "b", "weight": 2}], (DataSource(source="a"), DataSource(source="b", weight=2.0))),
    ("data.train", [{"source": "o/n@v1", "subset": "en", "split": "dev"}],
     (DataSource(source="o/n@v1", subset="en", split="dev"),)),
    ("data.fields", {"prompt": "question"}, {"prompt": "question"}), ("data.chat_template", "auto", None),
    ("data.packing", "no", False), ("data.bad_rows_max", "0.5%", 0.005), ("data.streaming", "on", True),
    ("train.method", "auto", None), ("train.method", "lora", Method.LORA), ("train.seq_len", "4k", 4000),
    ("train.seq_len", 4096.0, 4096), ("train.tokens_per_step", "1e6", 1_000_000), ("train.epochs", 0.5, 0.5),
    ("train.lr", "auto", None), ("train.lr", 1e-4, 1e-4), ("train.lr", "1e-4", 1e-4),
    ("train.warmup", "3%", Warmup(share=0.03)), ("train.warmup", 100, Warmup(steps=100)),
    ("train.warmup", "100", Warmup(steps=100)), ("train.warmup", 0, Warmup(steps=0)), ("train.weight_decay", 0, 0.0),
    ("train.lora.targets", "q_proj", ("q_proj",)), ("train.lora.targets", ["q_proj", "v_proj"], ("q_proj", "v_proj")),
    ("train.lora.alpha", "32", 32.0), ("allow", "none", ()), ("allow", "fp8", (Allowance.FP8,)),
    ("allow", ["offload_cpu", "compile", "compile"], (Allowance.OFFLOAD_CPU, Allowance.COMPILE)),
    ("limits.hours", 24, 24.0), ("limits.hours", "90 min", 1.5), ("limits.hours", "0.5", 0.5),
    ("limits.vram", "8GiB", 8 * GIB), ("limits.vram", 8 * GIB, 8 * GIB), ("limits.host_ram", None, None),
    ("pin.sharding", "none", Sharding.NONE), ("pin.sharding", "auto", None),
    ("pin.offload", "optimizer+params", Offload.OPTIMIZER_PARAMS), ("pin.compile", False, False),
    ("checkpoint.every", "auto", None), ("checkpoint.every", "500 steps", Every(steps=500)),
    ("checkpoint.every", "2k steps", Every(steps=2000)), ("checkpoint.every", "20 min", Every(seconds=1200.0)),
    ("checkpoint.best", "none", None), ("checkpoint.async", "auto", None), ("log.wandb", "off", WandbMode.OFF),
    ("log.wandb", False, WandbMode.OFF), ("log.tensorboard", "off", False), ("slurm.time", "2-12:00:00", "2-12:00:00"),
    ("slurm.modules", "cuda/12", ("cuda/12",)), ("slurm.network", "none", NodeNetwork.NONE),
    ("price_per_gpu_hour", "2.5", 2.5),
]  # fmt: skip


@pytest.mark.parametrize(("path", "written", "expected"), SPELLINGS)
def test_each_spelling_has_its_value_also_when_written_back(path, written, expected):
    job = read_job(at(path, written), origin="job.yaml")
    assert value_of(job, path) == expected
    assert read_job(job_tree(job), origin="again") == job


@pytest.mark.parametrize(
    ("written", "share", "source"),
    [
        ("2%", 0.02, None), ("0.5 %", 0.005, None), ("held-out.txt", None, "held-out.txt"), ("none", None, None),
        (False, None, None),
    ],
)  # fmt: skip
def test_evaluation_is_a_share_a_source_or_off_and_a_split_is_written_back(written, share, source):
    job = read_job(at("data.eval", written), origin="job.yaml")
    assert (job.data.eval_share, job.data.eval_source) == (share, source)
    written = {"source": "org/rows", "subset": "en", "split": "validation"}
    job = read_job(at("data.eval", written), origin="job.yaml")
    assert (job.data.eval_source, job.data.eval_subset, job.data.eval_split) == ("org/rows", "en", "validation")
    assert job_tree(job)["data"]["eval"] == written
    assert read_job(job_tree(job), origin="again") == job


def test_what_is_not_written_has_the_default_of_the_value():
    job = read_job(tree(), origin="job.yaml")
    assert job == Job(model=ModelJob(name="org/model"), data=job.data)
    assert job.data.train == (DataSource(source="text.txt"),)
    assert read_job(tree(pin=None, train={"lora": None}), origin="job.yaml") == job, "an empty section is no problem"


@pytest.mark.parametrize("length", [{"steps": 10}, {"tokens": "1M"}, {"steps": 10, "epochs": None}])
def test_steps_or_tokens_replace_the_default_of_one_epoch(length):
    train = read_job(tree(train=length), origin="job.yaml").train
    assert [train.epochs, train.steps, train.tokens].count(None) == 2
    assert train.epochs is None


# --- what is refused, and the message


REFUSED = [  # setting, value, what the line must name
    ("model.name", 7, "quotes"), ("model.name", " ", "hub id"), ("model.name", "a\0b", "bytes"),
    ("model.name", "\udcff", "bytes"), ("model.trust_remote_code", True, "the repository"),
    ("model.flash_kernel", "org/flash-attn2", "OWNER/flash-attn2@COMMIT"),
    ("model.flash_kernel", "org/flash-attn2@v4", "40 hexadecimal digits"),
    ("model.flash_kernel", f"org/flash-attn2@{COMMIT[1:]}", "40"),
    ("model.flash_kernel", f"org/flash-attn3@{COMMIT}", "flash-attn2"), ("data.train", [], "{source"),
    ("data.train", [{"weight": 1}], "entry 1"), ("data.train", ["a", {"source": "b", "weight": 0}], "entry 2"),
    ("data.train", [{"source": "b", "wieght": 2}], "entry 1"), ("data.train", 3, "a file"),
    ("data.train", [{"source": "b", "split": 3}], "entry 1"),
    ("data.eval", {"source": "b", "weight": 2}, "{source: ..., subset: ..., split: ...}"), ("data.eval", "0%", "none"),
    ("data.eval", "100%", "between 0% and 100%"), ("data.eval", True, "a share"),
    ("data.fields", {"promt": "q"}, '"promt"'), ("data.fields", ["prompt"], "{prompt: question}"),
    ("data.bad_rows_max", "101%", "100%"), ("data.streaming", "maybe", "true or false"),
    ("train.seq_len", 7, "at least 8"), ("train.seq_len", 2.5, "tokens"), ("train.seq_len", True, "tokens"),
    ("train.seq_len", None, "tokens"), ("train.seq_len", "1e999999999", "tokens"),
    ("train.epochs", float("inf"), "above 0"), ("train.lr", 0, "at most 10"), ("train.lr", float("nan"), "at most 10"),
    ("train.lr", "1e-4x", "at most 10"), ("train.lr", False, "auto"), ("train.warmup", "10 min", '"3%"'),
    ("train.seed", 2**32, "4294967295"), ("train.lora.dropout", 1.0, "below 1"),
    ("train.lora.targets", [], "all-linear"),
    ("train.galore.projection", "both", "std, reverse_std, right, left or full"), ("train.lora", 16, "train.lora.rank"),
    ("allow", {"fp8": True}, "offload_cpu"), ("limits.hours", 0, '"90 min"'), ("limits.hours", "1e9 h", '"90 min"'),
    ("limits.vram", "0GiB", '"80GB"'), ("limits.vram", -8, '"80GB"'), ("limits.vram", "9e30GB", '"80GB"'),
    ("checkpoint.every", "0 steps", '"20 min"'), ("checkpoint.every", "20", '"20 min"'),
    ("eval.every", "20 min", '"500 steps"'), ("log.every", True, '"500 steps"'),
    ("log.wandb", True, "off, offline or online"), ("slurm.time", 86400, "quotes"),
    ("slurm.time", "tomorrow", '"2-12:00:00"'), ("slurm.modules", [1], "quotes"), ("slurm.chain", 0, "from 1 to 100"),
    ("slurm.network", None, "auto, none or direct"), ("price_per_gpu_hour", 0, "above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "written", "fact"), REFUSED)
def test_each_impossible_value_is_one_line_that_names_what_would_do(path, written, fact):
    (line,) = problems(at(path, written))
    beginning = f"job.yaml: {path} is {shown(written)}"
    assert line.startswith(beginning) and fact in line.removeprefix(beginning)
    assert line.isprintable()


MEANT = [
    ("data.eval", 0.01, '"1%"'), ("data.eval", 5, '"5%"'), ("data.bad_rows_max", 0.001, '"0.1%"'),
    ("train.method", "qlorra", "qlora"), ("train.warmup", 0.03, '"3%"'), ("allow", ["offload_gpu"], "offload_cpu"),
    ("limits.vram", 8, '"8GiB"'), ("limits.vram", "8G", '"8GiB"'), ("pin.sharding", "zero4", "zero3"),
    ("checkpoint.every", 500, '"500 steps"'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "written", "meant"), MEANT)
def test_a_value_that_is_nearly_right_is_answered_with_what_was_meant(path, written, meant):
    (line,) = problems(at(path, written))
    assert line.startswith(f"job.yaml: {path} is ") and line.endswith(f" {meant}?")


@pytest.mark.parametrize("written", [object(), {"a": {"b": 1}}, [[]], b"bytes"], ids=["object", "map", "list", "bytes"])
def test_no_setting_takes_nonsense(written):
    refused = [line for path in BY_PATH for line in problems(at(path, written)) if f"job.yaml: {path} is " in line]
    assert len(refused) == len(BY_PATH)


UNKNOWN = [  # what is written, its name, what the line must name
    ({"pin": {"micro_bach": 1}}, "pin.micro_bach", "pin.micro_batch?"), ({"train": {"lt": 1}}, "train.lt", "train.lr?"),
    ({"modle": {}}, "modle", "model?"), ({"seq_len": 8}, "seq_len", "train.seq_len?"),
    ({"train": {"learning_rate": 1}}, "train.learning_rate", "train.lr?"),
    ({"data": {"train": "x", "zzz": 1}}, "data.zzz", "train, eval, format, fields"),
    ({"zzz": 1}, "zzz", "model, data, train, allow"), ({"train.lr": 1}, '"train.lr"', "train: {lr: ...}"),
    ({"train": {"lora.rank": 1}}, '"lora.rank"', "train: {lora: {rank: ...}}"), ({1: 2}, "1", "text"),
    ({True: 2}, "true", "text"), ({"a\nb": 2}, '"a\\nb"', "model, data"), ({"": 2}, '""', "text"),
    ({"x" * 200: 2}, '"xxx', "model, data"),
    *(({name: 1}, name, f"{setting}?") for name, setting in OTHER_NAMES.items() if "." not in name),
    ({"data": {"train": "x", "path": 1}}, "data.path", "data.train?"),
    ({"model": {"path": 1}}, "model.path", "model.name?"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "name", "fact"), UNKNOWN, ids=lambda value: str(value)[:40])
def test_an_unknown_key_is_answered_with_the_nearest_legal_one_or_with_all(settings, name, fact):
    """Also the names that other trainers use."""
    (line,) = problems({**tree(), **settings})
    beginning = f"job.yaml: {name}"
    assert line.startswith(beginning) and fact in line.removeprefix(beginning)
    assert line.endswith(fact) or not fact.endswith("?")
    assert line.isprintable() and len(line) < 300


@pytest.mark.parametrize("section", [section for section in SECTIONS if section])
def test_a_value_where_a_section_belongs_is_one_line(section):
    assert any(
        line.startswith(f'job.yaml: {section} is "x"') and children(section)[0] in line
        for line in problems(at(section, "x"))
    )


def test_all_problems_are_shown_at_once_in_the_order_of_the_file():
    pin = {"micro_bach": 2, "fp8_recipe": "delayed"}
    lines = problems({"model": {"name": 5}, "train": {"lr": "fast", "seq_len": -1}, "pin": pin})
    named = ["model.name", "train.lr", "train.seq_len", "pin.micro_bach", "data.train", "pin.fp8_recipe:"]
    assert [line.split()[1] for line in lines] == named
    misspelt = problems({"model": {"nmae": "a/b"}, "data": {"tain": "x"}})  # which are not also called missing
    assert [line.split()[1] for line in misspelt] == ["model.nmae", "data.tain"]


NAMES = st.sampled_from([*SECTIONS, *(path.rpartition(".")[2] for path in BY_PATH)])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)


@given(st.recursive(LEAVES, branches, max_leaves=12))
def test_any_tree_is_a_job_or_lines_of_problems(anything):
    settings = anything if isinstance(anything, dict) else {"train": anything}
    try:
        job = read_job(settings, origin="job.yaml")
    except InputProblemsError as error:
        assert all(line.startswith("job.yaml: ") and "\n" not in line for line in error.problems)
    else:
        assert read_job(job_tree(job), origin="again") == job


# --- and back


def test_every_setting_stands_in_the_tree_that_is_written():
    full = job_tree(read_job(tree(), origin="job.yaml"))
    absent = {"model.config", "train.steps", "train.tokens"}  # their counterparts are set
    for path in BY_PATH:
        *sections, name = path.split(".")
        assert (name in reduce(dict.__getitem__, sections, full)) is (path not in absent), path


def test_every_field_of_the_value_is_a_setting_or_a_section_and_every_alias_leads_to_one():
    for section, kind in SECTIONS.items():
        inside = [path for path in children(section) if path in SECTIONS]
        filled = [name for path in children(section) if path in BY_PATH for name in BY_PATH[path].attributes]
        filled += [path.rpartition(".")[2] for path in inside]
        assert sorted(filled) == sorted(kind.__struct_fields__), section
    assert len(BY_PATH) == len(FIELDS)
    assert not OTHER_NAMES.keys() & BY_PATH.keys()
    for meant in set(OTHER_NAMES.values()):
        path, _, value = meant.partition("=")
        assert path in BY_PATH
        if value:
            read_value(BY_PATH[path], [value.strip("[]")] if value.startswith("[") else value)


@given(st.floats(min_value=1e-3, max_value=99.9), st.floats(min_value=1e-3, max_value=1e7, allow_nan=False))
def test_a_share_and_a_time_survive_the_way_there_and_back(percent, seconds):
    job = read_job(tree(train={"warmup": f"{percent}%"}, checkpoint={"every": f"{seconds!r} s"}), origin="job.yaml")
    assert job.checkpoint.every == Every(seconds=seconds)
    assert read_job(job_tree(job), origin="again") == job


@given(st.text(min_size=1).filter(lambda text: text.strip() and "\0" not in text and text != "none"))
def test_text_is_kept_as_typed(text):
    if any("\ud800" <= character <= "\udfff" for character in text):
        return
    job = read_job(tree(output=text), origin="job.yaml")
    assert job.output == text
    assert codec.decode(codec.encode(job), Job, origin="job") == job


# --- layers


@pytest.mark.parametrize(
    ("below", "above", "gone", "stays"),
    [
        ({"train": {"epochs": 3}}, {"train": {"steps": 5}}, "train.epochs", "train.steps"),
        ({"train": {"steps": 5}}, {"train": {"tokens": "1M"}}, "train.steps", "train.tokens"),
        ({"train": {"steps": 5}}, {"train": {"epochs": 2}}, "train.steps", "train.epochs"),
        ({"model": {"name": "a/b"}}, {"model": {"config": "c", "tokenizer": "train"}}, "model.name", "model.config"),
    ],
)
def test_a_later_layer_replaces_the_setting_it_excludes(below, above, gone, stays):
    reading = read_layers([Layer(merged(tree(), below), "job.yaml"), Layer(above, "command line")], origin="job.yaml")
    assert value_of(reading.job, gone) is None
    assert value_of(reading.job, stays) is not None
    assert gone not in reading.sources


@pytest.mark.parametrize(
    ("stated", "change", "named", "allowed"),
    [
        (None, Change.ADD, ["fp8"], ("offload_cpu", "fp8")), ([], Change.ADD, ["fp8"], ("fp8",)),
        (["fp8", "compile"], Change.ADD, ["tf32", "fp8"], ("fp8", "compile", "tf32")), (["fp8"], Change.ADD, [], ()),
        (None, Change.REMOVE, ["offload_cpu"], ()), (["fp8", "compile"], Change.REMOVE, ["fp8", "tf32"], ("compile",)),
        (["fp8"], Change.REPLACE, ["tf32"], ("tf32",)),
    ],
)  # fmt: skip
def test_opt_ins_of_the_command_line_add_to_those_of_the_job_or_take_away(stated, change, named, allowed):
    job = Layer(tree() if stated is None else tree(allow=stated), "job.yaml")
    reading = read_layers([job, Layer({"allow": named}, "command line", opt_ins=change)], origin="job.yaml")
    assert reading.job.allow == allowed and reading.sources["allow"] == "command line"


def test_columns_of_two_layers_are_laid_together():
    layers = [
        Layer(tree(data={"train": "x", "fields": {"prompt": "q", "completion": "a"}}), "job.yaml"),
        Layer({"data": {"fields": {"prompt": "question"}}}, "command line"),
    ]
    assert read_layers(layers, origin="job.yaml").job.data.fields == {"prompt": "question", "completion": "a"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "empty"), (True, "true"), ("ü", '"ü"'), ("a\tb", '"a\\tb"'), ({}, "a mapping"), ([], "an empty list"),
        ("x" * 100, '"' + "x" * 55 + '..."'), (10**80, "1" + "0" * 55 + "..."),
    ],
)  # fmt: skip
def test_values_are_shown_on_one_short_line(value, expected):
    assert shown(value) == expected
