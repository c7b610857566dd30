"""Attention implementations that may run, and the messages where they cannot."""

import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from architecture_factory import TINY, VARIANTS
from hub_kernel_factory import COMMIT, KERNEL, REPOSITORY
from transformers.integrations import hub_kernels
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK, is_flash_attn_available
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_kernels_available

from shardwise.trainer.runtime.attention.choice import attention_name, check_attention
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Attention

LLAMA = read_model_shape(TINY["llama"])


def with_flash_attn(monkeypatch, found: str | None) -> None:
    """An importable flash_attn, of the package flash-attn at a version or of another package."""

    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr("shardwise.trainer.runtime.attention.choice.version", version)


def test_every_attention_has_a_name_for_transformers():
    assert {attention_name(attention) for attention in Attention} == {"flash_attention_2", "sdpa", "eager"}


def test_flash_without_flash_attn_is_refused_with_what_would_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFaultError, match=r"flash-attn (?s:.*)install (?s:.*)pin\.attention=sdpa"):
        check_attention(Attention.FLASH, LLAMA)


@pytest.mark.parametrize("found", ["1.0.9", "4.0.0b1", None])
def test_flash_is_the_second_generation_of_flash_attn(monkeypatch, found):
    with_flash_attn(monkeypatch, found)
    with pytest.raises(EnvironmentFaultError, match=rf"flash-attn {found or 'none'}\b"):
        check_attention(Attention.FLASH, LLAMA)


def test_what_is_there_may_run(monkeypatch):
    check_attention(Attention.SDPA, LLAMA)
    check_attention(Attention.EAGER, LLAMA)
    with_flash_attn(monkeypatch, "2.8.3")
    check_attention(Attention.FLASH, LLAMA)


def test_flash_is_refused_where_it_would_not_be_told_of_windows(monkeypatch):
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
    assert is_flash_attn_available(kernels_fallback_ok=True) == is_kernels_available()


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
