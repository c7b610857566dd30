"""Scripts of others under `accelerate launch`: the guide's own on two ranks, and every engine file by hand.

The files of ds_configs/ and fsdp_configs/ are for GPUs. Here a plain script of Accelerate runs each over gloo, which
Accelerate has to be told: with `cpu=True` it would train with DDP, whatever a file says. The files are edited where
their READMEs say so, in the number of ranks and in the folder on NVMe.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_factory import write_base
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from outcome_file import FINDING
from workplace_factory import TINY_CONFIG, Workplace, make_workplace

ROOT = Path(__file__).parents[2]
DS_CONFIGS, FSDP_CONFIGS = sorted(ROOT.glob("ds_configs/*.json")), sorted(ROOT.glob("fsdp_configs/*.yaml"))
# What a machine may lack for NVMe: memory that may be locked, for buffers that are sized for models of billions.
REFUSED = re.compile(r"mlock|lock(ed)? memory|memlock|pinned|Cannot allocate memory|allocate", re.IGNORECASE)
# FSDP2's offload needs an accelerator; the rule `fsdp_offload_needs_cuda` refuses a plan without one.
NEEDS_GPU = re.compile(r"RuntimeError: Cannot access accelerator device when none is available")

pytestmark = [pytest.mark.long, pytest.mark.products]

SUM = """
total = sum(float(weight.detach().double().sum()) for weight in trainer.model.parameters())
print("END", trainer.args.process_index, trainer.args.world_size, total.hex(), flush=True)
"""

PLAIN = """
import os
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

group = InitProcessGroupKwargs(backend="gloo")
if sys.argv[1] == "fsdp":  # Accelerate takes the engine of the file for GPUs alone
    PartialState(**group.to_kwargs())
    PartialState().distributed_type = DistributedType.MULTI_GPU
else:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes

accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[group])
model = AutoModelForCausalLM.from_pretrained("model")
rows = [torch.arange(16) * (number + 1) % 320 for number in range(16)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
losses = []
for _ in range(3):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach().float().reshape(1)).mean()))
kind, engine = accelerator.distributed_type.value, type(model).__name__
print("END", accelerator.process_index, accelerator.num_processes, kind, engine, losses[0], losses[-1], flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A folder with a model, and the commands of this environment on the path."""
    made = make_workplace(tmp_path / "place")
    write_base(made.folder / "base", TINY_CONFIG)
    (made.folder / "model").rename(made.folder / "shape")
    (made.folder / "base").rename(made.folder / "model")
    path = f"{Path(sys.executable).parent}:{made.environment['PATH']}"
    return made._replace(environment=made.environment | {"PATH": path, "PYTHONPATH": str(ROOT)})


def launch(
    place: Workplace, config: Path, script: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    there = place._replace(environment=place.environment | variables)
    return there.execute("accelerate", "launch", "--config_file", config, script, *words)


def ends_of(answer: "subprocess.CompletedProcess[str]") -> list[list[str]]:
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return sorted(line.split()[1:] for line in answer.stdout.splitlines() if line.startswith("END "))


def test_the_script_of_the_guide_trains_one_model_on_two_cpu_ranks(place: Workplace) -> None:
    """And without the argument that the plan's last line names, two models: once that is mended the line can go."""
    words = ("pythia-70m", "--method", "full", "--seq-len", "128", "--hardware", "2xCPU", "pin.sharding=ddp")
    printed = place.run("plan", *words, "--engine-files", "engine").stdout
    assert "use_cpu=True" in printed
    guide = (ROOT / "docs/guide/own-script.md").read_text()
    (script,) = re.findall(r"^```python\n(# my_script\.py\n.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (place.folder / "my_script.py").write_text(script + SUM)
    config = place.folder / "engine" / "accelerate.yaml"
    (rank_0, of_0, sum_0), (rank_1, of_1, sum_1) = ends_of(launch(place, config, "my_script.py"))
    assert (rank_0, rank_1, of_0, of_1) == ("0", "1", "2", "2") and sum_0 == sum_1
    (without,) = re.findall(r"^ *use_cpu=.*\n", script, re.MULTILINE)
    (place.folder / "my_script.py").write_text(script.replace(without, "") + SUM)
    assert [words[:2] for words in ends_of(launch(place, config, "my_script.py"))] == [["0", "1"]] * 2


def by_hand(path: Path, folder: Path, *, num_ranks: int) -> Path:
    """The accelerate file for a file of ours, with the edits that its README names."""
    if path.suffix == ".yaml":
        settings: dict[str, Any] = yaml.safe_load(path.read_text())
        mesh = settings.get("parallelism_config")
        if mesh:
            mesh |= {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": num_ranks // 2}
        settings |= {"num_machines": 1, "machine_rank": 0, "main_process_ip": None}
    else:
        nvme = folder / "nvme"
        nvme.mkdir()
        text = path.read_text().replace('"nvme_path": "auto"', f'"nvme_path": {json.dumps(str(nvme))}')
        (folder / path.name).write_text(text)
        engine = {"deepspeed_config_file": str(folder / path.name), "deepspeed_multinode_launcher": "standard"}
        settings = {"distributed_type": "DEEPSPEED", "compute_environment": "LOCAL_MACHINE", "num_machines": 1}
        settings |= {"machine_rank": 0, "main_training_function": "main", "deepspeed_config": engine}
    made = folder / "accelerate.yaml"
    made.write_text(yaml.safe_dump(settings | {"num_processes": num_ranks, "main_process_port": 0}))
    return made


@pytest.mark.parametrize("path", [*DS_CONFIGS, *FSDP_CONFIGS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_engine_file_trains_a_plain_script_or_the_reason_is_said(place, path, record_property):
    name, is_fsdp = f"{path.parent.name}/{path.name}", path.parent.name == "fsdp_configs"
    if "nvme" in path.name and lacks_libaio():
        pytest.skip(NO_LIBAIO)
    num_ranks = 4 if "parallelism_config" in path.read_text() else 2
    (place.folder / "plain.py").write_text(PLAIN)
    variables = {"OMP_NUM_THREADS": "1"}
    if not is_fsdp:
        operators = ["cpu_adam"] * ("offload" in path.read_text()) + ["async_io"] * ("nvme" in path.name)
        variables |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder_with_operators(*operators))}
    config = by_hand(path, place.folder, num_ranks=num_ranks)
    answer = launch(place, config, "plain.py", "fsdp" if is_fsdp else "deepspeed", **variables)
    offloads_fsdp = is_fsdp and "offload" in path.name
    if answer.returncode and ("nvme" in path.name or offloads_fsdp):
        limit = NEEDS_GPU if offloads_fsdp else REFUSED
        errors = [line for line in answer.stderr.splitlines() if "Error" in line and limit.search(line)]
        assert errors, answer.stdout + answer.stderr
        record_property(FINDING, (f"refused by the machine: {errors[0].strip()[:120]}", name))
        return
    ends = ends_of(answer)
    expected = ["FSDP", "FSDPLlamaForCausalLM"] if is_fsdp else ["DEEPSPEED", "DeepSpeedEngine"]
    assert [words[:4] for words in ends] == [[str(rank), str(num_ranks), *expected] for rank in range(num_ranks)]
    first, last = {words[4] for words in ends}, {words[5] for words in ends}
    assert len(first) == len(last) == 1, "the ranks have the same mean"
    assert float(last.pop()) < float(first.pop()) - 0.5
    record_property(FINDING, (f"trains on {num_ranks} ranks", name))
