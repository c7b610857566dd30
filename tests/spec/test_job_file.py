"""The job file: what each setting may be, every problem on its own line, and the way back to the file's spelling."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.spec import codec
from trainer.spec.errors import InputProblemsError
from trainer.spec.job import (
    Allowance,
    CheckpointJob,
    DataFormat,
    DataSource,
    Every,
    Job,
    ModelJob,
    NodeNetwork,
    TrainJob,
    WandbMode,
    Warmup,
)
from trainer.spec.job_fields import BY_PATH, FIELDS, SECTIONS, attribute, children
from trainer.spec.job_file import OTHER_NAMES, Layer, job_tree, read_job, read_layers
from trainer.spec.job_kinds import shown
from trainer.spec.strategy import Method, Offload, Optimizer, Precision, Sharding
from trainer.spec.units import GIB

MODEL = {"name": "org/model"}
DATA = {"train": "text.txt"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tree(**settings: Any) -> dict[str, Any]:
    """A job of two lines with settings of some sections over it."""
    return {"model": MODEL, "data": DATA, **settings}


def at(path: str, value: Any) -> dict[str, Any]:
    """A good job with one setting, whatever else that setting needs, and nothing that excludes it."""
    nested: Any = value
    for name in reversed(path.split(".")):
        nested = {name: nested}
    needed: dict[str, dict[str, Any]] = {
        "data.bad_rows_max": {"data": {"bad_rows": "skip"}},
        "data.streaming": {"train": {"steps": 10}},
        "data.loss_on": {"data": {"format": "chat"}},
        "limits.cost": {"price_per_gpu_hour": 2},
        "limits.nvme.size": {"limits": {"nvme": {"path": "/nvme"}}},
        "pin.offload": {"limits": {"nvme": {"path": "/nvme"}}},
        "pin.fp8_recipe": {"pin": {"precision": "fp8"}},
        "model.config": {"model": {"tokenizer": "train"}},
        "model.trust_remote_code": {"model": {"name": "org/code"}},
        "train.tokens_per_step": {"train": {"seq_len": 8}},
        "train.seq_len": {"train": {"tokens_per_step": 4096000}},
    }
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
    found: Any = job
    for name in path.split(".")[:-1]:
        found = getattr(found, name)
    return getattr(found, attribute(path))


# --- what may be written, and what it means


SPELLINGS = [
    ("model.revision", "2024-01-01", "2024-01-01"),
    ("model.revision", "none", None),
    ("model.tokenizer", None, None),
    ("model.trust_remote_code", False, None),
    ("model.trust_remote_code", "org/code", "org/code"),
    ("model.flash_kernel", None, None),
    ("model.flash_kernel", f"kernels-community/flash-attn2@{COMMIT}", f"kernels-community/flash-attn2@{COMMIT}"),
    ("data.train", "a.txt", (DataSource(source="a.txt"),)),
    ("data.train", ["a", {"source": "b", "weight": 2}], (DataSource(source="a"), DataSource(source="b", weight=2.0))),
    ("data.train", [{"source": "b"}], (DataSource(source="b"),)),
    (
        "data.train",
        [{"source": "o/n@v1", "subset": "en", "split": "dev"}],
        (DataSource(source="o/n@v1", subset="en", split="dev"),),
    ),
    ("data.format", "tokens", DataFormat.TOKENS),
    ("data.fields", {"prompt": "question"}, {"prompt": "question"}),
    ("data.chat_template", "auto", None),
    ("data.chat_template", "chatml", "chatml"),
    ("data.packing", "auto", None),
    ("data.packing", True, True),
    ("data.packing", "no", False),
    ("data.bad_rows_max", "0.5%", 0.005),
    ("data.streaming", "on", True),
    ("train.method", "auto", None),
    ("train.method", "lora", Method.LORA),
    ("train.seq_len", "4k", 4000),
    ("train.seq_len", 4096.0, 4096),
    ("train.tokens_per_step", "1e6", 1_000_000),
    ("train.tokens_per_step", "2M", 2_000_000),
    ("train.epochs", 0.5, 0.5),
    ("train.epochs", 3, 3.0),
    ("train.tokens", "2G", 2 * 10**9),
    ("train.lr", "auto", None),
    ("train.lr", 1e-4, 1e-4),
    ("train.lr", "1e-4", 1e-4),
    ("train.lr", "3.e-4".replace(".e", "e"), 3e-4),
    ("train.warmup", "3%", Warmup(share=0.03)),
    ("train.warmup", 100, Warmup(steps=100)),
    ("train.warmup", "100", Warmup(steps=100)),
    ("train.warmup", "1k steps", Warmup(steps=1000)),
    ("train.warmup", 0, Warmup(steps=0)),
    ("train.weight_decay", 0, 0.0),
    ("train.neftune_alpha", 5, 5.0),
    ("train.lora.targets", "all-linear", ("all-linear",)),
    ("train.lora.targets", "q_proj", ("q_proj",)),
    ("train.lora.targets", ["q_proj", "v_proj"], ("q_proj", "v_proj")),
    ("train.lora.alpha", "32", 32.0),
    ("allow", [], ()),
    ("allow", "none", ()),
    ("allow", "fp8", (Allowance.FP8,)),
    ("allow", ["offload_cpu", "compile", "compile"], (Allowance.OFFLOAD_CPU, Allowance.COMPILE)),
    ("limits.hours", 24, 24.0),
    ("limits.hours", "90 min", 1.5),
    ("limits.hours", "2 days", 48.0),
    ("limits.hours", "0.5", 0.5),
    ("limits.vram", "8GiB", 8 * GIB),
    ("limits.vram", "80GB", 80 * 10**9),
    ("limits.vram", 8 * GIB, 8 * GIB),
    ("limits.vram", float(8 * GIB), 8 * GIB),
    ("limits.host_ram", None, None),
    ("pin.sharding", "none", Sharding.NONE),
    ("pin.sharding", "auto", None),
    ("pin.sharding", None, None),
    ("pin.offload", "optimizer+params", Offload.OPTIMIZER_PARAMS),
    ("pin.optimizer", "adamw_8bit", Optimizer.ADAMW_8BIT),
    ("pin.precision", "bf16-mixed", Precision.BF16_MIXED),
    ("pin.micro_batch", 4, 4),
    ("pin.compile", False, False),
    ("checkpoint.every", "auto", None),
    ("checkpoint.every", "500 steps", Every(steps=500)),
    ("checkpoint.every", "1 step", Every(steps=1)),
    ("checkpoint.every", "2k steps", Every(steps=2000)),
    ("checkpoint.every", "20 min", Every(seconds=1200.0)),
    ("checkpoint.every", "90s", Every(seconds=90.0)),
    ("checkpoint.best", "none", None),
    ("checkpoint.async", "auto", None),
    ("checkpoint.async", True, True),
    ("eval.every", "10 steps", Every(steps=10)),
    ("log.wandb", "off", WandbMode.OFF),
    ("log.wandb", False, WandbMode.OFF),
    ("log.wandb", "online", WandbMode.ONLINE),
    ("log.tensorboard", "off", False),
    ("slurm.time", "2-12:00:00", "2-12:00:00"),
    ("slurm.modules", "cuda/12", ("cuda/12",)),
    ("slurm.modules", [], ()),
    ("slurm.extra", ["--constraint=a100"], ("--constraint=a100",)),
    ("slurm.gpus", 8, 8),
    ("slurm.memory", "64GiB", 64 * 2**30),
    ("slurm.requeue", "no", False),
    ("slurm.chain", 3, 3),
    ("slurm.network", "none", NodeNetwork.NONE),
    ("price_per_gpu_hour", "2.5", 2.5),
]


@pytest.mark.parametrize(("path", "written", "expected"), SPELLINGS)
def test_each_spelling_has_its_value(path, written, expected):
    assert value_of(read_job(at(path, written), origin="job.yaml"), path) == expected


@pytest.mark.parametrize(
    ("written", "share", "source"),
    [
        ("2%", 0.02, None),
        ("0.5 %", 0.005, None),
        ("held-out.txt", None, "held-out.txt"),
        ("none", None, None),
        (False, None, None),
    ],
)
def test_evaluation_is_a_share_a_source_or_off(written, share, source):
    job = read_job(at("data.eval", written), origin="job.yaml")
    assert (job.data.eval_share, job.data.eval_source) == (share, source)


def test_evaluation_may_name_a_split_of_a_data_set_and_is_written_back_so():
    written = {"source": "org/rows", "subset": "en", "split": "validation"}
    job = read_job(at("data.eval", written), origin="job.yaml")
    assert (job.data.eval_source, job.data.eval_subset, job.data.eval_split) == ("org/rows", "en", "validation")
    assert job_tree(job)["data"]["eval"] == written
    assert read_job(job_tree(job), origin="again") == job


def test_what_is_not_written_has_the_default_of_the_value():
    job = read_job(tree(), origin="job.yaml")
    assert job == Job(model=ModelJob(name="org/model"), data=job.data)
    assert job.data.train == (DataSource(source="text.txt"),)
    assert (job.train, job.checkpoint) == (TrainJob(), CheckpointJob())


def test_an_empty_section_is_no_problem():
    assert read_job(tree(pin=None, train={"lora": None}), origin="job.yaml") == read_job(tree(), origin="job.yaml")


@pytest.mark.parametrize("length", [{"steps": 10}, {"tokens": "1M"}, {"steps": 10, "epochs": None}])
def test_steps_or_tokens_replace_the_default_of_one_epoch(length):
    train = read_job(tree(train=length), origin="job.yaml").train
    assert [train.epochs, train.steps, train.tokens].count(None) == 2
    assert train.epochs is None


# --- what is refused, and in which words


REFUSED = [
    ("model.name", 7, 'expected null or a hub id, a folder or a preset; put it in quotes if it is text'),
    ("model.name", " ", 'model.name is " "; expected null or a hub id, a folder or a preset'),
    ("model.name", "a\0b", 'is "a\\u0000b"; expected null or a hub id, a folder or a preset; it holds bytes that'),
    ("model.name", "\udcff", 'is "\\udcff"; expected null or a hub id, a folder or a preset; it holds bytes that'),
    ("model.trust_remote_code", True, "expected false or the name of the repository whose code may run"),
    ("model.flash_kernel", "org/flash-attn2", "or OWNER/flash-attn2@COMMIT; the commit is missing: a commit is 40"),
    ("model.flash_kernel", "org/flash-attn2@v4", '"v4" may come to name other code: a commit is 40 hexadecimal digits'),
    ("model.flash_kernel", f"org/flash-attn2@{COMMIT[1:]}", "may come to name other code: a commit is 40 hexadecimal"),
    ("model.flash_kernel", f"org/flash-attn3@{COMMIT}", "flash is FlashAttention 2, as in kernels-community/flash-"),
    ("model.flash_kernel", f"flash-attn2@{COMMIT}", "flash is FlashAttention 2, as in kernels-community/flash-attn2"),
    ("model.flash_kernel", True, "model.flash_kernel is true; expected null or OWNER/flash-attn2@COMMIT"),
    ("data.train", [], "is an empty list; expected a file, a folder, a hub id, or a list of {source"),
    ("data.train", [{"weight": 1}], "entry 1 is not {source: ..., weight: 1.0, subset: ..., split"),
    ("data.train", ["a", {"source": "b", "weight": 0}], "entry 2 needs a source and a number above 0 as its weight"),
    ("data.train", [{"source": "b", "wieght": 2}], "entry 1 is not {source: ..., weight: 1.0, subset: ..., split"),
    ("data.train", 3, "data.train is 3; expected a file"),
    ("data.train", [{"source": "b", "split": 3}], "needs a source and a number above 0 as its weight, and text as"),
    ("data.eval", {"source": "b", "weight": 2}, "or none; it is not {source: ..., subset: ..., split: ...}"),
    ("data.eval", 0.01, 'such as "1%", a source of its own, or none; did you mean "1%"?'),
    ("data.eval", 5, 'did you mean "5%"?'),
    ("data.eval", "0%", "a share lies between 0% and 100%; none turns evaluation off"),
    ("data.eval", "100%", "a share lies between 0% and 100%"),
    ("data.eval", True, "data.eval is true; expected a share"),
    ("data.format", "chats", "expected auto, text, prompt_completion, chat, preference or tokens; did you mean chat?"),
    ("data.fields", {"promt": "q"}, '"promt" is none of text, tokens'),
    ("data.fields", ["prompt"], "data.fields is a list; expected a mapping such as {prompt: question}"),
    ("data.bad_rows_max", 0.001, 'did you mean "0.1%"?'),
    ("data.bad_rows_max", "101%", "data.bad_rows_max is \"101%\"; expected a share of at most 100%"),
    ("data.streaming", "maybe", "data.streaming is \"maybe\"; expected true or false"),
    ("train.method", "qlorra", 'is "qlorra"; expected auto, full, galore, lora or qlora; did you mean qlora?'),
    ("train.seq_len", 7, "train.seq_len is 7; expected a number of tokens of at least 8"),
    ("train.seq_len", -2048, "train.seq_len is -2048; expected a number of tokens of at least 8"),
    ("train.seq_len", 2.5, "train.seq_len is 2.5; expected a number of tokens"),
    ("train.seq_len", True, "train.seq_len is true; expected a number of tokens"),
    ("train.seq_len", None, "train.seq_len is empty; expected a number of tokens"),
    ("train.seq_len", "1e999999999", 'train.seq_len is "1e999999999"; expected a number of tokens'),
    ("train.seq_len", 10**40, "expected a number of tokens"),
    ("train.steps", 0, "train.steps is 0; expected null or a number of steps of at least 1"),
    ("train.epochs", 0, "train.epochs is 0; expected null or a number above 0"),
    ("train.epochs", float("inf"), "train.epochs is Infinity; expected null or a number above 0"),
    ("train.lr", 0, "train.lr is 0; expected auto or a number above 0 and at most 10"),
    ("train.lr", float("nan"), "train.lr is NaN; expected auto or a number above 0 and at most 10"),
    ("train.lr", "1e-4x", 'train.lr is "1e-4x"; expected auto or a number above 0'),
    ("train.lr", False, "train.lr is false; expected auto or a number above 0"),
    ("train.schedule", "cosin", "did you mean cosine?"),
    ("train.warmup", 0.03, 'expected auto or a share such as "3%" or a number of steps; did you mean "3%"?'),
    ("train.warmup", "10 min", 'train.warmup is "10 min"; expected auto or a share'),
    ("train.warmup", -1, "train.warmup is -1; expected auto or a share"),
    ("train.clip", 0, "train.clip is 0; expected a number above 0"),
    ("train.seed", 2**32, "train.seed is 4294967296; expected a whole number from 0 to 4294967295"),
    ("train.lora.rank", 0, "train.lora.rank is 0; expected a whole number of at least 1"),
    ("train.lora.dropout", 1.0, "train.lora.dropout is 1.0; expected a number of at least 0 and below 1"),
    ("train.lora.targets", [], "train.lora.targets is an empty list; expected all-linear or a list of module names"),
    ("train.galore.projection", "both", "expected std, reverse_std, right, left or full"),
    ("train.lora", 16, "train.lora is 16; expected settings of its own, such as train.lora.rank"),
    ("allow", ["offload_gpu"], '"offload_gpu" is none of them; did you mean offload_cpu?'),
    ("allow", {"fp8": True}, "allow is a mapping; expected a list of offload_cpu"),
    ("limits.hours", 0, 'limits.hours is 0; expected hours above 0, or a time such as "90 min"'),
    ("limits.hours", "1e9 h", "limits.hours"),
    ("limits.vram", 8, 'limits.vram is 8; expected null or a size such as "8GiB" or "80GB"; did you mean "8GiB"?'),
    ("limits.vram", "8G", 'is "8G"; expected null or a size such as "8GiB" or "80GB"; did you mean "8GiB"?'),
    ("limits.vram", 1.5, 'did you mean "1.5GiB"?'),
    ("limits.vram", "0GiB", 'limits.vram is "0GiB"; expected null or a size'),
    ("limits.vram", -8, "limits.vram is -8; expected null or a size"),
    ("limits.vram", "9e30GB", "expected null or a size"),
    ("pin.sharding", "zero4", "did you mean zero3?"),
    ("pin.precision", "BF16", 'expected auto, fp32, fp16-mixed, bf16-mixed, bf16 or fp8; did you mean bf16?'),
    ("pin.micro_batch", 0, "pin.micro_batch is 0; expected auto or a number of sequences of at least 1"),
    ("checkpoint.every", 500, 'an interval such as "500 steps" or "20 min"; did you mean "500 steps"?'),
    ("checkpoint.every", "0 steps", 'checkpoint.every is "0 steps"; expected auto or an interval'),
    ("checkpoint.every", "20", 'checkpoint.every is "20"; expected auto or an interval'),
    ("checkpoint.every", "often", 'checkpoint.every is "often"; expected auto or an interval'),
    ("checkpoint.keep", 0, "checkpoint.keep is 0; expected a number of checkpoints of at least 1"),
    ("checkpoint.best", "loss", 'checkpoint.best is "loss"; expected null, eval_loss; did you mean eval_loss?'),
    ("eval.every", "20 min", 'eval.every is "20 min"; expected auto or an interval such as "500 steps"'),
    ("log.every", True, 'log.every is true; expected an interval such as "500 steps"'),
    ("log.wandb", True, "log.wandb is true; expected off, offline or online"),
    ("slurm.time", 86400, "put it in quotes if it is text"),
    ("slurm.time", "tomorrow", 'slurm.time is "tomorrow"; expected null or a time such as "24:00:00" or "2-12:00:00"'),
    ("slurm.modules", [1], "put it in quotes if it is text"),
    ("slurm.memory", "64", 'did you mean "64GiB"?'),
    ("slurm.chain", 0, "slurm.chain is 0; expected a number of jobs from 1 to 100"),
    ("slurm.network", None, "slurm.network is empty; expected auto, none or direct"),
    ("price_per_gpu_hour", 0, "price_per_gpu_hour is 0; expected null or a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "written", "words"), REFUSED)
def test_each_impossible_value_is_one_line_that_says_what_was_expected(path, written, words):
    (line,) = problems(at(path, written))
    assert line.startswith(f"job.yaml: {path} is ")
    assert words in line
    assert line.isprintable()


@pytest.mark.parametrize("path", BY_PATH)
@pytest.mark.parametrize("written", [object(), {"a": {"b": 1}}, [[]], b"bytes"], ids=["object", "map", "list", "bytes"])
def test_no_setting_takes_nonsense(path, written):
    assert any(line.startswith(f"job.yaml: {path} is ") for line in problems(at(path, written)))


UNKNOWN = [
    ({"pin": {"micro_bach": 1}}, "pin.micro_bach is not a setting; did you mean pin.micro_batch?"),
    ({"train": {"lt": 1}}, "train.lt is not a setting; did you mean train.lr?"),
    ({"modle": {}}, "modle is not a setting; did you mean model?"),
    ({"Train": {}}, "Train is not a setting; did you mean train?"),
    ({"seq_len": 8}, "seq_len is not a setting; did you mean train.seq_len?"),
    ({"sharding": "zero2"}, "sharding is not a setting; did you mean pin.sharding?"),
    ({"lora": {"rank": 8}}, "lora is not a setting; did you mean train.lora?"),
    ({"train": {"learning_rate": 1}}, "train.learning_rate is not a setting; did you mean train.lr?"),
    ({"per_device_train_batch_size": 1}, "per_device_train_batch_size is not a setting; did you mean pin.micro_batch?"),
    ({"data": {"train": "x", "zzz": 1}}, "data.zzz is not a setting; data has train, eval, format, fields"),
    ({"zzz": 1}, "zzz is not a setting; a job has model, data, train, allow"),
    ({"train.lr": 1}, '"train.lr" is not a setting; write it as train: {lr: ...}'),
    ({"train": {"lora.rank": 1}}, '"lora.rank" is not a setting; write it as train: {lora: {rank: ...}}'),
    ({1: 2}, "1 is not a setting; settings are words"),
    ({True: 2}, "true is not a setting; settings are words"),
    ({"a\nb": 2}, '"a\\nb" is not a setting; a job has'),
    ({"": 2}, '"" is not a setting; settings are words'),
    ({"x" * 200: 2}, "is not a setting; a job has"),
]


@pytest.mark.parametrize(("settings", "words"), UNKNOWN, ids=lambda value: str(value)[:40])
def test_an_unknown_key_is_answered_with_the_nearest_legal_one_or_with_all(settings, words):
    (line,) = problems(tree(**settings) if all(isinstance(key, str) for key in settings) else {**tree(), **settings})
    assert line.startswith("job.yaml: ")
    assert words in line
    assert line.isprintable()
    assert len(line) < 300


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_the_names_other_trainers_use_lead_to_a_setting(name):
    assert OTHER_NAMES[name] in BY_PATH
    (line,) = problems(tree(**{name: 1}))
    assert line == f"job.yaml: {name} is not a setting; did you mean {OTHER_NAMES[name]}?"


@pytest.mark.parametrize("section", [section for section in SECTIONS if section])
def test_a_value_where_a_section_belongs_is_one_line(section):
    lines = problems(at(section, "x"))
    assert f'job.yaml: {section} is "x"; expected settings of its own, such as {children(section)[0]}' in lines


def test_all_problems_are_shown_at_once_in_the_order_of_the_file():
    lines = problems(
        {
            "model": {"name": 5},
            "train": {"lr": "fast", "seq_len": -1},
            "pin": {"micro_bach": 2, "fp8_recipe": "delayed"},
        }
    )
    assert [line.split()[1] for line in lines] == [
        "model.name",
        "train.lr",
        "train.seq_len",
        "pin.micro_bach",
        "data.train",
        "pin.fp8_recipe:",
    ]


def test_a_misspelt_setting_is_not_also_called_missing():
    assert problems({"model": {"nmae": "a/b"}, "data": {"tain": "x"}}) == (
        "job.yaml: model.nmae is not a setting; did you mean model.name?",
        "job.yaml: data.tain is not a setting; did you mean data.train?",
    )


@settings(deadline=None)  # a busy machine is no fault
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*SECTIONS, *(path.rpartition(".")[2] for path in BY_PATH)]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_tree_is_a_job_or_lines_of_problems(anything):
    settings = anything if isinstance(anything, dict) else {"train": anything}
    try:
        job = read_job(settings, origin="job.yaml")
    except InputProblemsError as error:
        assert all(line.startswith("job.yaml: ") and "\n" not in line for line in error.problems)
    else:
        assert read_job(job_tree(job), origin="again") == job


# --- and back


@pytest.mark.parametrize(("path", "written", "_"), SPELLINGS)
def test_a_job_written_back_reads_as_the_same_job(path, written, _):
    job = read_job(at(path, written), origin="job.yaml")
    assert read_job(job_tree(job), origin="again") == job


@pytest.mark.parametrize("path", BY_PATH)
def test_every_setting_stands_in_the_tree_that_is_written(path):
    full = job_tree(read_job(tree(), origin="job.yaml"))
    absent = {"model.config", "train.steps", "train.tokens"}  # their counterparts are set
    section: Any = full
    for name in path.split(".")[:-1]:
        section = section[name]
    assert (path.rpartition(".")[2] in section) is (path not in absent)


def test_the_table_has_a_row_for_every_field_of_the_value():
    for section, kind in SECTIONS.items():
        inside = {attribute(path) for path in children(section)}
        split = {"eval_share", "eval_source", "eval_subset", "eval_split"} if section == "data" else set()
        assert inside - ({"eval"} if split else set()) | split == set(kind.__struct_fields__), section


def test_no_two_settings_have_one_path():
    assert len(BY_PATH) == len(FIELDS)


@settings(deadline=None)  # a busy machine is no fault
@given(st.floats(min_value=1e-3, max_value=99.9))
def test_a_share_survives_the_way_there_and_back(percent):
    job = read_job(tree(train={"warmup": f"{percent}%"}), origin="job.yaml")
    assert read_job(job_tree(job), origin="again") == job


@settings(deadline=None)  # a busy machine is no fault
@given(st.floats(min_value=1e-3, max_value=1e7, allow_nan=False))
def test_a_time_survives_the_way_there_and_back(seconds):
    job = read_job(tree(checkpoint={"every": f"{seconds!r} s"}), origin="job.yaml")
    assert job.checkpoint.every == Every(seconds=seconds)
    assert read_job(job_tree(job), origin="again") == job


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(min_value=2**20, max_value=2**50))
def test_a_size_survives_the_way_there_and_back(num_bytes):
    job = read_job(tree(limits={"vram": num_bytes}), origin="job.yaml")
    assert read_job(job_tree(job), origin="again").limits.vram == num_bytes


@settings(deadline=None)  # a busy machine is no fault
@given(st.text(min_size=1).filter(lambda text: text.strip() and "\0" not in text and text != "none"))
def test_text_is_kept_as_typed(text):
    if any("\ud800" <= character <= "\udfff" for character in text):
        return
    job = read_job(tree(output=text), origin="job.yaml")
    assert job.output == text
    assert codec.decode(codec.encode(job), Job, origin="job") == job


# --- layers


def test_a_later_layer_decides_and_is_named_as_the_source():
    reading = read_layers(
        [
            Layer({"log": {"wandb": "online"}, "slurm": {"account": "a"}}, "config.yaml"),
            Layer(tree(log={"wandb": "off", "project": "p"}), "job.yaml"),
            Layer({"log": {"project": "q"}}, "command line"),
        ],
        origin="job.yaml",
    )
    assert (reading.job.log.wandb, reading.job.log.project, reading.job.slurm.account) == (WandbMode.OFF, "q", "a")
    assert reading.sources == {
        "log.wandb": "job.yaml",
        "log.project": "command line",
        "slurm.account": "config.yaml",
        "model.name": "job.yaml",
        "data.train": "job.yaml",
    }


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


def test_columns_of_two_layers_are_laid_together():
    layers = [
        Layer(tree(data={"train": "x", "fields": {"prompt": "q", "completion": "a"}}), "job.yaml"),
        Layer({"data": {"fields": {"prompt": "question"}}}, "command line"),
    ]
    assert read_layers(layers, origin="job.yaml").job.data.fields == {"prompt": "question", "completion": "a"}


def test_each_problem_names_the_layer_it_is_in():
    layers = [
        Layer({"slurm": {"nodes": 0}, "train": {"lr": 1}}, "config.yaml", allowed=("slurm",)),
        Layer(tree(train={"lr": -1}, pin={"sharding": "none"}), "job.yaml"),
        Layer({"limits": {"cost": 5}}, "command line"),
    ]
    with pytest.raises(InputProblemsError) as caught:
        read_layers(layers, origin="job.yaml")
    assert caught.value.problems == (
        "config.yaml: slurm.nodes is 0; expected null or a number of nodes of at least 1",
        "config.yaml: train belongs in a job file; this file may hold slurm",
        "job.yaml: train.lr is -1; expected auto or a number above 0 and at most 10",
        "command line: limits.cost needs price_per_gpu_hour",
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "empty"),
        (True, "true"),
        ("ü", '"ü"'),
        ("a\tb", '"a\\tb"'),
        ({}, "a mapping"),
        ([], "an empty list"),
        ("x" * 100, '"' + "x" * 55 + '..."'),
        (10**80, "1" + "0" * 55 + "..."),
    ],
)
def test_values_are_shown_on_one_short_line(value, words):
    assert shown(value) == words
