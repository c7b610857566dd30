"""`shardwise cache`: what is kept outside of run directories; `--prune` frees what is stale and can be made again.

Calibration and timings are never freed, nor what a process holds; the hub's cache is shown with the command that is
made for it. Nothing is asked: `--prune --dry-run` shows what would go.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.cache.entries import DAY_S, Entry, Kind, State, Survey, read_entries
from launch.cache.prune import prune
from launch.cache.use import read_storage, used_paths
from launch.engine.operators import extensions_dir
from launch.inputs.hub import hub_cache
from launch.job import folders
from launch.job.layers import read_personal_folders
from launch.plan.gather import recorded_versions
from launch.probe.host import read_host
from launch.terminal import Console
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from trainer.spec.units import format_bytes
from trainer.spec.value import Value

DEFAULT_DAYS = 30


class CacheOptions(NamedTuple):
    """The command line of `shardwise cache`."""

    prune: bool = False
    older_than_days: int | None = None
    dry_run: bool = False
    as_json: bool = False


class CacheAnswer(Value, frozen=True, kw_only=True):
    """What `--json` prints: what there is, or what there was and which of it was freed."""

    entries: tuple[Entry, ...]
    freed: tuple[str, ...] = ()
    freed_bytes: int = 0


def run_cache(options: CacheOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Lists, or frees; EnvironmentFaultError, after all others, for what cannot be removed."""
    if options.dry_run and not options.prune:
        raise InputError("--dry-run shows what --prune would free: shardwise cache --prune --dry-run")
    entries = read_entries(read_survey(options, environment))
    stale = tuple(entry for entry in entries if entry.state is State.STALE)
    freed, problems = prune(stale) if options.prune and not options.dry_run else ((), ())
    if options.as_json:
        answer = CacheAnswer(
            entries=entries,
            freed=tuple(entry.path for entry in freed),
            freed_bytes=sum(entry.num_bytes for entry in freed),
        )
        console.line(codec.encode(answer).decode().rstrip())
    elif not options.prune:
        console.line(render_entries(entries, now_s=time.time()))
    else:
        console.line(_render_freed(stale if options.dry_run else freed, "would free" if options.dry_run else "freed"))
    if problems:
        raise EnvironmentFaultError("\n".join([*problems[:2], "make them yours (sudo chown -R $USER), or remove them"]))
    return ExitCode.DONE


def read_survey(options: CacheOptions, environment: Mapping[str, str]) -> Survey:
    """Where the folders of this person are, and what is current here."""
    named = read_personal_folders(
        config_home=folders.config_home(environment), site_config=folders.site_config(environment)
    )
    cache = folders.cache_home(environment, configured=named.get("cache"))
    hub_home, scratch = named.get("huggingface"), named.get("scratch")
    return Survey(
        cache=cache,
        state=folders.state_home(environment),
        hub=hub_cache(Path(hub_home) if hub_home else None, environment),
        scratch=Path(scratch) if scratch else None,
        operators=extensions_dir(cache, recorded_versions(), read_host().cpu_flags),
        older_than_days=DEFAULT_DAYS if options.older_than_days is None else options.older_than_days,
        is_age_stated=options.older_than_days is not None,
        storage=read_storage(cache),
        used=used_paths(),
        now_s=time.time(),
    )


def render_entries(entries: Sequence[Entry], *, now_s: float) -> str:
    """By kind, each entry with its size, its last use and what is to be said of it."""
    lines: list[str] = []
    for kind in Kind:
        own = [entry for entry in entries if entry.kind is kind]
        if own:
            lines.append(f"{kind}: {format_bytes(sum(entry.num_bytes for entry in own))}")
            lines += [f"  {_line(entry, now_s)}" for entry in own]
    stale = [entry for entry in entries if entry.state is State.STALE]
    if not lines:
        return "nothing is kept"
    size = format_bytes(sum(entry.num_bytes for entry in stale))
    can = f"{size} in {_counted(len(stale))} can be freed: shardwise cache --prune" if stale else "nothing is stale"
    return "\n".join([*lines, "", can])


def _line(entry: Entry, now_s: float) -> str:
    state = "" if entry.state is State.KEPT else f"{entry.state}: "
    words = f"  ({state}{entry.why})" if entry.why else ""
    return f"{format_bytes(entry.num_bytes):>9}  {_ago(now_s - entry.last_used_s):>14}  {entry.path}{words}"


def _ago(seconds: float) -> str:
    days = int(max(0.0, seconds) // DAY_S)
    return "used today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"


def _render_freed(entries: Sequence[Entry], verb: str) -> str:
    if not entries:
        return "nothing is stale"
    lines = [f"{format_bytes(entry.num_bytes):>9}  {entry.path}  ({entry.why})" for entry in entries]
    return "\n".join([*lines, f"{verb} {format_bytes(sum(entry.num_bytes for entry in entries))} in "
                              f"{_counted(len(entries))}"])  # fmt: skip


def _counted(number: int) -> str:
    return f"{number} entr{'y' if number == 1 else 'ies'}"
