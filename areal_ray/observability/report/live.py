"""The report of a run while it goes on, at an address of this machine only.

One daemon thread follows the files and one more serves; neither touches the event loop, and what
fails in them is logged and never reaches the run. Reading a long run's files takes turns with
sleeping, so that the run has the interpreter at least as long. JSON is made only when somebody
looks, and at most every other second.

Any web page can send requests to a loopback port, and by DNS rebinding even read the answers: a
request whose `Host` is not a loopback name is refused.
"""

from __future__ import annotations

import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from areal_ray import logs
from areal_ray.errors import described
from areal_ray.observability.report.data import RunReader
from areal_ray.observability.report.page import page

FOLLOW_EVERY_S = 1.0
SAMPLES_EVERY_S = 20.0
CACHED_S = 2.0
REFRESH_S = 3.0
REQUEST_TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LiveReport:
    """
    live = LiveReport(directory)
    print(live.start())     # http://127.0.0.1:41234/
    ...
    live.close()
    """

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        """`port`: 0 takes a free one. The directory may still be empty."""
        self._port = port
        self._reader = RunReader(directory)
        self._lock = threading.Lock()
        """Held for a piece of reading, or for making the JSON."""
        self._is_changed = True
        self._made_at = float("-inf")
        self._json = b""
        self._tag = 0
        self._closed = threading.Event()
        self._has_failed = False
        self._server: _Server | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> str:
        """Returns the address; raises `OSError` if the port is taken."""
        self._server = server = _Server(self, self._port)
        for target, name in ((self._follow, "report files"), (server.serve, "report server")):
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return f"http://127.0.0.1:{server.server_port}/"

    def close(self) -> None:
        """Nothing is served any more. Blocks, for a second or so: call it off the event loop."""
        self._closed.set()
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def json(self) -> tuple[bytes, int]:
        """The data, and a number that changes with it."""
        with self._lock:
            self._make()
            return self._json, self._tag

    def html(self) -> bytes:
        with self._lock:
            return page(self._reader.data(), refresh_s=REFRESH_S).encode()

    def _make(self) -> None:
        if self._is_changed and time.monotonic() - self._made_at >= CACHED_S:
            self._json = msgspec.json.encode(self._reader.data())
            self._tag += 1
            self._is_changed, self._made_at = False, time.monotonic()

    def _follow(self) -> None:
        samples_at = float("-inf")
        while not self._closed.is_set():
            began = time.monotonic()
            wants_samples = began - samples_at >= SAMPLES_EVERY_S
            try:
                is_behind = self._follow_a_piece(wants_samples)
            except Exception as error:  # noqa: BLE001 - told once; the run must not notice
                is_behind = False
                if not self._has_failed:
                    self._has_failed = True
                    logs.warning("the live report can't read the run: {}", described(error))
            samples_at = began if wants_samples else samples_at
            spent_s = time.monotonic() - began
            self._closed.wait(spent_s if is_behind else FOLLOW_EVERY_S)

    def _follow_a_piece(self, wants_samples: bool) -> bool:
        with self._lock:
            has_more = self._reader.read()
            has_others = wants_samples and self._reader.read_samples()
            self._is_changed |= has_more or has_others
            return has_more


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, report: LiveReport, port: int) -> None:
        self.report = report
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self) -> None:
        """Without asking DNS for the machine's name, as HTTPServer does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address

    def serve(self) -> None:
        self.serve_forever(poll_interval=0.2)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away is nobody's business, least of all the terminal's."""
        logs.debug("a request to the live report failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "areal-ray", ""

    def parse_request(self) -> bool:
        """Whatever the method, only GET is answered, and only if it means this machine."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only", header=("Allow", "GET"))
        elif not _is_loopback(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, b"this address is for this machine only")
        else:
            return True
        return False

    def do_GET(self) -> None:
        try:
            self._get(urlsplit(self.path).path)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - the page shows it, and asks again
            logs.debug("the live report failed: {}", described(error))
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, described(error).encode())

    def _get(self, path: str) -> None:
        report = self.server.report
        if path == "/":
            self._answer(HTTPStatus.OK, report.html(), "text/html; charset=utf-8")
        elif path == "/data.json":
            body, number = report.json()
            tag = ("ETag", f'"{number}"')
            if self.headers.get("If-None-Match") == tag[1]:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", header=tag)
            else:
                self._answer(HTTPStatus.OK, body, "application/json", header=tag)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is / and /data.json")

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        kind: str = "text/plain; charset=utf-8",
        header: tuple[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if header is not None:
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Not on the terminal of the run."""


def _is_loopback(host: str | None) -> bool:
    try:
        return urlsplit(f"//{host or ''}").hostname in LOOPBACK
    except ValueError:
        return False
