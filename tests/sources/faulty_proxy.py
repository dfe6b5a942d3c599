"""A real HTTP proxy in front of a server, which answers some requests as storages do on a bad day."""

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# given the method, the path, and how often that pair was asked for, from 1: a status to answer, `reset` the connection,
# `cut` the body in its middle, or None to do what the server does
Fault = Callable[[str, str, int], "int | str | None"]

_BODY = b"<Error><Code>%s</Code><Message>on purpose</Message></Error>"
_CODES = {503: b"SlowDown", 500: b"InternalError", 403: b"AccessDenied"}


@contextmanager
def faulty_proxy(endpoint, fault):
    """Yield the proxy's URL, and how often each method and path was asked for."""
    counts = Counter()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            with lock:
                counts[self.command, path] += 1
                count = counts[self.command, path]
            kind = fault(self.command, path, count)
            if kind == "reset":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if isinstance(kind, int):
                self.answer(kind, {"Content-Type": "application/xml"}, _BODY % _CODES[kind])
                return
            upstream = http.client.HTTPConnection(endpoint.removeprefix("http://"))
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            headers = {k: v for k, v in response.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
            self.answer(response.status, headers, response.read(), cut=kind == "cut")
            upstream.close()

        def answer(self, status, headers, body, *, cut=False):
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection |= cut

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", counts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
