"""Each workaround has a canary: it shows that upstream still needs it, and fails once it does not.

A canary that fails is good news: remove the workaround, its entry and its canary.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from programs import printed_by

FAKE_TE = Path(__file__).parents[1] / "factories" / "fake_te"
LEDGER = Path(__file__).parents[2] / "docs" / "workarounds.md"
TIMEOUT_S = 600


def run_python(code: str, cwd: Path | None = None, **environment: str) -> str:
    """What a program prints, in a process of its own: these settings are global."""
    return printed_by("-c", code, cwd=cwd, **{"OMP_NUM_THREADS": "1", **environment})


# What shardwise does, without its workarounds, on two gloo ranks.
FSDP_ON_CPU = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = torch.nn.Linear(4, 4)
wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
print("engine:", type(wrapped).__name__)
AcceleratorState._reset_state(reset_partial_state=True)
try:
    Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
except ValueError as error:
    print("refused:", error)
torch.distributed.destroy_process_group()
"""
DEEPSPEED_WITHOUT_BACKEND = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
from accelerate import Accelerator, DeepSpeedPlugin
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
print("counted:", accelerator.num_processes, "of", torch.distributed.get_world_size())
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def on_two_ranks(start_ranks, tmp_path):

    def run(code: str) -> str:
        (tmp_path / "canary.py").write_text(code)
        return start_ranks([str(tmp_path / "canary.py")], 2)

    return run


def test_w1_accelerate_drops_the_fsdp_plugin_of_cpu_ranks_and_refuses_their_mesh(on_two_ranks):
    printed = on_two_ranks(FSDP_ON_CPU)
    assert "engine: DistributedDataParallel" in printed and re.search("refused: .*only compatible", printed)


def test_w2_accelerate_counts_one_deepspeed_rank_where_gloo_is_not_named(on_two_ranks):
    assert "counted: 1 of 2" in on_two_ranks(DEEPSPEED_WITHOUT_BACKEND)


@pytest.fixture(scope="module")
def unwrapped() -> str:
    code = """
import sys, torch, accelerate
accelerate.Accelerator(cpu=True).unwrap_model(torch.nn.Linear(1, 1))
print("imported:", "deepspeed" in sys.modules)
print("shm:", sys.modules["deepspeed"].ops.__compatible_ops__["deepspeed_shm_comm"])
"""
    return run_python(code, DS_ACCELERATOR="cpu")


@pytest.mark.cold
def test_w3_deepspeed_builds_its_shared_memory_operator_by_default(unwrapped):
    assert "shm: True" in unwrapped


def test_w4_transformers_shards_while_it_builds_with_any_flag():
    code = """
from accelerate import DeepSpeedPlugin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}, zero3_init_flag=False)
plugin.set_deepspeed_weakref()
print("zero3:", is_deepspeed_zero3_enabled())
"""
    assert "zero3: True" in run_python(code, DS_ACCELERATOR="cpu")


def test_w5_accelerate_replaces_a_decoupled_cpu_adam_by_one_with_l2_decay():
    code = """
import deepspeed.ops.adam as adam
import torch

class DeepSpeedCPUAdam(torch.optim.Optimizer):  # stands in for the compiled one: only its settings are of interest
    def __init__(self, params, lr=0.1, weight_decay=0.0, adamw_mode=True):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.adam_w_mode = adamw_mode

adam.DeepSpeedCPUAdam = DeepSpeedCPUAdam
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
ours = DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))], adamw_mode=True)
print("adamw:", map_pytorch_optim_to_deepspeed(ours).adam_w_mode)
"""
    assert "adamw: False" in run_python(code, DS_ACCELERATOR="cpu")


FREE_MEMORY = """
from types import SimpleNamespace
import torch
from deepspeed.accelerator import cuda_accelerator, get_accelerator, set_accelerator
class Nvml:
    def __getattr__(self, name):
        return lambda *_: self
    free = 7
cuda_accelerator.pynvml = Nvml()  # no driver is here
set_accelerator(cuda_accelerator.CUDA_Accelerator())
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=9)
torch.cuda.memory_allocated = lambda device: 4
{before}
print("free:", get_accelerator().available_memory(0))
"""


def test_w62_deepspeed_reads_names_of_cards_as_numbers_and_ours_asks_torch_for_free_memory():
    code = FREE_MEMORY.format(before="")
    assert "free: 7" in run_python(code, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(AssertionError, match="invalid literal for int"):
        run_python(code, CUDA_VISIBLE_DEVICES="GPU-c41efe38")
    ours = "from shardwise.trainer.runtime.engines import zero\nzero.read_free_memory_from_torch()\n"
    assert "free: 5" in run_python(FREE_MEMORY.format(before=ours), CUDA_VISIBLE_DEVICES="GPU-c41efe38")


TYPE_OF_WEIGHTS = """
from types import SimpleNamespace
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
{before}
get_accelerator().is_fp16_supported = lambda: False  # as on most processors
place = SimpleNamespace()
Init._set_dtype(place, None, torch.float32)
print("type:", place.dtype)
"""


def test_w55_deepspeed_drops_the_type_of_weights_where_there_is_no_fp16_and_ours_keeps_it():
    assert "type: torch.bfloat16" in run_python(TYPE_OF_WEIGHTS.format(before=""), DS_ACCELERATOR="cpu")
    ours = "from shardwise.trainer.runtime.engines import zero\n" + 2 * "zero.swap_weights_in_their_type()\n"
    assert "type: torch.float32" in run_python(TYPE_OF_WEIGHTS.format(before=ours), DS_ACCELERATOR="cpu")


def test_w6_accelerates_fsdp_policy_adds_gradients_and_returns_the_loss_in_16_bit():
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    plugin.set_mixed_precision("bf16")
    policy = plugin.mixed_precision_policy
    assert (policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.bfloat16)


def test_w7_accelerate_starts_one_rank_of_multi_cpu(tmp_path):
    config = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "use_cpu": True,
        "num_processes": 2, "num_machines": 1, "machine_rank": 0, "mixed_precision": "no",
    }  # fmt: skip
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config))
    script = tmp_path / "count.py"
    script.write_text("import os; print('rank', os.environ.get('RANK', '0'), 'of', os.environ.get('WORLD_SIZE', '1'))")
    printed = printed_by("-m", "accelerate.commands.launch", "--config_file", tmp_path / "accelerate.yaml", script)
    assert re.findall(r"rank . of .", printed) == ["rank 0 of 1"], "of two that were asked for"


@pytest.mark.cold
def test_w8_unwrapping_a_model_imports_deepspeed(unwrapped):
    assert "imported: True" in unwrapped


def test_w9_transformers_ignores_the_rules_in_tokenizer_json_for_some_model_types(tmp_path):
    from transformers import AutoTokenizer

    from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer

    trained = train_tokenizer(iter(["2023 2023 2023 2023"]), vocab_size=300)
    write_trained_tokenizer(trained, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert len(trained.encode(["2023"])[0]) == 1
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer")("2023")["input_ids"]) == 4


def test_every_workaround_has_an_entry_and_a_canary():
    in_ledger = set(re.findall(r"^## (W\d+)\b", LEDGER.read_text(), re.MULTILINE))
    files = Path(__file__).parents[1].rglob("test_*.py")
    canaries = (re.findall(r"^def test_(w\d+)_", path.read_text(), re.MULTILINE) for path in files)
    with_canary = {number.upper() for found in canaries for number in found}
    assert in_ledger == with_canary


def test_w10_a_cpu_build_of_torch_aborts_on_tensors_of_a_device_that_is_not_there():
    code = (
        "import torch\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        "    (torch.empty(4, device='cuda', requires_grad=True) * 2).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    is_cpu_build = torch.version.cuda is None
    assert (done.returncode < 0) == is_cpu_build
    assert ("not linked with support for cuda" in done.stderr) == is_cpu_build


def test_w11_autocast_for_cuda_turns_itself_off_without_a_gpu():
    code = """
import torch, warnings
warnings.simplefilter("ignore")
with torch.autocast("cuda", dtype=torch.bfloat16):
    print(torch.is_autocast_enabled("cuda"))
"""
    assert run_python(code, CUDA_VISIBLE_DEVICES="").strip() == "False"


READ = """
import torch
from shardwise.trainer.runtime.run.operators import use_built_operators
use_built_operators()
from deepspeed.ops.op_builder import AsyncIOBuilder

handle = AsyncIOBuilder().load(verbose=False).aio_handle(
    block_size=1 << 20, queue_depth=8, single_submit=False, overlap_events=True, intra_op_parallelism=1
)
source = handle.new_cpu_locked_tensor(4096, torch.zeros(1)).fill_(7)
assert (handle.async_pwrite(source, "gradient.swp", 0), handle.wait()) == (0, 1)
buffer = handle.new_cpu_locked_tensor(8192, torch.zeros(1)).zero_()
for offset in (0, 1):
    place = buffer[offset : offset + 4096]
    answers = handle.async_pread(place, "gradient.swp", 0), handle.wait()
    print("canary:", offset, *answers, int((place == 7).sum()))
    buffer.zero_()
"""


def test_w52_deepspeed_reads_nothing_to_an_offset_between_blocks_and_reports_success(tmp_path):
    if lacks_libaio():
        pytest.skip(NO_LIBAIO)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    operators = {"TORCH_EXTENSIONS_DIR": str(folder_with_operators("async_io")), "PATH": path}
    printed = run_python(READ, tmp_path, DS_ACCELERATOR="cpu", **operators)
    lines = [line for line in printed.splitlines() if line.startswith("canary: ")]
    assert lines == ["canary: 0 0 1 4096", "canary: 1 0 1 0"]


def test_w21_accelerates_fp16_is_fp32_on_a_cpu():
    program = """
import torch, accelerate
accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
model = accelerator.prepare(torch.nn.Linear(2, 2))
seen = []
model.register_forward_hook(lambda _module, _inputs, out: seen.append(torch.is_autocast_enabled("cpu")))
model(torch.ones(1, 2))
print("scaler:", accelerator.scaler, "autocast:", seen)
"""
    assert "scaler: None autocast: [False]" in run_python(program)


@pytest.mark.long
@pytest.mark.products
@pytest.mark.cold
def test_w22_accelerates_fp8_is_off_or_partial(tmp_path):
    program = """
import inspect, torch, accelerate
from accelerate.utils.transformer_engine import convert_model
import transformer_engine.pytorch as te
accelerate.Accelerator(cpu=True)
model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for size in (16, 15, 32)))
with torch.no_grad():
    convert_model(model)
print("converted:", [isinstance(layer, te.Linear) for layer in model])
engines = accelerate.Accelerator._prepare_fsdp2, accelerate.Accelerator._prepare_deepspeed
print("autocast:", ["apply_fp8_autowrap" in inspect.getsource(prepare) for prepare in engines])
print("recipe:", "te_recipe_handler" in inspect.getsource(engines[1]))
"""
    metadata = tmp_path / "transformer_engine-2.20.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    printed = run_python(program, PYTHONPATH=os.pathsep.join([str(FAKE_TE), str(tmp_path)]), FAKE_TE_DEVICE="cpu")
    assert printed.splitlines()[-3:] == ["converted: [True, False, False]", "autocast: [False, True]", "recipe: False"]
