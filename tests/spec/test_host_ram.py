"""RAM that a run may use and pin: on a desktop, a server, under WSL and in a grant, as stated and as measured."""

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from shardwise.trainer.spec.hardware import Host
from shardwise.trainer.spec.host_ram import machine_bytes, pinnable_ram, ram_for, system_bytes, usable_ram
from shardwise.trainer.spec.units import GIB

SIZES = (4, 8, 12, 16, 24, 31, 32, 48, 64, 96, 128, 160, 256, 512, 1024, 2048)


def host(ram_gib: float, available_gib: float | None = None, **facts: Any) -> Host:
    available = None if available_gib is None else int(available_gib * GIB)
    return Host(cpu_name=None, num_cores=8, ram_bytes=int(ram_gib * GIB), ram_available_bytes=available, **facts)


@pytest.mark.parametrize(
    ("ram_gib", "server_gib", "desktop_gib"), [(16, 2.6, 4), (32, 3.56, 4), (64, 5.48, 5.48), (1024, 27.24, 27.24)]
)
def test_the_system_has_a_share_that_falls_with_the_size_and_a_desktop_at_least_four(ram_gib, server_gib, desktop_gib):
    both = [system_bytes(ram_gib * GIB, is_desktop=is_desktop) / GIB for is_desktop in (False, True)]
    assert both == pytest.approx([server_gib, desktop_gib])


@pytest.mark.parametrize("is_desktop", [False, True])
@pytest.mark.parametrize("used_gib", [None, 0.0, 1.5, 3.9])
def test_more_ram_never_grants_less(is_desktop: bool, used_gib: float | None):
    def granted(size: int) -> tuple[int, int]:
        each = host(size, None if used_gib is None else size - used_gib, is_desktop=is_desktop)
        return usable_ram(each), pinnable_ram(each)

    found = [granted(size) for size in SIZES]
    assert all(less[0] < more[0] and less[1] < more[1] for less, more in itertools.pairwise(found))


def test_what_is_measured_counts_where_more_is_used_than_assumed():
    idle, busy = usable_ram(host(32, 31)), usable_ram(host(32, 20))
    assert idle == machine_bytes(32 * GIB, None) == 32 * GIB - system_bytes(32 * GIB, is_desktop=False)
    assert busy == 19 * GIB  # the others may grow by 1
    assert usable_ram(host(4, 0.5)) == round(0.5 * 15 / 16 * GIB)
    assert usable_ram(host(8, 0.0, usable_ram_bytes=0)) == 0


def test_a_limit_that_is_free_is_used_whole_and_another_bounds_nothing():
    machine = host(64, 60)
    assert usable_ram(machine, 59 * GIB) == 59 * GIB > usable_ram(machine)
    assert usable_ram(machine, 61 * GIB) == usable_ram(machine, 500 * GIB) == usable_ram(machine)
    assert usable_ram(machine, 8 * GIB) == 8 * GIB
    assumed = replace(host(32), is_ram_assumed=True, is_desktop=True)
    assert (usable_ram(assumed, 256 * GIB), pinnable_ram(assumed, 256 * GIB)) == (256 * GIB, 192 * GIB)
    unknown = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
    assert (usable_ram(unknown), usable_ram(unknown, GIB), pinnable_ram(unknown)) == (None, GIB, None)


def test_the_pinned_share_is_smaller_on_a_desktop_and_least_under_wsl():
    desktop: dict[str, Any] = {"is_desktop": True}
    kinds: tuple[dict[str, Any], ...] = ({}, desktop, {**desktop, "is_wsl": True}, {"pinned_limit_bytes": 31 * GIB})
    assert [pinnable_ram(host(40, **facts)) / GIB for facts in kinds] == [36, 30, 20, 31]


@pytest.mark.parametrize("is_desktop", [False, True])
@pytest.mark.parametrize(("need_gib", "pinned_gib"), [(3.0, 0.0), (28.0, 27.5), (58.6, 30.0), (900.1, 899.0)])
def test_a_machine_that_a_refusal_names_is_the_smallest_that_suffices(need_gib, pinned_gib, is_desktop):
    need, pinned = int(need_gib * GIB), int(pinned_gib * GIB)
    size = ram_for(need, pinned, is_desktop=is_desktop)
    suffices = [
        usable_ram(each) >= need and pinnable_ram(each) >= pinned
        for each in (host(size - 1, is_desktop=is_desktop), host(size, is_desktop=is_desktop))
    ]
    assert suffices == [False, True]
