"""`shardwise ui`: a small web server on this machine that shows runs and plans. It reads files and writes none.

With `--allow-actions` it also accepts POST to `/act`, which needs the cookie, this server as its origin, and a value
that only its pages have. Without that option no request changes anything.

It listens on 127.0.0.1 alone. A request needs the token of the address that is printed, which becomes a cookie that no
script can read and no other site can send. A `Host` header that names another machine is refused, so that a foreign
name that resolves to 127.0.0.1 reaches nothing. GET and HEAD are served without a body and with a short address;
connections are limited in number and time. Pages load nothing from elsewhere and run no script but `ui.js`.
"""

import os
import secrets
import socketserver
import sys
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import BoundedSemaphore, Timer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec

from shardwise.launch.commands.ui import explorer, pages
from shardwise.launch.commands.ui.actions import Actions
from shardwise.launch.commands.ui.render import Content, document, forwarding, message
from shardwise.launch.commands.ui.runs import Runs
from shardwise.launch.options import UiOptions
from shardwise.launch.rundir.state import RUNS
from shardwise.launch.terminal import Console, write_error
from shardwise.trainer.planning.page.html import STYLE
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from shardwise.trainer.spec.secrets import printable, redact

HOST, PORT = "127.0.0.1", 8642
_HOSTS = (HOST, "localhost")  # under any port: an SSH tunnel may have another one
_MOST_ADDRESS, _MOST_FORM, _MOST_FIELDS, _MOST_CONNECTIONS, _PATIENCE_S = 4096, 32_768, 40, 32, 15.0
_FOLDER = Path(__file__).parent
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # without a referrer a browser sends no origin either
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
HTML, JSON = "text/html; charset=utf-8", "application/json"
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="#0f766e"/>'
    '<path d="M3 11.5 6.2 7l2.6 2.6L13 4.5" fill="none" stroke="#fff" stroke-width="1.8"/></svg>'
)


class Reply(NamedTuple):
    """The response to a request."""

    body: str
    kind: str = HTML
    status: HTTPStatus = HTTPStatus.OK
    cookie: str | None = None
    location: str | None = None


def run_ui(options: UiOptions, console: Console, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Serves the pages until Ctrl-C; InputError for a folder that is not there, EnvironmentFaultError for the port."""
    own_file = options.folder if options.folder.is_file() else None
    folder = RUNS if own_file is not None else options.folder
    if folder != RUNS and not folder.is_dir():
        raise InputError(f"{folder}: is no folder; name one that has runs, such as runs/, or a job file")
    page = "/" if own_file is None else "/plan"
    with open_server(folder, options.port, own_file) as server:
        if options.allows_actions:
            server.allow_actions()
        console.line(f"{server.address}{page}?token={server.token}")
        console.line("the address is valid while this command runs; Ctrl-C ends it")
        if options.opens_browser and _has_display(environment):
            webbrowser.open(f"{server.address}{page}?token={server.new_ticket()}")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return ExitCode.DONE


def open_server(folder: Path, port: int | None, own_file: Path | None = None) -> "UiServer":
    """A server on `port`; without one on `PORT`, or another if that is in use."""
    try:
        return UiServer(folder, PORT if port is None else port, own_file)
    except OSError as error:
        if port is None:
            return UiServer(folder, 0, own_file)
        text = f"--port {port}: cannot be opened: {error.strerror}; without --port a free one is used"
        raise EnvironmentFaultError(text) from error


def _has_display(environment: Mapping[str, str]) -> bool:
    """True on a desktop; under SSH a browser would open on another screen than the user's."""
    has_screen = sys.platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
    return has_screen and not environment.get("SSH_CONNECTION")


class UiServer(ThreadingHTTPServer):
    """The server with its secrets; each request is one thread."""

    daemon_threads, block_on_close, request_queue_size = True, False, 2 * _MOST_CONNECTIONS

    def __init__(self, folder: Path, port: int, own_file: Path | None = None) -> None:
        self.runs = Runs(folder, own_file)
        self.token, self.session = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.actions: Actions | None = None
        self._tickets: set[str] = set()
        self._room = BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__((HOST, port), _Request)

    def allow_actions(self) -> None:
        """From now on pages have buttons, with a value that no other page knows."""
        self.actions = Actions(self.runs)
        self.runs.nonce = secrets.token_urlsafe(24)

    def server_bind(self) -> None:
        """Without the look-up of the machine's name, which can block for seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    @property
    def cookie_name(self) -> str:
        """Cookies of one host are shared by its ports, so that two servers need two names."""
        return f"shardwise-{self.server_port}"

    def new_ticket(self) -> str:
        """A token that is valid once: other users of the machine can read the browser's command line."""
        self._tickets.add(ticket := secrets.token_urlsafe(24))
        return ticket

    def accepts_token(self, text: str) -> bool:
        if text in self._tickets:
            self._tickets.remove(text)
            return True
        return secrets.compare_digest(text.encode(errors="replace"), self.token.encode())

    def server_close(self) -> None:
        """What the pages started goes on."""
        super().server_close()
        for each in self.runs.started:
            each.output.close()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Closes connections above the limit at once."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """A client that ended early is no error of the server; requests handle all others themselves."""


class _Request(BaseHTTPRequestHandler):
    """One request."""

    server: UiServer
    server_version, sys_version = "shardwise", ""
    timeout = _PATIENCE_S  # of one read
    error_content_type, error_message_format = "text/plain", "%(code)d %(message)s\n"

    def setup(self) -> None:
        super().setup()
        self._deadline = Timer(_PATIENCE_S, self._give_up)  # of the whole request, which may come a byte at a time
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def _give_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(SHUT_RDWR)

    def do_GET(self) -> None:
        self._deadline.cancel()
        self._send(self._refused_request() or self._reply())

    def do_POST(self) -> None:
        if self.server.actions is None:
            self._refuse_method()
            return
        self._send(self._acted(self.server.actions))

    def _send(self, reply: Reply) -> None:
        content = redact(printable(reply.body)).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if reply.cookie is not None:
            self.send_header("Set-Cookie", reply.cookie)
        if reply.location is not None:
            self.send_header("Location", reply.location)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Nothing: addresses may hold the token."""

    def _refused_host(self) -> Reply | None:
        name = (self.headers.get("Host") or "").rpartition("]")[2].partition(":")[0].lower()
        if name not in _HOSTS:
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST, f"this server is {HOST}, and no other host")
        return None

    def _acted(self, actions: Actions) -> Reply:
        """The reply to a form of our own pages; every other request is refused before anything is done."""
        host, size = self._refused_host(), self.headers.get("Content-Length", "")
        if host is not None:
            return host
        if self.path != "/act":
            return _refusal(HTTPStatus.NOT_FOUND, "there is no such action")
        if not size.isascii() or not size.isdigit() or int(size) > _MOST_FORM or self.headers.get("Transfer-Encoding"):
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a form is short, and has its length")
        body = self.rfile.read(int(size))
        self._deadline.cancel()  # of the request; an action may take longer
        try:
            query = parse_qs(body.decode(), max_num_fields=_MOST_FIELDS, errors="surrogateescape")
        except ValueError:
            return _refusal(HTTPStatus.BAD_REQUEST, "the form cannot be read")
        nonce = (self.server.runs.nonce or "").encode()
        is_ours = (
            self.headers.get("Origin") == f"http://{self.headers.get('Host')}"
            and self.headers.get("Sec-Fetch-Site", "same-origin") == "same-origin"
            and secrets.compare_digest(self._session(), self.server.session.encode())
            and secrets.compare_digest(query.pop("nonce", [""])[0].encode(errors="replace"), nonce)
            and nonce != b""
        )
        if not is_ours:
            return _refusal(HTTPStatus.FORBIDDEN, "an action is accepted from a page of this server only")
        try:
            done = actions.act(query)
        except ShardwiseError as error:
            return _refusal(HTTPStatus.CONFLICT, str(error))
        except Exception as error:  # noqa: BLE001 - the last resort: the other pages must go on
            write_error(f"shardwise ui: internal error: {type(error).__name__}: {error}")
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"it could not be done: {type(error).__name__}")
        if done.shows:
            return Reply("", status=HTTPStatus.SEE_OTHER, location=done.shows)
        return Reply(document(message("Done", done.text, name=done.run)))

    def _refused_request(self) -> Reply | None:
        host = self._refused_host()
        if host is not None:
            return host
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request has no body here")
        if len(self.path) > _MOST_ADDRESS:
            return _refusal(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        return None

    def _reply(self) -> Reply:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=_MOST_FIELDS, errors="surrogateescape")
        except ValueError:
            return _refusal(HTTPStatus.BAD_REQUEST, "the address cannot be read")
        if parts.path in FILES:
            kind, read = FILES[parts.path]
            return Reply(read(), kind)
        if "token" in query:
            return self._admitted(parts.path, query)
        if not secrets.compare_digest(self._session(), self.server.session.encode()):
            return _refusal(HTTPStatus.FORBIDDEN, "open the address that shardwise ui has printed, with its token")
        return _reply_to(self.server.runs, parts.path, query)

    def _session(self) -> bytes:
        """The value of our cookie; those of other programs on this host, which may have any form, come along."""
        cookies = (each.strip().partition("=") for each in ";".join(self.headers.get_all("Cookie", [])).split(";"))
        own = (value for name, _, value in cookies if name == self.server.cookie_name)
        return next(own, "").encode(errors="replace")

    def _admitted(self, path: str, query: dict[str, list[str]]) -> Reply:
        """The cookie for a valid token, and the same address without it.

        Not a redirection: after one that began at another site, a browser would not send a strict cookie.
        """
        if not self.server.accepts_token(query.pop("token")[0]):
            return _refusal(HTTPStatus.FORBIDDEN, "this token is not valid (any more): use the address printed last")
        rest = urlencode(query, doseq=True, errors="surrogateescape")
        page = path if path in PAGES else "/"
        cookie = f"{self.server.cookie_name}={self.server.session}; HttpOnly; SameSite=Strict; Path=/"
        return Reply(forwarding(f"{page}?{rest}" if rest else page), cookie=cookie)

    def _refuse_method(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method  # noqa: N815


Query = Mapping[str, list[str]]
PAGES: dict[str, Callable[[Runs, Query], Content]] = {
    "/": pages.runs_content,
    "/run": pages.run_content,
    "/compare": pages.comparison_content,
    "/chat": pages.chat_content,
    "/plan": explorer.plan_content,
}


def _reply_to(runs: Runs, path: str, query: Query) -> Reply:
    """The reply of a page, or of `/api` + a page: its parts as JSON."""
    is_api = path.startswith("/api/")
    content_of = PAGES.get(path.removeprefix("/api") if is_api else path)
    if content_of is None:
        return _refusal(HTTPStatus.NOT_FOUND, "there is no such page")
    try:
        content = content_of(runs, query)
    except ShardwiseError as error:
        return _refusal(HTTPStatus.NOT_FOUND, str(error))
    except Exception as error:  # noqa: BLE001 - the last resort: the other pages must go on
        write_error(f"shardwise ui: internal error: {type(error).__name__}: {error}")
        return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")
    if not is_api:
        return Reply(document(content))
    parts = {name: redact(printable(text)) for name, text in content.parts.items()}
    state = {"title": printable(content.title), "parts": parts, "every_s": content.every_s}
    return Reply(msgspec.json.encode(state).decode(), JSON)


def _refusal(status: HTTPStatus, reason: str) -> Reply:
    return Reply(document(message(f"{status.value} {status.phrase}", reason)), status=status)


@cache
def _style() -> str:
    return STYLE + (_FOLDER / "ui.css").read_text(encoding="utf-8")


FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "/ui.css": ("text/css; charset=utf-8", _style),
    "/ui.js": ("text/javascript; charset=utf-8", cache((_FOLDER / "ui.js").read_text)),
    "/icon.svg": ("image/svg+xml", lambda: ICON),
}
