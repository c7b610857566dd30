"""Site, person, job file, command line: who wins, who is named, and that nothing wrong in any of them gets by."""

from pathlib import Path

import pytest

from shardwise.launch.job import cache_home
from shardwise.launch.job.layers import ResolvedJob, read_job_layers, render_resolved, sweep_points
from shardwise.trainer.spec.errors import InputError, InputProblemsError
from shardwise.trainer.spec.job.kinds import Every
from shardwise.trainer.spec.job.sections import WandbMode

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
JOB = "model: {name: org/model}\ndata: {train: text.txt}\n"


class Workplace:
    """A folder with a job file, a person's config and a site's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_home = folder / "config" / "shardwise"
        self.config_home.mkdir(parents=True)
        self.site: Path | None = None
        self.job = folder / "job.yaml"
        self.job.write_text(JOB)

    def write_person(self, text: str) -> Path:
        path = self.config_home / "config.yaml"
        path.write_text(text)
        return path

    def write_site(self, text: str) -> Path:
        self.site = self.folder / "site.yaml"
        self.site.write_text(text)
        return self.site

    def read(self, *overrides: str) -> ResolvedJob:
        return read_job_layers(self.job, overrides, config_home=self.config_home, site_config=self.site)

    def problems(self, *overrides: str) -> tuple[str, ...]:
        with pytest.raises(InputProblemsError) as caught:
            self.read(*overrides)
        assert all("\n" not in line for line in caught.value.problems)
        return caught.value.problems


@pytest.fixture
def workplace(tmp_path):
    return Workplace(tmp_path)


def test_each_layer_wins_over_the_one_before_and_is_named(workplace):
    text = "price_per_gpu_hour: 1\nlog: {wandb: online}\nslurm: {partition: s, account: s, qos: s}\n"
    site = workplace.write_site(text)
    person = workplace.write_person("price_per_gpu_hour: 2\nslurm: {partition: p, account: p}\n")
    workplace.job.write_text(JOB + "price_per_gpu_hour: 3\nslurm: {partition: j}\n")
    resolved = workplace.read("price_per_gpu_hour=4")
    assert resolved.job.price_per_gpu_hour == 4
    assert resolved.job.log.wandb is WandbMode.ONLINE
    assert (resolved.job.slurm.partition, resolved.job.slurm.account, resolved.job.slurm.qos) == ("j", "p", "s")
    named = {path: each for path, each in resolved.sources.items() if path[:5] in ("price", "log.w", "slurm")}
    expected = {"log.wandb": site, "slurm.partition": workplace.job, "slurm.account": person, "slurm.qos": site}
    assert named == {"price_per_gpu_hour": "command line"} | {path: str(each) for path, each in expected.items()}


def test_folders_are_those_of_a_variable_then_of_the_person_then_of_the_site(workplace, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    workplace.write_site("folders: {cache: /site/cache, scratch: /site/scratch}\n")
    workplace.write_person("folders: {cache: ~/cache, huggingface: /hf}\n")
    assert workplace.read().folders == {"cache": "/home/me/cache", "huggingface": "/hf", "scratch": "/site/scratch"}
    xdg = {"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}
    assert cache_home({"SHARDWISE_CACHE": "/fast", **xdg}, configured="/site") == Path("/fast")
    assert cache_home(xdg, configured="/site") == Path("/site")
    assert cache_home(xdg) == Path("/xdg/shardwise")
    assert cache_home({"HOME": "/home/me"}) == Path("/home/me/.cache/shardwise")


def assert_names(line: str, origin: object, *facts: str) -> None:
    """The problem begins with the file or layer it is in, and names these."""
    assert line.startswith(f"{origin}: ")
    assert [fact for fact in facts if fact not in line] == [], line


# The layer, what stands there, and what its one line names.
PROBLEMS = [
    ("person", "train: {lr: 1}", ("train ", "job file")),
    ("person", "log: {project: p}", ("log.project ", "log.wandb")),
    ("person", "folders: {cach: /x}", ("did you mean folders.cache?",)),
    ("person", "folders: {cache: here}", ('folders.cache is "here"',)),
    ("person", "folders: /x", ('folders is "/x"',)),
    ("person", "price_per_gpu_hour: -1", ("price_per_gpu_hour is -1", "above 0")),
    ("person", "- a", ("list",)),
    ("job", "", ("shardwise init",)),
    ("job", "- model", ("list",)),
    ("job", "model: 1\nmodel: 2", ("line 2, column 1", "'model'")),
    ("job", f"{JOB}folders: {{cache: /x}}", ("folders ", "config.yaml")),
    ("line", "train.lr", ('"train.lr" ', "train.lr=1e-4")),
    ("line", "=5", ('"=5" ',)),
    ("line", "pin.micro_bach=2", ("did you mean pin.micro_batch?",)),
    ("line", "seq_len=2", ("did you mean train.seq_len?",)),
    ("line", "train.lora={rank: 3", ("train.lora", "line 1, column 9")),
    ("line", "folders.cache=/x", ("folders ",)),
]


@pytest.mark.parametrize(("layer", "text", "facts"), PROBLEMS, ids=[f"{layer} {text}" for layer, text, _ in PROBLEMS])
def test_a_problem_is_one_line_that_begins_with_its_layer(workplace, layer, text, facts):
    origin: object = "command line"
    if layer == "person":
        origin = workplace.write_person(f"{text}\n")
    elif layer == "job":
        origin = workplace.job
        workplace.job.write_text(text)
    (line,) = workplace.problems(*([text] if layer == "line" else []))
    assert_names(line, origin, *facts)


def test_every_problem_of_every_layer_is_shown_at_once(workplace):
    person = workplace.write_person("folders: {cach: /x}\nslurm: {nodes: 0}\n")
    workplace.job.write_text(JOB + "pin: {micro_bach: 2}\ntrain: {lr: fast, steps: 5, epochs: 5}\n")
    expected = [
        (person, "did you mean folders.cache?"),
        ("command line", '"limits" ', "train.lr=1e-4"),
        (person, "slurm.nodes is 0", "at least 1"),
        (workplace.job, "did you mean pin.micro_batch?"),
        (workplace.job, 'train.lr is "fast"', "at most 10"),
        ("command line", "train.seq_len is 3", "at least 8"),
        (workplace.job, "train.epochs and train.steps"),
        ("command line", "limits.cost ", "price_per_gpu_hour"),
    ]
    found = workplace.problems("train.seq_len=3", "limits", "limits.cost=5")
    for line, facts in zip(found, expected, strict=True):
        assert_names(line, *facts)


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("chats.jsonl", '{"messages": []}\n', ("is data", "init --model MODEL --data ")),
        ("my rows.csv", "a,b\n", ("is data", "my rows.csv' writes")),
        ("train.py", "import torch\n", ("is a script", "plan MODEL")),
        ("run.ipynb", "{}", ("is a script",)),
        ("model.safetensors", "x", ("weights", "plan FOLDER")),
        (
            "axolotl.yml", "base_model: org/m\nadapter: lora\ndatasets:\n  - path: org/d\n    type: alpaca\n",
            ("Axolotl", "shardwise init --model org/m --data org/d "),
        ),
        (
            "lf.yaml", "model_name_or_path: org/m\nstage: sft\ndataset: a b\ncutoff_len: 2048\n",
            ("LLaMA-Factory", "--data 'a b' "),
        ),
        ("trl.yaml", "model_name_or_path: [1]\ndataset_name: org/d\n", ("TRL", "--model MODEL --data org/d")),
    ],
)  # fmt: skip
def test_a_file_that_is_no_job_is_recognised_in_one_line(workplace, name, content, facts):
    workplace.job = workplace.folder / name
    workplace.job.write_text(content)
    (line,) = workplace.problems()
    assert_names(line, workplace.job, *facts)


OVERRIDES = [
    ("train.lr=1e-4", "train", "lr", 1e-4),
    ("train.steps=1k", "train", "steps", 1000),
    ("log.tensorboard=yes", "log", "tensorboard", True),
    ("log.name=0123", "log", "name", "0123"),
    ("log.name=null", "log", "name", None),
    ("model.revision=1e10", "model", "revision", "1e10"),
    ("model.trust_remote_code=false", "model", "trust_remote_code", None),
    ("output=runs/a #b: c", None, "output", "runs/a #b: c"),
    ('output="quoted"', None, "output", "quoted"),
    ("data.fields.prompt=question", "data", "fields", {"prompt": "question"}),
    ("allow=[fp8, compile]", None, "allow", ("offload_cpu", "fp8", "compile")),
    ("allow=[]", None, "allow", ()),
    ("allow-=[offload_cpu, fp8]", None, "allow", ()),
    ("checkpoint.every=20 min", "checkpoint", "every", Every(seconds=1200.0)),
    ("train={seq_len: 4096}", "train", "seq_len", 4096),
]


@pytest.mark.parametrize(("override", "section", "name", "value"), OVERRIDES, ids=[entry[0] for entry in OVERRIDES])
def test_an_override_reads_as_the_same_line_in_a_file_would(workplace, override, section, name, value):
    job = workplace.read(override).job
    assert getattr(getattr(job, section) if section else job, name) == value


def test_overrides_alone_can_be_a_job_and_of_the_files_only_a_named_one_has_to_be_there(workplace):
    workplace.site = workplace.folder / "gone.yaml"
    (line,) = workplace.problems()
    assert_names(line, workplace.site, "no such file")
    workplace.site = workplace.job = None  # nor is there a config of a person
    resolved = workplace.read("model.name=a/b", "data.train=x")
    assert (resolved.name, resolved.job.model.name) == ("job", "a/b")
    (line,) = workplace.problems("data.train=x")
    assert_names(line, "command line", "model ")


@pytest.mark.parametrize(
    ("path", "is_submitted", "name"),
    [
        ("support-bot.yaml", False, "support-bot"),
        ("my job (2).yml", False, "my-job-2"),
        ("'.yaml", False, "job"),
        ("a.b.yaml", False, "a.b"),
        ("tiny-20261122-173000/job.yaml", True, "tiny"),
        ("tiny-20261122-173000-2/job.yaml", True, "tiny"),
        ("my run/job.yaml", True, "my-run"),
        ("sweep-20261122-173000/point-3/job.yaml", True, "sweep-point-3"),
    ],
)
def test_a_run_is_named_after_its_job_file_and_a_submitted_one_keeps_its_name(workplace, path, is_submitted, name):
    workplace.job = workplace.folder / path
    workplace.job.parent.mkdir(parents=True, exist_ok=True)
    workplace.job.write_text(JOB)
    for folder in list(workplace.job.relative_to(workplace.folder).parents)[:-1] if is_submitted else ():
        (workplace.folder / folder / "submission.json").touch()
    assert workplace.read().name == name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_resolved_file_reads_back_to_the_same_job(path, tmp_path):
    resolved = read_job_layers(path, ["limits.hours=2"], config_home=tmp_path, site_config=None)
    assert resolved.name == path.stem
    copy = tmp_path / "job.yaml"
    copy.write_text(render_resolved(resolved))
    assert read_job_layers(copy, (), config_home=tmp_path, site_config=None).job == resolved.job


def test_the_resolved_file_says_where_each_value_is_from_and_one_that_others_read_has_only_the_host_of_a_url(workplace):
    workplace.write_person("log: {wandb: offline}\n")
    workplace.job.write_text(JOB + "train: {lora: {targets: [q_proj, v_proj]}}\n")
    resolved = workplace.read("train.lr=1e-4", 'output=it\'s a "name"\nof two lines')
    lines = [" ".join(line.split()) for line in render_resolved(resolved).splitlines()]
    assert "name: org/model # from: " + str(workplace.job) in lines
    assert "lr: 0.0001 # from: command line" in lines
    assert f"wandb: offline # from: {workplace.config_home / 'config.yaml'}" in lines
    assert "seq_len: 2048 # from: default" in lines
    assert f"targets: [q_proj, v_proj] # from: {workplace.job}" in lines
    assert sum("# from: default" in line for line in lines) > 60
    copy = workplace.folder / "copy.yaml"
    copy.write_text(render_resolved(resolved))
    workplace.write_person("")
    workplace.job = copy
    assert workplace.read().job == resolved.job
    workplace.job.write_text(JOB + "log: {notify: 'https://hooks.example.org/T0/secret'}\n")
    resolved = workplace.read()
    assert "/T0/secret" in render_resolved(resolved)
    shown = render_resolved(resolved, has_url=False)
    assert "https://hooks.example.org/" in shown and "T0" not in shown and "secret" not in shown


SEEDS = tuple((f"train.lr={lr}", f"train.seed={seed}") for lr in ("1e-4", "3e-4") for seed in (0, 1))


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        (["train.lr=1e-4,3e-4", "train.seed=0, 1"], SEEDS),  # the last varies fastest
        (["allow=[offload_cpu],[offload_cpu,fp8]"], (("allow=[offload_cpu]",), ("allow=[offload_cpu,fp8]",))),
        (['data.train="a,b.txt",c'], (('data.train="a,b.txt"',), ("data.train=c",))),
        (["data.fields={prompt: a,completion: b}"], (("data.fields={prompt: a,completion: b}",),)),
    ],
)
def test_several_sweeps_multiply_and_commas_in_brackets_and_quotes_do_not_part(sweeps, expected):
    assert sweep_points(sweeps) == expected


@pytest.mark.parametrize(
    ("sweeps", "fact"),
    [
        (["train.lr"], "key=a,b"),
        (["train.lr=1,2", "train.lr=3"], "train.lr: .*twice"),
        (["train.lr=1,1"], "value .*twice"),
        (["slurm.nodes=1,2"], "slurm .*same"),
        ([f"train.seed={','.join(map(str, range(40)))}", f"train.steps={','.join(map(str, range(1, 40)))}"], "1560"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweeps, fact):
    with pytest.raises(InputError, match=fact):
        sweep_points(sweeps)
