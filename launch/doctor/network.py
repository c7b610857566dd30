"""`doctor`: names, interfaces, proxies, the hub, wandb, the clock, and Slurm's controller and munge.

No key is shown, and none is sent to any server but its own. With HF_HUB_OFFLINE set the hub is not contacted, with
WANDB_MODE offline or disabled wandb is not.
"""

import netrc
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.doctor.finding import SERVER_TIMEOUT_S, Finding, Level, Machine, explained, fault, fine, warning
from shardwise.launch.probe.host import read_text
from shardwise.launch.probe.installed import installed_version
from shardwise.launch.probe.program import run_program
from shardwise.slurm.jobs import is_login_node
from shardwise.slurm.queries import run_slurm
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.network import LOOPBACK_DOWN, loopback_problem
from shardwise.trainer.spec.secrets import redact

SLOW_NAME_S = 2.0
SKEW_S = 300.0
_TRUE = {"1", "ON", "YES", "TRUE"}
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class Reply(NamedTuple):
    """The reply of a server, or the reason why there is none."""

    status: int | None = None
    body: bytes = b""
    date: str | None = None
    problem: str | None = None


def check_hostname(machine: Machine) -> Iterator[Finding]:
    """The machine's own name resolves: gloo and torchrun look it up."""
    name, started = machine.place.hostname, time.monotonic()
    add = f"echo 127.0.1.1 {name} | sudo tee -a /etc/hosts"
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        yield warning(
            f"the machine's own name, {name}, does not resolve: ranks wait for it, or use the loopback alone", add
        )
        return
    seconds = time.monotonic() - started
    if seconds > SLOW_NAME_S:
        yield warning(f"the machine's own name, {name}, took {seconds:.1f} s to resolve", add)
    else:
        yield fine(f"{name} resolves to {', '.join(sorted(addresses))}")


def check_interfaces(machine: Machine) -> Iterator[Finding]:
    """The loopback connects, and the interfaces that variables name exist."""
    root = machine.place.root
    names = sorted(folder.name for folder in root.glob("sys/class/net/*") if folder.is_dir())
    found = []
    problem = loopback_problem(
        limit_s=machine.place.server_timeout_s
    )  # /sys may show the interfaces of a container's host
    if names and ("lo" not in names or read_text(root / "sys/class/net/lo/operstate").strip() == "down"):
        problem = LOOPBACK_DOWN
    if problem is not None:
        text = f"{problem.problem} ({problem.place}): ranks of one machine meet there"
        found.append(fault(text, problem.remedy))
    elif not names:
        return
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        setting = machine.environment.get(variable)
        if setting and not _names_any(setting, names, is_prefix=variable.startswith("NCCL")):
            others = ", ".join(name for name in names if name != "lo") or "lo"
            found.append(
                fault(f"{variable}={setting} names no interface of this machine ({others})", f"unset {variable}")
            )
    yield from found
    if not found:
        yield fine(f"interfaces: {', '.join(names)}")


def _names_any(setting: str, names: list[str], *, is_prefix: bool) -> bool:
    """True if the setting matches a name, as NCCL reads it: prefixes, after `=` full names, after `^` excluded ones."""
    if setting.startswith("^"):
        return True
    is_exact = setting.startswith("=") or not is_prefix
    wanted = [each.strip() for each in setting.removeprefix("=").split(",") if each.strip()]
    return any(name == each if is_exact else name.startswith(each) for each in wanted for name in names)


def check_proxies(machine: Machine) -> Iterator[Finding]:
    """A proxy that is set accepts connections."""
    from urllib.parse import urlsplit

    for variable in _PROXIES:
        value = machine.environment.get(variable)
        if not value:
            continue
        parts = urlsplit(value if "://" in value else f"http://{value}")
        try:
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port = None, 0
        if host is None:
            yield warning(f"{variable} is no address of a proxy", f"unset {variable}, or set it as http://HOST:PORT")
            continue
        try:
            socket.create_connection((host, port), timeout=machine.place.server_timeout_s / 2).close()
        except OSError as error:
            yield warning(
                f"{variable}: the proxy {host}:{port} does not respond ({error.strerror or error}): nothing can be "
                "fetched",
                f"unset {variable}, or set a proxy that runs",
            )
        else:
            yield fine(f"{variable}: the proxy {host}:{port} responds")


def check_hub(machine: Machine) -> Iterator[Finding]:
    """The Hugging Face hub responds, and accepts the stored token."""
    environment = machine.environment
    if environment.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        yield fine(f"HF_HUB_OFFLINE is set: models and data come from {machine.place.hub} alone")
        return
    endpoint = (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    token = hub_token(environment)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    requested = f"{endpoint}/api/{'whoami-v2' if token else 'models?limit=1'}"
    reply = fetch(requested, environment, headers, timeout_s=machine.place.server_timeout_s)
    shown = redact(endpoint, environment)
    if reply.status is None or reply.status >= 500:
        problem = reply.problem or f"status {reply.status}"
        yield warning(
            f"{shown} does not respond: {problem}",
            "look at the network and at HTTPS_PROXY; without a network set HF_HUB_OFFLINE=1 and fetch elsewhere "
            "(shardwise fetch)",
        )
    elif token and reply.status in (401, 403):
        yield warning(f"{shown} rejects the stored token: it was revoked, or belongs to another hub", "hf auth login")
    elif token:
        yield fine(f"{shown} responds; logged in as {_login(reply.body)}")
    else:
        yield fine(f"{shown} responds; not logged in (for gated and private models: hf auth login)")
    yield from judge_clock(reply.date, time.time())


def judge_clock(date: str | None, now_s: float) -> Iterator[Finding]:
    """A warning if the clock differs from the date of a server's reply."""
    from email.utils import parsedate_to_datetime

    try:
        skew_s = now_s - parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return
    if abs(skew_s) > SKEW_S:
        side = "ahead" if skew_s > 0 else "behind"
        yield warning(
            f"the clock is {abs(skew_s) / 60:.0f} min {side}: certificates, tokens and munge are refused",
            "sudo timedatectl set-ntp true; under WSL: sudo hwclock -s",
        )


def hub_token(environment: Mapping[str, str]) -> str | None:
    """The token as huggingface_hub finds it: from the environment, else from the file that `hf auth login` writes."""
    named = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN")
    if named:
        return named.strip()
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/nonexistent"), ".cache")
    home = environment.get("HF_HOME") or Path(cache, "huggingface")
    return read_text(Path(environment.get("HF_TOKEN_PATH") or Path(home, "token"))).strip() or None


def _login(body: bytes) -> str:
    found = re.search(rb'"name"\s*:\s*"([^"]{1,60})"', body)
    return found[1].decode(errors="replace") if found else "an unnamed user"


def check_wandb(machine: Machine) -> Iterator[Finding]:
    """wandb's server responds, and a key is stored for it; no finding if wandb is not installed."""
    environment, version = machine.environment, installed_version("wandb")
    if version is None:
        return
    mode = environment.get("WANDB_MODE", "").strip()
    if mode in ("offline", "dryrun", "disabled"):
        yield fine(f"WANDB_MODE={mode}: wandb is not contacted")
        return
    from shardwise.launch.track.start import wandb_host  # a second, to import wandb in another process

    server = (environment.get("WANDB_BASE_URL") or wandb_host(environment) or "").rstrip("/")
    if not server:
        yield warning("wandb is installed and does not load", "log.wandb=off, or install it again")
        return
    has_key = has_wandb_key(environment, server)
    login = "a key is stored" if has_key else "no key is stored (for log.wandb=online: wandb login)"
    reply = fetch(f"{server}/healthz", environment, {}, timeout_s=machine.place.server_timeout_s)
    shown = redact(server, environment)
    if reply.status is not None:
        yield fine(f"{shown} responds; {login}")
    elif has_key:
        yield warning(f"{shown} does not respond: {reply.problem}; {login}", "log.wandb=offline, and wandb sync later")
    else:
        yield fine(f"{shown} does not respond ({reply.problem}), and {login}: jobs that log online would fail")


def has_wandb_key(environment: Mapping[str, str], server: str) -> bool:
    """True if the environment or the netrc file that `wandb login` writes has a key."""
    from urllib.parse import urlsplit

    if environment.get("WANDB_API_KEY"):
        return True
    path = environment.get("NETRC") or str(Path(environment.get("HOME", "/nonexistent"), ".netrc"))
    try:
        return netrc.netrc(path).authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def fetch(
    url: str, environment: Mapping[str, str], headers: Mapping[str, str], *, timeout_s: float = SERVER_TIMEOUT_S
) -> Reply:
    """One GET with a time limit, through the proxies of the environment; the reply holds nothing of `headers`."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, Request, build_opener, proxy_bypass

    proxies = {
        scheme: value
        for scheme in ("http", "https")
        if (value := environment.get(f"{scheme}_proxy") or environment.get(f"{scheme.upper()}_PROXY"))
    }
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    if proxy_bypass(host, {"no": environment.get("no_proxy") or environment.get("NO_PROXY") or ""}):
        proxies = {}
    try:
        request = Request(url, headers={"User-Agent": "shardwise-doctor"})  # noqa: S310  # the user's own
        for name, value in headers.items():
            request.add_unredirected_header(name, value)  # a redirect sends no token to another server
        with build_opener(ProxyHandler(proxies)).open(request, timeout=timeout_s) as response:
            return Reply(response.status, response.read(65536), response.headers.get("Date"))
    except HTTPError as error:
        with error:
            return Reply(error.code, b"", error.headers.get("Date"))
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        problem = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        return Reply(problem=redact(problem, environment)[:200])


def check_slurm(machine: Machine) -> Iterator[Finding]:
    """Slurm's controller responds and munge works; no finding on a machine without Slurm."""
    hardware = machine.hardware
    if hardware is None or hardware.host.slurm is None:
        return
    is_needed = is_login_node(hardware)
    problem = munge_problem(machine.environment, timeout_s=machine.place.slurm_timeout_s)
    if problem is not None:
        yield (fault if is_needed else warning)(
            f"munge does not authenticate this user: {problem}",
            "sudo systemctl restart munge; its clock and its key must be those of the controller",
        )
    try:
        limit_s = machine.place.slurm_timeout_s
        pinged = run_slurm(("scontrol", "ping"), environment=machine.environment, timeout_s=limit_s)
    except EnvironmentFaultError as error:
        yield explained(
            Level.FAULT if is_needed else Level.WARNING,
            str(error),
            otherwise="contact the administrators of the cluster; sudo systemctl status slurmctld, on its machine",
        )
        return
    where = "this is a login node: shardwise submit" if is_needed else "Slurm is available"
    yield fine(f"{where}; {' '.join(pinged.split())[:120]}")


def munge_problem(environment: Mapping[str, str], *, timeout_s: float) -> str | None:
    """The reason why no credential can be made and read back; None if it can, or without munge."""
    munge, unmunge = (shutil.which(name, path=environment.get("PATH")) for name in ("munge", "unmunge"))
    if munge is None or unmunge is None:
        return None
    credential = ""
    for program in ([munge, "-n"], [unmunge]):
        result = run_program(program, environment=environment, timeout_s=timeout_s, standard_input=credential)
        if result.exit_code != 0:
            name = Path(program[0]).name
            return f"{name} does not respond" if result.exit_code is None else result.last_line
        credential = result.output
    return None
