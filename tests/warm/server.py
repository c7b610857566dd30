"""The warm process: has imported the heavy libraries once, and forks the processes that `stub.py` requests.

    python -P server.py FOLDER LISTENING_DESCRIPTOR PARENT_PID

It imports at the first request. A fork becomes the requested process: its descriptors, environment, working directory,
arguments and namespaces. It differs from a new interpreter: modules are loaded already, torch sets the number of OpenMP
threads, os.getppid() returns the parent of the stub, and the fork has its own session.
"""

import ast
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import logging
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PRELOADED = (
    "torch", "transformers", "accelerate", "accelerate.commands.launch", "torch.distributed.run",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "transformers.models.auto",
    "transformers.models.llama.modeling_llama", "peft", "bitsandbytes", "datasets", "tokenizers", "numpy",
    "shardwise.trainer.__main__", "shardwise.trainer.runtime.loop.course", "shardwise.trainer.runtime.data.prepare",
    "shardwise.trainer.runtime.tools.torch_check",
    "shardwise.launch.cli", "shardwise.launch.commands.train",
)  # fmt: skip
PRODUCT = "shardwise"
# Read when a library is imported: with another value of one of these a fork would not be the requested process.
READ_AT_IMPORT = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "BNB_", "DATASETS_", "ONEDNN_",
    "DNNL_", "MKL_", "ATEN_", "OMP_", "GOMP_", "LD_", "LC_", "LANG", "PYTHONHASHSEED", "PYTHONIOENCODING",
    "PYTHONUTF8", "PYTHONHOME", "PYTHONDEVMODE", "PYTHONTRACEMALLOC", "MALLOC_",
)  # fmt: skip
# Read later, or set by `_apply_settings`, or of no meaning without a GPU.
TAKEN_OVER = (
    "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE",
    "HF_TOKEN", "TRANSFORMERS_VERBOSITY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LC_ALL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
_HELD_BACK = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
PR_SET_PDEATHSIG, F_SETSIG = 1, 10
_LIBC = ctypes.CDLL(None, use_errno=True)
# The filters of an interpreter that was started without options.
_PLAIN_FILTERS = (
    ("default", None, DeprecationWarning, "__main__", 0), ("ignore", None, DeprecationWarning, None, 0),
    ("ignore", None, PendingDeprecationWarning, None, 0), ("ignore", None, ImportWarning, None, 0),
    ("ignore", None, ResourceWarning, None, 0),
)  # fmt: skip
CPU_SECONDS = "SHARDWISE_TESTS_CPU_SECONDS"  # as in factories/durations.py: a file for the CPU seconds of each fork
Request = Mapping[str, Any]


class _Running(NamedTuple):
    """A fork, the connection to its stub, and where its CPU seconds go."""

    pid: int
    connection: socket.socket
    cpu_seconds: str | None


def main() -> None:
    """Serves until the process that started it has ended."""
    folder = Path(sys.argv[1])
    sys.executable = str(folder / "bin" / "python")
    signal.signal(signal.SIGTERM, lambda *_: _end(folder))
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[3]):
        _end(folder)
    listener = socket.socket(fileno=int(sys.argv[2]))
    path = tuple(sys.path)
    environment = dict(os.environ)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    running: dict[int, _Running] = {}  # by the descriptor of a process
    is_loaded = False
    while True:
        for key, _ in selector.select():
            if key.fileobj is not listener:
                _report_end(selector, running.pop(key.fd), key.fd)
                continue
            connection, _ = listener.accept()
            if not is_loaded:
                _load()
                is_loaded = True
            request, descriptors = _receive(connection)
            if request is None:
                connection.close()
                continue
            if _differs(request["environment"], environment) or _is_confined(request["pid"]):
                _close(descriptors)
                _send(connection, "cold")
                connection.close()
                continue
            # Signals to a fork wait until it has its own handlers: the server's are not for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
            pid = os.fork()
            if pid == 0:
                _become(request, descriptors, connection, path)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
            _close(descriptors)
            _send(connection, f"pid {pid}")
            process = os.pidfd_open(pid)
            running[process] = _Running(pid, connection, request["environment"].get(CPU_SECONDS))
            selector.register(process, selectors.EVENT_READ)


def _end(folder: Path) -> NoReturn:
    """Ends, and with it every fork; the tests are over, or were killed."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _load() -> None:
    logging.disable(logging.WARNING)  # bitsandbytes warns that a CPU lacks a kernel
    for name in PRELOADED:
        importlib.import_module(name)
    logging.disable(logging.NOTSET)
    gc.collect()
    gc.freeze()  # pages that a fork does not write to stay shared


def _receive(connection: socket.socket) -> tuple[Request | None, list[int]]:
    """The request of a stub; None if the stub was killed before it was complete."""
    descriptors: list[int] = []
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 253)
        size = int.from_bytes(head, "little")
        with connection.makefile("rb") as stream:
            content = stream.read(size)
        if len(head) < 8 or len(content) < size:
            raise ConnectionResetError
    except OSError:
        _close(descriptors)
        return None, []
    request = ast.literal_eval(content.decode())
    request["environment"] = {os.fsdecode(name): os.fsdecode(value) for name, value in request["environment"].items()}
    return request, list(descriptors)


def _differs(theirs: Mapping[str, str], ours: Mapping[str, str]) -> bool:
    def read(environment: Mapping[str, str]) -> set[tuple[str, str]]:
        names = {name for name in environment if name.startswith(READ_AT_IMPORT) and not name.startswith(TAKEN_OVER)}
        return {(name, environment[name]) for name in names}

    return read(theirs) != read(ours)


def _is_confined(stub: int) -> bool:
    """True if the stub is in another control group, whose limits a fork of this process would not have."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{stub}/cgroup").read_text() != Path("/proc/self/cgroup").read_text()
    return False


def _report_end(selector: selectors.BaseSelector, child: _Running, process: int) -> None:
    _, status, usage = os.wait4(child.pid, 0)
    if child.cpu_seconds:  # before the stub ends, so that whoever waits for it can read them
        with contextlib.suppress(OSError), Path(child.cpu_seconds).open("a") as stream:
            stream.write(f"{usage.ru_utime + usage.ru_stime}\n")
    _send(child.connection, f"exit {status}")
    child.connection.close()
    selector.unregister(process)
    os.close(process)


def _send(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # the stub was killed
        connection.sendall(f"{line}\n".encode())


def _close(descriptors: list[int]) -> None:
    for number in descriptors:
        with contextlib.suppress(OSError):
            os.close(number)


def _become(request: Request, descriptors: list[int], connection: socket.socket, path: tuple[str, ...]) -> NoReturn:
    """Turns this fork into the requested process, runs it, and ends."""
    status = 1
    try:
        os.setsid()
        place, alive, *handed = descriptors
        top = max([*request["descriptors"], *descriptors, connection.fileno(), 2]) + 1
        place, alive, link = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, top) for each in (place, alive, connection))
        connection.detach()
        _hand_over(request["descriptors"], handed, keep=(place, alive, link))
        _die_with(alive)
        _enter_namespaces(request["pid"])
        _take_limits(request["pid"])
        os.fchdir(place)
        os.close(place)
        os.umask(request["umask"])
        _reset_signals(request["ignored"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _answer_for_stub(request["pid"], link)
        _apply_settings()
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            importlib.import_module("coverage").process_startup(force=True)
        for stream in (sys.stdout, sys.stderr):
            is_unbuffered = "-u" in request["arguments"][:3] or bool(os.environ.get("PYTHONUNBUFFERED"))
            stream.reconfigure(  # type: ignore[union-attr]
                line_buffering=stream is sys.stderr or stream.isatty(), write_through=is_unbuffered
            )
        status = _run(request["arguments"], list(path))
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _hand_over(numbers: list[int], handed: list[int], *, keep: tuple[int, ...]) -> None:
    """Moves the descriptors to the numbers that they had in the stub, and closes all others."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(keep) + 1) for each in handed]
    for each in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers, not paths
        if each not in keep and each not in high:
            with contextlib.suppress(OSError):
                os.close(each)
    for number, each in zip(numbers, high, strict=True):
        os.dup2(each, number, inheritable=True)  # the stub had it by inheritance
        os.close(each)


def _die_with(alive: int) -> None:
    """Has the kernel kill this process when the stub's end of the pipe is closed: when the stub has died."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(alive, 1)
        os.kill(os.getpid(), signal.SIGKILL)  # the end of the file: it had died before
    # A server that is killed takes every fork with it, as the death of the tests takes the server.
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _enter_namespaces(stub: int) -> None:
    """Enters the namespaces of the stub, if it has others (a node of a test cluster)."""
    for name in ("net", "uts", "ipc", "mnt"):
        theirs, ours = f"/proc/{stub}/ns/{name}", f"/proc/self/ns/{name}"
        if Path(theirs).readlink() == Path(ours).readlink():
            continue
        descriptor = os.open(theirs, os.O_RDONLY | os.O_CLOEXEC)
        if _LIBC.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(descriptor)


def _take_limits(stub: int) -> None:
    """Resource limits, niceness and cores as the stub inherited them."""
    for name in [name for name in dir(resource) if name.startswith("RLIMIT_")]:
        number = getattr(resource, name)
        resource.setrlimit(number, resource.prlimit(stub, number))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, stub))
    os.sched_setaffinity(0, os.sched_getaffinity(stub))


def _reset_signals(ignored: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def _answer_for_stub(stub: int, link: int) -> None:
    """Makes os.getppid() return the stub's parent, and tells the stub if the process asks to die with its parent."""

    own, parent_of_fork = os.getpid(), os.getppid

    def parent() -> int:
        if os.getpid() != own:
            return parent_of_fork()
        return int(Path(f"/proc/{stub}/stat").read_text().rpartition(")")[2].split()[1])

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlsym" and arguments[1] == "prctl" and is_watching:
            with contextlib.suppress(OSError):
                os.write(link, b"with-parent\n")
            is_watching.clear()

    is_watching = [True]
    os.getppid = parent
    sys.addaudithook(watch)
    os.register_at_fork(after_in_child=is_watching.clear)


def _apply_settings() -> None:
    """Applies the settings that the loaded libraries would have read from this environment at import."""
    import datasets
    import huggingface_hub
    import torch
    import transformers

    asked = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdecimal() else len(os.sched_getaffinity(0)))
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    huggingface_hub.constants.HF_HUB_OFFLINE = is_offline
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = is_offline
    verbosity = transformers.utils.logging.log_levels.get(os.environ.get("TRANSFORMERS_VERBOSITY", ""))
    if verbosity is not None:
        transformers.utils.logging.set_verbosity(verbosity)
    warnings.resetwarnings()
    warnings.filters[:] = list(_PLAIN_FILTERS)  # type: ignore[index]  # a list
    warnings._processoptions([*filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))])  # type: ignore[attr-defined]


def _run(arguments: list[str], path: list[str]) -> int:
    """Runs `-c CODE`, `-m MODULE` or a program as the main module; the exit code."""
    is_safe = bool(os.environ.get("PYTHONSAFEPATH"))
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        flags = words.pop(0)[1:]
        is_safe = is_safe or "P" in flags
        sys.dont_write_bytecode = sys.dont_write_bytecode or "B" in flags
        if flags.endswith(("c", "m")):
            words.insert(0, f"-{flags[-1]}")
    sys.orig_argv = [sys.executable, *arguments]
    sys.dont_write_bytecode = sys.dont_write_bytecode or bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    target = words.pop(0)
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(target).resolve().parent))
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ]
    sys.path[:] = [*([] if is_safe else [first]), *(str(Path(entry).absolute()) for entry in given if entry), *path]
    _forget_other_product()
    sys.argv = [kind or target, *words]
    main_module = types.ModuleType("__main__")
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    return _ended(lambda: _start(kind, target, main_module, given))


def _start(kind: str, target: str, main_module: types.ModuleType, entries: list[str]) -> None:
    if any((Path(entry) / "sitecustomize.py").is_file() for entry in entries):  # a new interpreter runs it at its start
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if kind == "-c":
        exec(compile(target, "<string>", "exec"), main_module.__dict__)
    elif kind == "-m":
        for name in (target, f"{target}.__main__"):
            sys.modules.pop(name, None)
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    else:
        program = Path(target)
        main_module.__dict__.update(__file__=target, __cached__=None, __loader__=None, __spec__=None)
        exec(compile(program.read_bytes(), target, "exec"), main_module.__dict__)


def _forget_other_product() -> None:
    """Drops the project's modules if the module path has another copy of it, or another module of that name."""
    importlib.invalidate_caches()
    loaded, found = sys.modules.get(PRODUCT), importlib.machinery.PathFinder.find_spec(PRODUCT, sys.path)
    if loaded is not None and (found is None or found.origin != loaded.__file__):
        for each in [each for each in sys.modules if each.partition(".")[0] == PRODUCT]:
            del sys.modules[each]


def _ended(run: Any) -> int:
    """The exit code of `run`, after its threads and its exit functions, as at the end of an interpreter."""
    code = 0
    try:
        run()
    except SystemExit as error:
        code = _code_of(error)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - whatever it is, it ends the program with its traceback
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


if __name__ == "__main__":
    main()
