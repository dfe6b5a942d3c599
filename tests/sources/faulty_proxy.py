"""A real HTTP proxy in front of a server, which answers some requests as storages do on a bad day."""

import http.client
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_CODES = {503: b"SlowDown", 403: b"AccessDenied"}


@contextmanager
def faulty_proxy(endpoint, fault):
    """Yield the proxy's URL, and how often each method and path was asked for.

    `fault` is given the path, and returns a status to answer, or None to do what the server does.
    """
    counts = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            counts[self.command, path] += 1
            if status := fault(path):
                self.answer(
                    status, {"Content-Type": "application/xml"}, b"<Error><Code>%s</Code></Error>" % _CODES[status]
                )
                return
            upstream = http.client.HTTPConnection(endpoint.removeprefix("http://"))
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            headers = {k: v for k, v in response.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
            self.answer(response.status, headers, response.read())
            upstream.close()

        def answer(self, status, headers, body):
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

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
