"""Blocks are compiled in place and compute what they computed; where they cannot be, that is said before anything runs.

Compiling takes a minute on a busy machine: one combination is in every run of the tests, the others are `long`.
"""

import re
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from block_models import Backward, assert_same_gradients, backward, build_installed
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_cache
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from shardwise.trainer.runtime.memory.compilation import Kernels, compile_blocks, fuse_kernels, without_compilation
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.strategy import Checkpointing

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def no_earlier_graphs():
    torch._dynamo.reset()


def build(checkpointing: Checkpointing = Checkpointing.NONE, *, compiles: bool = True, **settings: Any):
    config = {"num_hidden_layers": 2, **settings.pop("config", {})}
    return build_installed(checkpointing, compile=compiles, config=config, **settings)


def build_eager(checkpointing: Checkpointing = Checkpointing.NONE):
    return build(checkpointing, compiles=False)[0]


def counts(fact: str) -> list[int]:
    """Of a fact about compilation: blocks that are compiled, all blocks, graphs and breaks."""
    return [int(number) for number in re.findall(r"\d+", fact)]


def check_same(ours: Backward, theirs: Backward) -> None:
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=TOLERANCE, atol=0)
    assert_same_gradients(ours, theirs, tolerance=TOLERANCE)


# torch's compiler reads names of its own that torch has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def only_traced(monkeypatch):
    """Graphs are traced, cut into forward and backward and run, but not compiled to machine code: g++ takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("only_traced")
def test_compiled_and_recomputed_blocks_give_the_gradients_of_eager_ones():
    (model, installed), eager = build(Checkpointing.FULL), build_eager()
    check_same(backward(model), backward(eager))
    facts = installed.activation_facts(model)
    assert counts(facts["compile"]) == [2, 2, 1, 0], "one compilation serves both blocks, without a break"
    assert counts(facts["checkpointing"]) == [2, 2]
    assert backward(model).retained_bytes < backward(eager).retained_bytes / 3, "the recomputation was traced"


@pytest.mark.usefixtures("only_traced")
def test_a_graph_break_is_counted_with_its_reason_and_earlier_ones_are_not():
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model, installed = build()
        for block in model.model.layers:
            block.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        backward(model)
        (reason, count), *others = installed.compilation.breaks().items()
        assert "graph_break" in reason and "\n" not in reason and count >= 1 and not others
        assert counts(installed.activation_facts(model)["compile"])[-1] == count
        found.append(count)
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.usefixtures("only_traced")
@pytest.mark.parametrize("checkpointing", sorted(set(Checkpointing) - {Checkpointing.FULL}))
def test_every_kind_of_recomputation_is_traced_with_its_block(checkpointing):
    model, installed = build(checkpointing)
    check_same(backward(model), backward(build_eager()))
    graphs = 2 if checkpointing is Checkpointing.EVERY_N else 1
    assert counts(installed.activation_facts(model)["compile"]) == [2, 2, graphs, 0]
    models = (build(Checkpointing.FULL)[0], model, build()[0])
    kept_by_full, retained, kept_by_none = (backward(each).retained_bytes for each in models)
    if checkpointing is not Checkpointing.NONE:
        assert kept_by_full < retained < kept_by_none


def test_blocks_that_fail_to_compile_run_eagerly_where_no_job_pins_compilation(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    chosen, eager, pinned = (build_eager() for _ in range(3))
    with inductor_config.patch({"cpp.cxx": str(compiler)}), fresh_cache():
        compilation = compile_blocks(chosen, is_pinned=False)
        check_same(backward(chosen), backward(eager))
        assert "No working C++ compiler" in (compilation.problem or "")
        assert str(compilation.problem) in compilation.facts(chosen)["compile"]
        compile_blocks(pinned)
        with pytest.raises(InductorError):
            backward(pinned)


def test_generation_runs_compiled_blocks_eagerly():
    model = build_eager()
    compilation = compile_blocks(model)
    with without_compilation(model):
        backward(model)
    assert counts(compilation.facts(model)["compile"]) == [2, 2, 0, 0]
    assert isinstance(without_compilation(build_eager()), nullcontext)


def test_a_model_without_blocks_is_refused_where_a_job_pins_compilation_and_else_runs_eagerly():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=0))
    with pytest.raises(InputError, match="no blocks"):
        compile_blocks(model)
    assert "no blocks" in (compile_blocks(model, is_pinned=False).problem or "")


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_variable_that_disables_compilation_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(EnvironmentFaultError, match=name):
        compile_blocks(build_eager())
    assert name in (compile_blocks(build_eager(), is_pinned=False).problem or "")


def test_without_a_compiler_it_is_refused_before_anything_runs_and_on_a_gpu_triton_needs_one_for_c(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(EnvironmentFaultError, match=r"no-such-compiler.*install g\+\+"):
        patch.setenv("CXX", "no-such-compiler")
        compile_blocks(build_eager())
    triton = ModuleType("triton")
    triton.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EnvironmentFaultError, match=r"pin\.compile(.|\n)*no-such-compiler(.|\n)*apt install gcc"):
        compile_blocks(build_eager())


class Counted:
    """Plain torch in the place of Liger's kernels, which need a GPU; counts its calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.kernels = Kernels(self.norm, self.gate, self.rotate)

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        self.calls["norm"] += 1
        return weight * torch.nn.functional.rms_norm(hidden.float(), weight.shape, eps=epsilon).to(hidden.dtype)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        self.calls["gate"] += 1
        return torch.nn.functional.silu(gate) * up

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor):
        self.calls["rotate"] += 1
        halves = (each.chunk(2, dim=-1) for each in (query, key))
        turned = (torch.stack((-second, first)) for first, second in halves)
        parts = zip((query, key), turned, strict=True)
        return tuple(each * cosine[:, None] + torch.cat((*other,), dim=-1) * sine[:, None] for each, other in parts)


@pytest.fixture
def own_rotation(monkeypatch):
    """The function of transformers' module returns to its place after a test."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)


def test_fused_kernels_run_every_norm_mlp_and_rotation_of_a_model(own_rotation):
    model, counted = build_eager(Checkpointing.FULL), Counted()
    fused = fuse_kernels(model, counted.kernels)
    counted.calls.clear()  # of the comparison with plain torch
    assert (fused.num_norms, fused.num_gates, fused.problem) == (5, 2, None)
    assert fused.facts(model) == {"fused_kernels": "5 norms, 2 gated MLPs and the rotary embedding"}
    assert fused.run_in(model)
    ours = backward(model)
    assert counted.calls == {"norm": 9, "gate": 4, "rotate": 4}, "two blocks, each run again, and the last norm"
    modeling_llama.apply_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb.args[1]
    check_same(ours, backward(build_eager()))
    assert not fused.run_in(model), "the rotary embedding is transformers' again"


def test_a_kernel_whose_gradient_alone_is_wrong_is_not_used(own_rotation):
    """Nor is one that computes something else."""
    model, kernels = build_eager(), Counted().kernels
    wrong = kernels._replace(gate=lambda gate, up: torch.nn.functional.gelu(gate) * up)
    twice = kernels._replace(gate=lambda gate, up: kernels.gate(gate, 2 * up - up.detach()))
    assert fuse_kernels(model, wrong, is_pinned=False).problem == (
        "pin.fused_kernels: SwiGLU differs from plain torch on this device; set pin.fused_kernels=false"
    )
    assert not any("forward" in vars(module) for module in model.modules() if "RMSNorm" in type(module).__name__)
    for other in (wrong, twice):
        with pytest.raises(EnvironmentFaultError, match="SwiGLU differs"):
            fuse_kernels(model, other)


def test_without_a_gpu_fused_kernels_are_refused_with_what_installs_them():
    with pytest.raises(InputError, match=r"pin\.fused_kernels: .*need a GPU"):
        fuse_kernels(build_eager())
