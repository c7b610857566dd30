"""Attention that may run, a kernel of the hub among it; and the kernel behind PyTorch's own is the planned one."""

import importlib.metadata
import importlib.util
import json
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architecture_factory import TINY, VARIANTS
from attempt_runs import losses_of, run_attempt
from estimate_factory import LLAMA_8B, configuration, gpu
from hub_kernel_factory import COMMIT, KERNEL, REPOSITORY, hub_environment, put_kernel
from optimizer_factory import tiny_llama
from programs import printed_by
from rank_factory import rank_plan, write_attempt, write_packed_rows
from torch.nn.attention import SDPBackend
from transformers.integrations import hub_kernels, sdpa_attention
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK, is_flash_attn_available
from transformers.utils import import_utils
from transformers.utils.generic import is_flash_attention_requested

from shardwise.trainer.planning.policy.precision_policy import attention_kernel, dims_of
from shardwise.trainer.runtime import attention
from shardwise.trainer.runtime.attention.choice import check_attention
from shardwise.trainer.runtime.attention.flash_kernel import load_flash_kernel, main
from shardwise.trainer.runtime.attention.packed import ONE_BY_ONE, VARLEN
from shardwise.trainer.runtime.models.build import make_trainable
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.runtime.tools.measure import attention_backend
from shardwise.trainer.simulation.fake_device import FakeDeviceMode, as_if_available
from shardwise.trainer.simulation.kernels import Kernels
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.strategy import Attention, AttentionKernel, Checkpointing, LossHead, Precision

LLAMA = read_model_shape(TINY["llama"])


def with_flash_attn(monkeypatch, found: str | None) -> None:
    """An importable flash_attn, of the package flash-attn at a version or of another package."""

    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr("shardwise.trainer.runtime.attention.choice.version", version)


def test_flash_takes_the_second_generation_of_flash_attn_and_no_windows_that_it_would_not_be_told_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFaultError, match=r"flash-attn (?s:.*)install (?s:.*)pin\.attention=sdpa"):
        check_attention(Attention.FLASH, LLAMA)
    for found in ("1.0.9", "4.0.0b1", None):
        with_flash_attn(monkeypatch, found)
        with pytest.raises(EnvironmentFaultError, match=rf"flash-attn {found or 'none'}\b"):
            check_attention(Attention.FLASH, LLAMA)
    with_flash_attn(monkeypatch, "2.8.3")
    check_attention(Attention.FLASH, read_model_shape(TINY["qwen2_moe"]))
    windowed = read_model_shape(VARIANTS["qwen2_moe with windows"])
    with pytest.raises(InputError, match=r"windows of qwen2_moe\b(?s:.*)pin\.attention=sdpa"):
        check_attention(Attention.FLASH, windowed)
    check_attention(Attention.SDPA, windowed)


def test_w30_transformers_loads_a_kernel_from_the_hub_without_flash_attn():
    """A canary: `flash_attention_2` stands for code of the hub where `kernels` is installed and flash-attn is not."""
    assert FLASH_ATTN_KERNEL_FALLBACK["flash_attention_2"].startswith("kernels-community/")
    assert not is_flash_attn_available()
    assert is_flash_attn_available(kernels_fallback_ok=True) == import_utils.is_kernels_available()


def test_w30_a_name_with_a_commit_is_a_kernel_at_that_revision(monkeypatch):
    """A canary: what we name is requested at its commit, the repository alone at a branch; both are taken for flash."""
    requests: list[dict[str, object]] = []

    def get_kernel(repository: str, **settings: object) -> SimpleNamespace:
        requests.append({"repository": repository, **settings})
        return SimpleNamespace(flash_attn_varlen_func=None)

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    for name in (KERNEL, REPOSITORY):
        hub_kernels.load_and_register_attn_kernel(name)
    assert requests[0] == {"repository": REPOSITORY, "revision": COMMIT, "version": None, "allow_all_kernels": False}
    assert requests[1]["revision"] is None and requests[1]["version"]
    assert is_flash_attention_requested(requested_attention_implementation=KERNEL)


OTHER, MISSING, FOREIGN, OPEN = (digit * 40 for digit in "abcd")
FINDS_KERNELS = pytest.mark.cold  # transformers looks for the package when it is imported
LOADS_EACH = """
import json, os, sys
from shardwise.trainer.runtime.attention.flash_kernel import load_flash_kernel
from shardwise.trainer.spec.errors import EnvironmentFaultError
answers = []
for name in sys.argv[1:]:
    name, _, os.environ["LOCAL_KERNELS"] = name.partition(" ")
    try:
        answers.append(load_flash_kernel(name))
    except EnvironmentFaultError as error:
        answers.append(str(error))
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Three commits: one that runs here, one that is built for others, one that runs another kernel."""
    folder = tmp_path_factory.mktemp("hub")
    put_kernel(folder)
    put_kernel(folder, FOREIGN, variant="torch29-cxx11-cu130-x86_64-linux")
    depends: dict[str, Any] = {"kernel-depends": [{"repo-id": "some/kernel", "version": 1}]}
    put_kernel(folder, OPEN, **depends)
    return folder


@pytest.mark.skipif(import_utils.is_kernels_available(), reason="kernels is installed")
def test_without_the_package_the_line_that_installs_it_is_given(capsys):
    facts = rf"{KERNEL} (?s:.*)pin\.attention=sdpa(?s:.*)-m pip install 'shardwise\[hub-kernels\]'"
    with pytest.raises(EnvironmentFaultError, match=facts):
        load_flash_kernel(KERNEL)
    with pytest.raises(EnvironmentFaultError, match=facts):
        check_attention(Attention.FLASH, LLAMA, KERNEL)
    assert main([KERNEL]) == ExitCode.ENVIRONMENT
    assert KERNEL in capsys.readouterr().err
    assert main([]) == ExitCode.INPUT
    assert "OWNER/flash-attn2@COMMIT" in capsys.readouterr().err


@FINDS_KERNELS
def test_what_is_in_the_cache_is_loaded_and_what_cannot_run_is_refused_with_the_next_step(cache, tmp_path):
    """The last is a folder in the place of a kernel, which is not taken for it."""
    put = put_kernel(tmp_path, OTHER)
    names = [f"{REPOSITORY}@{commit}" for commit in (COMMIT, MISSING, FOREIGN, OPEN)]
    environment = hub_environment(cache, TRANSFORMERS_VERBOSITY="error")
    answers = printed_by("-P", "-c", LOADS_EACH, *names, f"{KERNEL} {REPOSITORY}={put}", **environment)
    found, missing, foreign, chained, elsewhere = json.loads(answers)
    assert found == [KERNEL, "torch-cpu"]
    fetch = f"python -m shardwise.trainer.runtime.attention.flash_kernel {REPOSITORY}@{MISSING}\n"
    assert f"HF_HUB_OFFLINE=0 {fetch}" in missing and "HF_HOME" in missing
    assert f"{REPOSITORY}@{FOREIGN}" in foreign and f"a build for torch {torch.__version__}" in foreign
    if not import_utils.is_kernels_available():  # the package itself would go and look for the other one
        assert f"{REPOSITORY}@{OPEN}" in chained and "some/kernel" in chained
    assert all(fact in elsewhere for fact in (KERNEL, f"{put / 'build' / 'torch-cpu'}", "unset LOCAL_KERNELS"))


packed_plan = partial(rank_plan, num_steps=4, micro_batch=2, accumulation=4, loss=LossHead.FUSED)


@FINDS_KERNELS
def test_a_rank_trains_packed_rows_on_the_kernel_and_reports_its_commit_and_build(cache, tmp_path):
    """The losses are those of PyTorch's attention, so documents were separated."""
    rows = write_packed_rows(tmp_path / "rows")
    path = write_attempt(tmp_path / "flash", packed_plan(rows, attention=Attention.FLASH, flash_kernel=KERNEL))
    printed_by("-m", "shardwise.trainer", path, **hub_environment(cache) | {"OMP_NUM_THREADS": "1"})
    verified = codec.read(path.with_name("report.json"), Report).verified
    assert (verified.attention, verified.facts["flash"]) == (KERNEL, "build torch-cpu")
    run_attempt(tmp_path / "sdpa", packed_plan(rows, attention=Attention.SDPA))
    assert losses_of(tmp_path / "flash") == pytest.approx(losses_of(tmp_path / "sdpa"), rel=1e-5)


FLASH, EFFICIENT = AttentionKernel.FLASH, AttentionKernel.EFFICIENT
HEAD_DIM = 64
TURING = (7, 5)
CALLS = {"Turing fp16": EFFICIENT, "Hopper fp32": EFFICIENT, "Hopper bf16": FLASH, "Hopper bf16 by autocast": FLASH}


def heads(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(2, each, 64, HEAD_DIM, dtype=dtype, device="cuda") for each in (8, 2, 2)]


def test_a_model_made_trainable_leaves_torch_the_planned_kernels_and_a_choice_that_was_undone_is_seen(monkeypatch):
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", attention.transformers_groups_heads)
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    make_trainable(tiny_llama(), Checkpointing.NONE, LossHead.EAGER, loss_chunk_tokens=None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert sdpa_attention.use_gqa_in_sdpa is attention.groups_heads
    assert all(planned == found for _, planned, found in attention.attention_kernel_rows())
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    sdpa_attention.use_gqa_in_sdpa = attention.transformers_groups_heads
    assert sum(planned != found for _, planned, found in attention.attention_kernel_rows()) == 2
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16_MIXED, Precision.BF16])
@pytest.mark.parametrize(
    "spec", ["1xV100-32GB", "1xT4", "1xA100-SXM4-80GB", "1xRTX-4090", "1xH100-SXM5-80GB", "1xB200", "1xRTX-5090"]
)
def test_plan_dry_run_measurement_and_ranks_name_one_kernel(spec, precision):
    device, dtype = gpu(spec), compute_type(precision)
    planned = attention_kernel(configuration(precision=precision), device, dims_of(LLAMA_8B))
    assert planned is (FLASH if device.compute_capability >= (8, 0) and precision is not Precision.FP32 else EFFICIENT)
    with as_if_available(device.compute_capability), FakeDeviceMode():
        query, *_ = heads(dtype)
        assert attention.kernel_for(query) is planned
        assert Kernels("cuda", device.compute_capability).choose(query, query, query, None) is planned
        measured = attention_backend(torch.device("cuda", 0), dtype, HEAD_DIM)
    assert measured is {FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}[planned]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed_by(Path(__file__).parents[2] / "factories" / "fused_calls.py"))
    return found


@pytest.mark.parametrize(("case", "kernel"), CALLS.items())
def test_grouped_heads_take_a_fused_kernel_on_every_chip_in_packed_rows_too(case, kernel, seen):
    """One kernel for all documents, or one for each; a window shorter than a document is a mask for the latter."""
    assert seen["calls"][case] == [{kernel: 1}, None]
    packed = [{FLASH: 1}, VARLEN] if kernel is FLASH else [{EFFICIENT: 3}, ONE_BY_ONE]
    assert seen["calls"][f"{case}, packed"] == seen["calls"][f"{case}, packed in a window"] == packed


def test_w59_transformers_groups_heads_for_any_chip_and_type():
    """A canary: where it looks at them, `groups_heads` is not needed."""
    with as_if_available(TURING), FakeDeviceMode():
        _, key, value = heads(torch.float32)
        assert attention.transformers_groups_heads(None, key, value)
        assert not attention.groups_heads(None, key, value)


def test_w60_torch_does_not_disable_cudnns_attention(seen):
    """A canary, of a process that chose nothing: where torch has it off, `choose_attention_kernels` need not."""
    assert seen["has_cudnn"]
