"""The pages of docs/guide, walked as printed; each test is a page, and what it leads to."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from printed_page import blocks_of, place_with_hub, run_block, run_page
from slurm_cluster import SlurmCluster
from workplace_factory import Workplace, read_metrics, wait_for, write_chats

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with place_with_hub(tmp_path) as made:
        yield made


def report_of(place: Workplace, name: str) -> Report:
    return codec.read(place.folder / "runs" / name / "report.json", Report)


def write_pairs(place: Workplace) -> list[dict[str, str]]:
    """The chats of the workplace as prompts with completions."""
    write_chats(place.folder / "chats.jsonl", 60)
    chats = [json.loads(line)["messages"] for line in (place.folder / "chats.jsonl").read_text().splitlines()]
    return [{"prompt": question["content"], "completion": answer["content"]} for question, answer in chats]


def test_every_page_is_walked_and_shown() -> None:
    walked = set(re.findall(r'GUIDE / "([\w-]+\.md)"', Path(__file__).read_text()))
    assert walked == {page.name for page in GUIDE.iterdir()}
    navigation = (GUIDE.parents[1] / "mkdocs.yml").read_text()
    assert all(f"guide/{name}" in navigation for name in walked)


def test_chats_become_a_model_that_answers(place: Workplace) -> None:
    write_chats(place.folder / "chats.jsonl", 120)
    plan, job, trained, answer = [
        run_block(place, block) for block in blocks_of(GUIDE / "one-card.md") if block.language == "bash"
    ]
    assert ": fits" in " ".join(plan.split()), "a long name of a processor wraps the line"
    assert "learned" in job and "held-out loss" in trained
    report = report_of(place, "mine")
    assert report.ending is Ending.FINISHED and report.evaluations[-1].loss < report.evaluations[0].loss
    assert len(answer) > 1


def test_what_fits_is_asked_without_a_network(place: Workplace) -> None:
    nowhere = place._replace(environment=place.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    first, limits, machines, allowed = run_page(nowhere, GUIDE / "what-fits.md")
    assert "on 1 x RTX-4060-8GB: fits" in first and "\nmemory" in first
    assert len(re.findall(r"tokens|micro batch|parameters", limits)) >= 3
    assert all(name in machines for name in ("RTX-4090", "RTX-3090", "8 x H100-SXM5-80GB"))
    assert "fits" in allowed.splitlines()[0]


def test_text_is_trained_by_resuming_jobs_of_a_cluster(place: Workplace, slurm: SlurmCluster) -> None:
    login = {name: slurm.environment[name] for name in ("SLURM_CONF",)}
    path = f"{place.environment['PATH'].split(':')[0]}:{slurm.environment['PATH']}"
    on_login_node = place._replace(environment=place.environment | login | {"PATH": path})
    *before, continued, shown = blocks_of(GUIDE / "cluster.md")
    *_, submitted = (run_block(on_login_node, block) for block in before)
    assert "#SBATCH --partition=cpu" in submitted
    jobs = place.folder / "runs" / "text" / "slurm-jobs.txt"
    wait_for(jobs.exists, "the first job")  # one that is cancelled before its turn leaves no line
    for block in (continued, shown):
        run_block(on_login_node, block)
    report = report_of(place, "text")
    assert report.ending is Ending.FINISHED and report.step == 40
    assert jobs.read_text().count("\n") >= 2


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
    launch, *others = (block for block in blocks if block.file is None)
    for block in blocks:
        if block.file is not None:
            run_block(place, block)
    run_block(place, launch)
    (printed,) = (run_block(place, block) for block in others)
    assert "step 10: loss" in printed


def test_a_run_is_resumed_on_another_engine_and_on_another_machine(place: Workplace) -> None:
    run_page(place, GUIDE / "resume-and-move.md")
    assert max(read_metrics(place.folder / "runs" / "first")) == 16
    moved = codec.read(place.folder / "elsewhere" / "runs" / "first" / "report.json", Report)
    assert (moved.ending, moved.step) == (Ending.FINISHED, 20)
    assert {attempt.strategy.split("/")[0] for attempt in moved.history} == {"none", "zero2"}


def test_when_it_fails_the_commands_show_why(place: Workplace) -> None:
    place.write_job()
    checked, shown, _ = run_page(place, GUIDE / "when-it-fails.md")
    assert "fine" in checked and "finished at step 4" in shown


def test_a_table_becomes_a_folder_that_transformers_loads_and_a_gguf_file(place: Workplace) -> None:
    with (place.folder / "support.csv").open("w") as stream:
        writer = csv.DictWriter(stream, ("prompt", "completion"))
        writer.writeheader()
        writer.writerows(write_pairs(place))
    _, answer, files = run_page(place, GUIDE / "use-the-model.md")
    assert "where is the cat" in answer
    assert {"model-q8_0.gguf", "Modelfile"} <= set(files.split())
