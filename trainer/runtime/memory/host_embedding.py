"""The frozen table of input embeddings in host RAM: rows are looked up there, and only they cross to the device.

A lookup multiplies with nothing, so the table need not be where the products are. On one GPU it stays in pageable host
RAM, which frees vocabulary x hidden size elements of the card; a micro batch sends tokens x hidden size of them.

    table    its module keeps class, weight and name, so that checkpoints and exports find it unchanged. `_apply` of the
             module does nothing: neither `.to(device)` nor a cast of the model reaches it
    ids      the loader makes them in host RAM. `ids_on_host` hands them to the module as they are copied to the device;
             ids that a caller has on the device alone are copied back, and the device is waited for
    rows     are gathered in one pinned buffer, which is filled again when its last copy has ended, and copied on the
             stream of the compute

Hooks on the module see rows on the device (NEFTune), and a class that scales its rows does so on the host, in the same
type. If the device is the host nothing is copied, which makes the lookup testable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.trainer.runtime.memory.activation_offload import PinnedBuffers
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import format_bytes


class OnHost(nn.Module):
    """The first base of the class of an embedding whose table stays in host RAM."""

    lookups: "Lookups"

    def _apply(self, fn: Any, recurse: bool = True) -> "OnHost":  # noqa: ANN401, FBT001, FBT002  # as torch calls it
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, on the device of the head."""
        return self.lookups.rows(self, ids)


class Lookups:
    """The lookups of one embedding, and what they move."""

    def __init__(self, head: nn.Module, *, is_plain: bool) -> None:
        self._head = head  # whose device the rows go to: some models move their ids to that of the table
        self._is_plain = is_plain  # the module looks up rows and does nothing else to them
        self.num_forwards = 0
        self.num_waits = 0  # for ids that were on the device alone
        self._sent: tuple[Tensor, Tensor, int] | None = None  # ids in host RAM, their copy on the device, its version
        self._copied: torch.cuda.Event | None = None
        self._buffers = PinnedBuffers(self._finish_copy)

    def rows(self, embedding: OnHost, ids: Tensor) -> Tensor:
        """The rows of `ids`, on the device of the head."""
        self.num_forwards += 1
        look_up, device = super(OnHost, embedding).forward, next(self._head.parameters()).device
        if device.type == "cpu":
            found: Tensor = look_up(ids)
            return found
        table, on_host = embedding.weight, self.ids_on_host(ids)
        assert isinstance(table, Tensor)
        self._finish_copy()
        buffer = self._buffers.take(ids.numel() * table.shape[1] * table.element_size())
        rows = buffer.view(table.dtype).view(*ids.shape, table.shape[1])
        if self._is_plain:
            torch.index_select(table.detach(), 0, on_host.reshape(-1), out=rows.view(-1, table.shape[1]))
        else:
            rows.copy_(look_up(on_host))
        arrived = rows.to(device, non_blocking=True)
        self._copied = torch.cuda.current_stream(device).record_event()
        self._buffers.give_back(buffer)
        return arrived

    def send(self, on_host: Tensor, on_device: Tensor) -> None:
        """Notes that ids in host RAM are those on the device, as long as nothing overwrites them."""
        self._sent = on_host, on_device, on_device._version

    def forget(self) -> None:
        """Forgets the ids of `send`."""
        self._sent = None

    def ids_on_host(self, ids: Tensor) -> Tensor:
        """The ids in host RAM: those that were copied to the device, in the shape that the model gives them."""
        if ids.device.type == "cpu" and self._sent is None:
            return ids
        if self._sent is not None:
            on_host, on_device, version = self._sent
            is_same = ids.untyped_storage()._cdata == on_device.untyped_storage()._cdata
            is_same = is_same and ids.numel() == on_device.numel() and on_device._version == version
            if is_same and ids.is_contiguous():
                return on_host.reshape(ids.shape)
        self.num_waits += 1
        return ids.cpu()

    def _finish_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def keep_embedding_on_host(model: PreTrainedModel) -> None:
    """Has the input embeddings of a model stay in host RAM; before an engine moves it to a device.

    InputError if they are trained, are the head's too, or are no plain table.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None or head is None:
        raise _refused(f"the input embeddings of {type(model).__name__} are no plain table")
    if getattr(head, "weight", None) is embedding.weight:
        raise _refused(f"the head of {type(model).__name__} is the same table")
    if embedding.weight.requires_grad:
        raise _refused("the table is trained")
    if not embedding.weight.is_meta:
        embedding.to("cpu")
    seam, is_plain = cast("Any", embedding), type(embedding).forward is nn.Embedding.forward
    seam.__class__ = type(f"{type(embedding).__name__}OnHost", (OnHost, type(embedding)), {})
    seam.lookups = Lookups(head, is_plain=is_plain)


def _refused(why: str) -> InputError:
    return InputError(f"pin.embedding_on_host: {why}, which the GPU computes with; set pin.embedding_on_host=false")


def embedding_on_host(model: PreTrainedModel) -> OnHost | None:
    """The input embeddings of a model if they stay in host RAM."""
    embedding = model.get_input_embeddings()
    return embedding if isinstance(embedding, OnHost) else None


def is_on_host(model: PreTrainedModel) -> bool:
    """True if rows are looked up in host RAM and the table is there."""
    embedding = embedding_on_host(model)
    return embedding is not None and all(each.device.type == "cpu" for each in embedding.parameters())


def tensors_on_host(model: nn.Module) -> set[Tensor]:
    """The tensors of modules that stay in host RAM."""
    modules = (module for module in model.modules() if isinstance(module, OnHost))
    return {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}


@contextmanager
def ids_on_host(model: PreTrainedModel, on_host: Tensor, on_device: Tensor) -> Iterator[None]:
    """For the block, a lookup of `on_device` reads the ids `on_host`, so that it does not wait for the device."""
    embedding = embedding_on_host(model)
    if embedding is None:
        yield
        return
    embedding.lookups.send(on_host, on_device)
    try:
        yield
    finally:
        embedding.lookups.forget()


@contextmanager
def device_of_head(model: PreTrainedModel) -> Iterator[torch.device]:
    """The device of the head, which for the block is transformers' `model.device` as well.

    That is the device of the first parameter, as a rule of the embeddings, and `generate` moves its inputs there.
    """
    device, owner = next(model.get_output_embeddings().parameters()).device, cast("Any", type(model))
    own = owner.__dict__.get("device")
    owner.device = property(lambda _: device)
    try:
        yield device
    finally:
        if own is None:
            del owner.device
        else:
            owner.device = own


def embedding_facts(model: PreTrainedModel) -> dict[str, str]:
    """Text of the table in host RAM; empty if it is on the device."""
    embedding = embedding_on_host(model)
    if embedding is None:
        return {}
    num_bytes = sum(each.numel() * each.element_size() for each in embedding.parameters())
    place = "host RAM" if is_on_host(model) else "no host RAM"
    lookups = embedding.lookups
    text = f"{format_bytes(num_bytes)} in {place}; lookups: {lookups.num_forwards}"
    return {"embedding table": text + (f", {lookups.num_waits} waited for ids" if lookups.num_waits else "")}
