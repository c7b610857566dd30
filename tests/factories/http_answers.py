"""An HTTP server on this machine that answers each request of a test by a function of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Nothing: the requests are not of interest."""


@contextmanager
def answering(answer: Callable[[Request], Response]) -> Iterator[str]:
    application = Request.application(answer)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
