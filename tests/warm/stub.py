"""Stands in for `python`: asks the warm process for a fork that runs these arguments, and behaves as that fork does.

    python -I -S stub.py SOCKET REAL_PYTHON ARGUMENT...

Only built-in modules, so that it starts in ten milliseconds. The fork gets every open descriptor, the environment and
the working directory of this process. Signals are passed on to it, its exit status becomes ours, and it is killed when
this process dies. Where the warm process refuses (another environment for the libraries, flags that only a new
interpreter can have), the real interpreter is executed instead.
"""

import _signal as signal  # type: ignore[import-not-found]  # the built-in half of signal
import _socket as socket
import posix
import sys

PASSED_ON = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGWINCH,
)  # fmt: skip
COLD_FLAGS = "EISXVhisxb?"  # what only a new interpreter can do
# Ranks of a supervisor ask for SIGKILL at the death of their parent, other programs for SIGTERM.
MODULES_TO_KILL = ("shardwise.trainer",)
COLD_MODULES = ("shardwise.launch.track.process",)  # a fork has loaded wandb already, with the environment of others
PR_SET_PDEATHSIG = 1
MAX_DESCRIPTORS = 250  # SCM_RIGHTS takes 253


def main(address: str, python: str, arguments: list[str]) -> None:
    """Runs the arguments in a fork of the warm process; returns only by exiting."""
    if posix.environ.get(b"WARM_PYTHON") == b"0" or is_cold(arguments):
        execute(python, arguments)
    child, early = [0], []

    def pass_on(number: int, _frame: object) -> None:
        if not child[0]:
            early.append(number)
            return
        try:  # noqa: SIM105 - contextlib is not built in
            posix.kill(child[0], number)
        except ProcessLookupError:
            pass

    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
    except OSError:
        execute(python, arguments)  # the warm process has ended
    descriptors = [int(name) for name in posix.listdir("/proc/self/fd")]
    own = connection.fileno()
    descriptors = [number for number in descriptors if number != own and is_open(number)][:MAX_DESCRIPTORS]
    alive, holder = posix.pipe()  # the fork is killed when nobody holds the other end
    place = posix.open(".", posix.O_PATH)
    for number in PASSED_ON:  # also what is ignored: the fork may come to listen to it
        signal.signal(number, pass_on)
    request = repr(
        {
            "arguments": arguments, "environment": posix.environ, "descriptors": descriptors,
            "ignored": [int(number) for number in ignored], "pid": posix.getpid(), "umask": umask(),
        }
    ).encode()  # fmt: skip
    handed = b"".join(number.to_bytes(4, sys.byteorder) for number in (place, alive, *descriptors))
    connection.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)])
    connection.sendall(request)
    posix.close(alive)
    posix.close(place)
    answers = lines_of(connection)
    for words in answers:
        if words[0] == b"pid":
            child[0] = int(words[1])
            for number in early:
                pass_on(number, None)
        elif words[0] == b"cold":
            for number in PASSED_ON:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            posix.close(holder)
            for number in early:
                posix.kill(posix.getpid(), number)
            execute(python, arguments)
        elif words[0] == b"with-parent":
            is_rank = module_of(arguments) in MODULES_TO_KILL and b"SHARDWISE_SUPERVISED" in posix.environ
            die_with_parent(signal.SIGKILL if is_rank else signal.SIGTERM)
        elif words[0] == b"exit":
            end(int(words[1]))
    end(signal.SIGKILL)  # the warm process was killed, and everything that it forked with it


def is_cold(arguments: list[str]) -> bool:
    """True if a new interpreter is needed: by flags, for a program on standard input, or by its module."""
    if module_of(arguments) in COLD_MODULES:
        return True
    takes_next = False
    for word in arguments:
        if takes_next:
            takes_next = False
        elif word in ("-c", "-m"):
            return False
        elif word == "-W":
            return True
        elif not word.startswith("-"):
            return False
        elif word == "-" or word.startswith("--") or any(letter in COLD_FLAGS for letter in word[1:]):
            return True
    return True


def module_of(arguments: list[str]) -> str:
    return arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""


def is_open(number: int) -> bool:
    try:
        posix.fstat(number)
    except OSError:
        return False
    return True


def umask() -> int:
    found = posix.umask(0)
    posix.umask(found)
    return found


def lines_of(connection: "socket.socket"):
    rest = b""
    while True:
        try:
            more = connection.recv(4096)
        except ConnectionResetError:
            return
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            yield line.split()


def die_with_parent(number: int) -> None:
    import ctypes  # slow to import, and few programs ask for it

    parent = posix.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if posix.getppid() != parent:
        posix.kill(posix.getpid(), number)


def execute(python: str, arguments: list[str]) -> None:
    posix.execv(python, [python, *arguments])


def end(status: int) -> None:
    """Ends as the fork did: with its exit code, or by the signal that ended it."""
    number = status & 0x7F
    if number:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        posix.kill(posix.getpid(), number)
    posix._exit(status >> 8 & 0xFF)


main(sys.argv[1], sys.argv[2], sys.argv[3:])
