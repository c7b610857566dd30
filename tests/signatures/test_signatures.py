"""Every call of the product into a training library binds to that library's signature.

Held for the lowest version that pyproject.toml allows and for the locked one, by the texts in tests/captured/signatures
(tests/factories/capture_signatures.py writes them). So a call that only a machine with a GPU reaches fails here where a
version has renamed what it passes.
"""

import inspect
from functools import cache

import pytest
from capture_signatures import CAPTURED, PACKAGES, versions
from library_calls import Call, Reference, references, references_in

from shardwise.trainer.runtime.attention.packed import grouped_heads
from shardwise.trainer.spec.packages import OLDEST_CAPABILITY

VERSIONS = [(library, version) for library in PACKAGES for version in versions(library)]


@cache
def captured(library: str, version: str) -> dict[str, list[inspect.Signature]]:
    """Signatures by name; none for a name that is no function or class."""
    found: dict[str, list[inspect.Signature]] = {}
    for line in (CAPTURED / f"{library}-{version}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, has_signature, rest = line.partition("(")
        found.setdefault(name, [])
        if has_signature:
            found[name].append(inspect.signature(eval(f"lambda {rest.removesuffix(')')}: None")))
    return found


def binds(call: Call, signature: inspect.Signature) -> bool:
    bind = signature.bind_partial if call.is_open else signature.bind
    try:
        bind(*range(call.num_positional), **dict.fromkeys(call.keywords))
    except TypeError:
        return False
    return True


def fault_of(reference: Reference, signatures: dict[str, list[inspect.Signature]]) -> str | None:
    if reference.name not in signatures:
        return f"{reference.place}: {reference.name} does not exist, or is new here: run capture_signatures.py"
    known = signatures[reference.name]
    if reference.call is None or not known or any(binds(reference.call, each) for each in known):
        return None
    return f"{reference.place}: {reference.call} does not bind to {reference.name}{known[0]}"


@pytest.mark.parametrize(("library", "version"), VERSIONS)
def test_every_call_binds(library: str, version: str) -> None:
    found = [each for each in references() if each.name.split(".")[0] == library]
    assert found
    faults = [fault for each in found if (fault := fault_of(each, captured(library, version)))]
    assert not faults, "\n".join(faults)


def test_an_argument_that_a_version_lacks_and_a_name_that_does_not_exist_are_found() -> None:
    source = (
        "from torch.nn.attention import varlen\nvarlen.varlen_attn(q, k, v, a, a, 1, 1, scale=1.0, enable_gqa=True)"
    )
    call = next(references_in(source, "example"))
    assert fault_of(call, captured("torch", "2.13.0")) is None
    assert "enable_gqa" in (fault_of(call, captured("torch", "2.11.0")) or "")
    unknown = next(references_in("import torch\ntorch.cuda.no_such_thing()", "example"))
    assert fault_of(unknown, captured("torch", "2.13.0")) is not None


@pytest.mark.parametrize("version", versions("torch"))
def test_grouped_heads_of_packed_rows_bind(version: str) -> None:
    """`_by_bounds` unpacks the argument, so that no reader of its source sees whether it binds."""
    (signature,) = captured("torch", version)["torch.nn.attention.varlen.varlen_attn"]

    def kernel() -> None: ...

    kernel.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect.signature` returns
    signature.bind(*range(7), scale=1.0, window_size=(-1, 0), **grouped_heads(kernel))
    assert ("enable_gqa" in grouped_heads(kernel)) == ("enable_gqa" in signature.parameters)


@pytest.mark.parametrize("version", versions("torch"))
def test_facts_of_the_cuda_wheel_are_captured(version: str) -> None:
    """A lock that moves fails here until `capture_signatures.py` has read the new wheel."""
    lines = (CAPTURED / f"torch-{version}-cuda.txt").read_text().splitlines()
    facts = dict(line.split(": ") for line in lines if not line.startswith("#"))
    assert set(facts) == {"cuda", "architectures", "cudnn", "nccl", "triton", "has_cudnn_preference"}
    oldest = min(int(each.removeprefix("sm_")) for each in facts["architectures"].split())
    assert divmod(oldest, 10) == OLDEST_CAPABILITY, "shardwise.trainer.spec.packages"
    assert facts["has_cudnn_preference"] == "True", "shardwise.trainer.runtime.attention switches it off"
