"""Metrics of an SGLang server as it says them, for a dashboard whose engines are simulated.

Their names are held against SGLang's own code in tests/monitoring.
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GAUGES = ("num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate", "gen_throughput")


class _Said(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        lines = [f'# TYPE sglang:{name} gauge\nsglang:{name}{{model_name="m"}} 0.5\n' for name in GAUGES]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def sglang_metrics() -> Iterator[str]:
    """host:port of the server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Said) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
