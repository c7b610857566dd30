"""What README, guide, examples and notebook print: each command is one; `make test-long` runs each.

Blocks run as printed, in order, each in a clean shell, in a folder with a home of its own; those of the README in one
shell, in a clone that their first block installs.
"""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from chat_tokenizers import qwen_folder
from export_factory import write_base
from hub_server import Hub, serving
from slurm_cluster import SlurmCluster
from typed_command import in_empty_home, typed
from workplace_factory import LIMIT_S, TINY_CONFIG, Workplace, make_workplace, read_metrics, wait_for, write_chats

from shardwise.launch.job.layers import read_job_layers
from shardwise.launch.options import parse_command_line
from shardwise.slurm.jobs import describe_reason
from shardwise.trainer.runtime.data.chat import template
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

ROOT = Path(__file__).parents[2]
GUIDE, NOTEBOOK = ROOT / "docs/guide", ROOT / "examples/quickstart.ipynb"
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *EXAMPLES]
DOCUMENTS += sorted(ROOT.glob("examples/walkthrough/*.yaml"))
PRINTED = re.compile(r"^(?:    |#   )?shardwise +((?:[^\n]*\\\n)*[^\n]+)", re.MULTILINE)
REMARK = re.compile(r" {2,}")  # and what is said of the command
HERE = "2xCPU"  # for commands that plan for the machine they are typed on
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B")  # of which the small hub has a small one each
CONFIG = {**TINY_CONFIG, "model_type": "qwen2", "vocab_size": 1024, "max_position_embeddings": 2048}


class Block(NamedTuple):
    """A fenced block; `file` is the name in its first line, `# NAME`, if that is all the line has."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        named = re.match(r"# ([\w.-]+\.\w+)\n", self.text)
        return named.group(1) if named else None


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder with text and a model, the commands of this environment on the path, and a hub that has `MODELS`."""
    made = make_workplace(tmp_path / "place")
    made.job.unlink()
    model = write_base(qwen_folder(tmp_path / "hub", eos="<|im_end|>"), CONFIG)
    chatml = Path(template.__file__).parent / "templates" / "chatml.jinja"
    (model / "chat_template.jinja").write_text(chatml.read_text())
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with serving(Hub(files=dict.fromkeys(MODELS, files))) as hub:
        given = {name: value for name, value in made.environment.items() if "PROXY" not in name.upper()}
        path = f"{Path(sys.executable).parent}:{given['PATH']}"
        yield made._replace(environment=given | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PATH": path})


def run_block(place: Workplace, block: Block) -> str:
    """What a block prints; one that names a file is written, not run. Fails with the first command that does."""
    if block.file is not None:
        (place.folder / block.file).write_text(block.text)
        return ""
    program = {"bash": ["sh", "-ec"], "python": [sys.executable, "-P", "-c"]}.get(block.language)
    if program is None:
        return ""
    answer = place.execute(*program, block.text)
    assert answer.returncode == 0, block.text + answer.stdout + answer.stderr
    return answer.stdout


def run_page(place: Workplace, page: Path) -> list[str]:
    """What each block printed, in order; nothing for a block that is a file or an example."""
    return [run_block(place, block) for block in blocks_of(page)]


def runs_a_document(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.long(pytest.mark.documents(test))


def commands_of(document: Path) -> list[list[str]]:
    """The words after `shardwise` of each line that starts with it; a line with options in brackets is a synopsis."""
    lines = [
        re.sub(r"^(\w+) +(?=examples/|runs/)", r"\1 ", line.replace("\\\n", " "))
        for line in PRINTED.findall(document.read_text())
    ]
    lines = [REMARK.split(line)[0].removesuffix(" &") for line in lines if "[-" not in line]
    return [shlex.split(line, comments=True) for line in lines if not line.startswith("trains ")]


PLANS = [(path, words) for path in EXAMPLES for words in commands_of(path) if words[0] == "plan"]


def test_every_printed_command_is_accepted_and_the_examples_that_it_names_are_there() -> None:
    printed = [(path, words) for path in DOCUMENTS for words in commands_of(path)]
    assert len(printed) > 100 and {path.parent for path, _ in printed} >= {ROOT, GUIDE, GUIDE.parent, NOTEBOOK.parent}
    for path, words in printed:
        if len(words) > 1:
            parse_command_line([word for word in words if word != "--debug"])
        assert all((ROOT / word).exists() for word in words if word.startswith("examples/")), (path, words)


def test_what_a_guide_runs_is_installed_by_a_command_before_it() -> None:
    """Formats and trackers that are extras of the package."""
    extras = {
        "--format gguf": "gguf",
        "--format onnx": "onnx",
        "log.tensorboard=true": "tensorboard",
        "log.wandb=": "wandb",
    }
    found = []
    for page in (*GUIDE.glob("*.md"), ROOT / "README.md"):
        text = page.read_text()
        for use, extra in extras.items():
            if use in text:
                found.append(extra)
                assert f"[{extra}]" in text[: text.index(use)], f"{page.name}: {use}"
    assert "gguf" in found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_header_of_an_example_says_how_to_plan_it(example: Path) -> None:
    mine = [words for path, words in PLANS if path == example]
    assert mine and all(words[1] == f"examples/{example.name}" for words in mine)
    assert all(("--hardware" in words) is (example.name != "quickstart.yaml") for words in mine)


@runs_a_document
@pytest.mark.parametrize("words", [words for _, words in PLANS], ids=" ".join)
def test_an_example_plans_as_its_header_says(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    in_empty_home(tmp_path, monkeypatch)
    hardware = words[words.index("--hardware") + 1] if "--hardware" in words else None
    code, output, complaints = typed(capsys, *words, *([] if hardware else ["--hardware", HERE]))
    assert (code, complaints) == (0, "") and "not trained by this version" not in output
    assert re.search(r"\(\S+/\S+/\S+\)$", output, re.MULTILINE) and (hardware or HERE).split("x")[-1] in output


def without_network(place: Workplace) -> Workplace:
    return place._replace(environment=place.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})


def on_login_node(place: Workplace, slurm: SlurmCluster) -> Workplace:
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    names = {"SLURM_CONF": slurm.environment["SLURM_CONF"], "PATH": path}
    return place._replace(environment=place.environment | names)


def report_of(place: Workplace, name: str) -> Report:
    return codec.read(place.folder / "runs" / name / "report.json", Report)


def write_pairs(place: Workplace) -> list[dict[str, str]]:
    """The chats of the workplace as prompts with completions."""
    write_chats(place.folder / "chats.jsonl", 60)
    chats = [json.loads(line)["messages"] for line in (place.folder / "chats.jsonl").read_text().splitlines()]
    return [{"prompt": question["content"], "completion": answer["content"]} for question, answer in chats]


# --- README -----------------------------------------------------------------------------------------------------

BLOCKS = blocks_of(ROOT / "README.md")
CLUSTER = BLOCKS[3]
CANDIDATE = r"none/[\w-]+/\w+ \d+\.\d+"


@runs_a_document
@pytest.mark.cold
@pytest.mark.timeout(3600)
def test_a_clone_installs_and_runs_every_block_in_one_empty_shell(place: Workplace, slurm: SlurmCluster, tmp_path):
    """No cache, and no variable but those that name the hub and the cluster of this test, and this machine's index."""
    clone = tmp_path / "shardwise"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    write_chats(clone / "chats.jsonl", 200)
    own = str(Path(sys.executable).parent)
    path, path_to_slurm = (
        ":".join(folder for folder in text.split(":") if folder != own)
        for text in (place.environment["PATH"], slurm.environment["PATH"])
    )
    environment = {"HOME": str(tmp_path / "home"), "PATH": path}
    environment |= {name: place.environment[name] for name in ("HF_ENDPOINT", "HF_HUB_DISABLE_XET")}
    environment |= {name: value for name, value in place.environment.items() if name.startswith("PIP_")}
    blocks = [text if language == "bash" else f"python - <<'END'\n{text}END\n" for language, text in BLOCKS]
    login = f'export PATH="$VIRTUAL_ENV/bin:{path_to_slurm}" SLURM_CONF={slurm.environment["SLURM_CONF"]}'
    # Before that, this is no login node, on which `train` would refuse to train.
    blocks.insert(BLOCKS.index(CLUSTER), login)
    answer = subprocess.run(
        ["sh", "-ec", "\n".join(blocks)],
        cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    facts = (
        r"QLoRA of llama \(8\.03B\) on 1 x RTX-4060-8GB: fits", "8 x H100-SXM5-80GB: fits", r"finished at step \d+",
        rf"(?m)^{CANDIDATE}$", r"\n#SBATCH --partition=h100\n", r"\n#SBATCH --nodes=2\n",
    )  # fmt: skip
    assert [fact for fact in facts if not re.search(fact, answer.stdout)] == [], answer.stdout
    assert len(read_metrics(clone / "runs" / "mine")) >= 100 and (clone / "my-model" / "model.safetensors").is_file()


# --- docs/guide: each test is a page, and what it leads to ----------------------------------------------------


def test_every_page_of_the_guide_is_run_and_shown() -> None:
    run = set(re.findall(r'GUIDE / "([\w-]+\.md)"', Path(__file__).read_text()))
    assert run == {page.name for page in GUIDE.iterdir()}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"guide/{name}" in navigation for name in run)


@runs_a_document
def test_chats_become_a_model_that_answers(place: Workplace) -> None:
    write_chats(place.folder / "chats.jsonl", 120)
    plan, job, trained, answer = [
        run_block(place, block) for block in blocks_of(GUIDE / "one-card.md") if block.language == "bash"
    ]
    assert ": fits" in " ".join(plan.split()), "a long name of a processor wraps the line"
    assert "learned" in job and "held-out loss" in trained and len(answer) > 1
    report = report_of(place, "mine")
    assert report.ending is Ending.FINISHED and report.evaluations[-1].loss < report.evaluations[0].loss


@runs_a_document
def test_what_fits_is_asked_without_a_network(place: Workplace) -> None:
    first, limits, machines, allowed = run_page(without_network(place), GUIDE / "what-fits.md")
    assert "on 1 x RTX-4060-8GB: fits" in first and "\nmemory" in first
    assert len(re.findall(r"tokens|micro batch|parameters", limits)) >= 3
    assert all(name in machines for name in ("RTX-4090", "RTX-3090", "8 x H100-SXM5-80GB"))
    assert "fits" in allowed.splitlines()[0]


@runs_a_document
def test_text_is_trained_by_resuming_jobs_of_a_cluster(place: Workplace, slurm: SlurmCluster) -> None:
    there = on_login_node(place, slurm)
    *before, continued, shown = blocks_of(GUIDE / "cluster.md")
    *_, submitted = (run_block(there, block) for block in before)
    assert "#SBATCH --partition=cpu" in submitted
    jobs = place.folder / "runs" / "text" / "slurm-jobs.txt"
    wait_for(jobs.exists, "the first job")  # one that is cancelled before its turn leaves no line
    for block in (continued, shown):
        run_block(there, block)
    report = report_of(place, "text")
    assert report.ending is Ending.FINISHED and report.step == 40
    assert jobs.read_text().count("\n") >= 2


@runs_a_document
def test_a_script_of_ones_own_is_launched_and_own_functions_are_called(place: Workplace) -> None:
    rows = [
        json.dumps({"question": pair["prompt"], "answer": pair["completion"], "stars": 1 + number % 5})
        for number, pair in enumerate(write_pairs(place))
    ]
    (place.folder / "support.jsonl").write_text("\n".join(rows))
    model = place.folder / "model"
    model.rename(place.folder / "shape")
    model.symlink_to(place.folder.parent / "hub")
    blocks = blocks_of(GUIDE / "own-script.md")
    for block in blocks:
        if block.file is not None:
            run_block(place, block)
    shutil.copy(ROOT / "examples" / "train_loop.py", place.folder)
    _launched, printed, looped = (run_block(place, block) for block in blocks if block.file is None)
    assert "step 10: loss" in printed and "step 10: loss" in looped
    assert (place.folder / "runs" / "loop" / "export" / "model.safetensors").exists()


@runs_a_document
def test_a_run_is_resumed_on_another_engine_and_on_another_machine(place: Workplace) -> None:
    run_page(place, GUIDE / "resume-and-move.md")
    assert max(read_metrics(place.folder / "runs" / "first")) == 16
    moved = codec.read(place.folder / "elsewhere" / "runs" / "first" / "report.json", Report)
    assert (moved.ending, moved.step) == (Ending.FINISHED, 20)
    assert {attempt.strategy.split("/")[0] for attempt in moved.history} == {"none", "zero2"}


@runs_a_document
def test_when_it_fails_the_commands_show_why(place: Workplace) -> None:
    place.write_job()
    checked, shown, _ = run_page(place, GUIDE / "when-it-fails.md")
    assert "fine" in checked and "finished at step 4" in shown


@runs_a_document
def test_a_table_becomes_a_folder_that_transformers_loads_and_a_gguf_file(place: Workplace) -> None:
    with (place.folder / "support.csv").open("w") as stream:
        writer = csv.DictWriter(stream, ("prompt", "completion"))
        writer.writeheader()
        writer.writerows(write_pairs(place))
    _, answer, files = run_page(place, GUIDE / "use-the-model.md")
    assert "where is the cat" in answer and {"model-q8_0.gguf", "Modelfile"} <= set(files.split())


# --- examples/quickstart.ipynb ----------------------------------------------------------------------------------


def test_the_notebook_is_committed_with_its_output() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "execute_result"}
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "fits" in pages[0] and "finished at step" in pages[-1]
    printed = next(output.text for output in outputs if output.output_type == "stream")
    assert "\x1b" not in printed and "\r" not in printed  # plain lines
    assert not any(word in NOTEBOOK.read_text() for word in ("/root", "/home/", "/tmp/"))


@runs_a_document
def test_the_notebook_executes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace = make_workplace(tmp_path / "work place")
    for name, value in workplace.environment.items():
        monkeypatch.setenv(name, value)
    shutil.copy(NOTEBOOK.with_suffix(".yaml"), workplace.folder)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its libraries
        from nbclient import NotebookClient

        place = {"metadata": {"path": str(workplace.folder)}}
        NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=place).execute()
    shown = "".join(str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code")
    assert "step 10 of 10" in shown and "Traceback" not in shown


# --- docs/walkthrough.md: its jobs, of fewer epochs ------------------------------------------------------------------

WALKTHROUGH = ROOT / "examples" / "walkthrough"


@runs_a_document
@pytest.mark.timeout(1800)
def test_the_jobs_of_the_walkthrough_learn_one_after_the_other(tmp_path: Path) -> None:
    there = make_workplace(tmp_path / "walkthrough")
    shutil.copytree(WALKTHROUGH, there.folder / "examples" / "walkthrough")

    def train(name: str, *overrides: str) -> Report:
        there.run("train", f"examples/walkthrough/{name}.yaml", *overrides, "--run-dir", f"runs/{name}")
        report = codec.read(there.folder / "runs" / name / "report.json", Report)
        assert report.ending is Ending.FINISHED and report.incidents == ()
        assert report.evaluations[-1].loss < report.evaluations[0].loss
        return report

    train("1-pretrain")
    there.run("export", "runs/1-pretrain", "my-base")
    shown = there.run("data", "examples/walkthrough/2-chat.yaml").stdout
    learned = [line for line in shown.splitlines() if line.startswith("learned |")]
    assert "sft" in shown and learned and not any("<|im_start|>" in line or "What is" in line for line in learned)
    assert (train("2-chat", "train.epochs=6").evaluations[-1].accuracy or 0) > 0.2
    there.run("export", "runs/2-chat", "my-chat")
    chat = there.folder / "my-chat"
    assert json.loads((chat / "config.json").read_text())["vocab_size"] == 4160
    added = json.loads((chat / "tokenizer.json").read_text())["added_tokens"]
    assert {"<|im_start|>", "<|im_end|>"} <= {token["content"] for token in added}
    assert "<|im_start|>" in (chat / "chat_template.jinja").read_text()
    first, *_, last = train("5-preferences").evaluations
    assert last.reward_accuracy > 0.5 and last.reward_margin > first.reward_margin > -1
    for name, in_4_bit in (("3-lora", ""), ("4-qlora", "28 of nf4")):
        verified = train(name, "train.epochs=1").verified
        assert verified is not None and verified.facts["adapters"] == "float32, on 28 layers"
        assert verified.facts.get("4-bit layers", "")[: len("28 of nf4")] == in_4_bit
    there.run("export", "runs/4-qlora", "my-qlora", "--merge")
    train("6-extensions", "train.epochs=1")
    run_dir = there.folder / "runs" / "6-extensions"
    ratings = [json.loads(line)["rating"] for line in (WALKTHROUGH / "support_log.jsonl").read_text().splitlines()]
    num_documents = json.loads((run_dir / "plan.json").read_text())["data"]["num_documents"]
    assert 0.8 * sum(rating >= 3 for rating in ratings) <= num_documents <= sum(rating >= 3 for rating in ratings)
    assert "step 2: loss" in "".join(path.read_text() for path in (run_dir / "attempts").rglob("*.log"))
    (retained,) = (run_dir / "extensions").iterdir()
    assert retained.read_bytes() == (WALKTHROUGH / "support_log.py").read_bytes()


# --- docs/slurm.md: commands, options, settings and reasons --------------------------------------------------------

TEXT = (ROOT / "docs" / "slurm.md").read_text()
SETTINGS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
IN_SENTENCES = re.compile(
    r"`(?:[A-Z_]+=\S+ |watch -n 60 |srun [^`]*?)?(shardwise [^`]+)`|exec (shardwise (?:.*\\\n)*.*)"
)
FILLED = {"JOB": "job.yaml", "JOBID": "4711", "PORT": "1"}


def test_every_command_in_its_sentences_and_scripts_is_one():
    """With values in place of what a shell or a reader fills in."""
    shown = {"".join(found).replace("\\\n", " ").replace("$resume", "--resume") for found in IN_SENTENCES.findall(TEXT)}
    assert len(shown) > 10
    for line in shown:
        words = [FILLED.get(word, word) for word in shlex.split(re.sub(r'"?\$\w+"?', "1", line))[1:]]
        if words in (["cancel"], ["fetch"], ["submit"], ["train"], ["train", "--resume"]):
            words.append("job.yaml")  # named in a sentence
        _, options = parse_command_line(words)
        assert all("=" in word for word in getattr(options, "overrides", [])), line


def test_every_reason_in_its_table_is_explained_by_status():
    table = TEXT.split("| reason |")[1].split("\n\n")[0]
    reasons = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert len(reasons) > 12
    assert [name for name in reasons if describe_reason(name) is None] == []


def test_its_personal_settings_are_settings(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(SETTINGS[0])
    (tmp_path / "job.yaml").write_text("model: {config: m, tokenizer: train}\ndata: {train: d}\n")
    read = read_job_layers(tmp_path / "job.yaml", (), config_home=tmp_path, site_config=None)
    assert read.job.slurm.partition == "gpu" and read.folders["scratch"] == "/local/me"
