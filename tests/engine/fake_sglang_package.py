"""Stands in for SGLang's launch_server module: a process that starts as SGLang does, and does as it is told.

Copied into a throwaway virtual environment as `sglang/launch_server.py`. FAKE_SGLANG chooses what it does; its child
process stands for SGLang's scheduler.
"""

import http.server
import os
import signal
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()


def main() -> None:
    behaviour = os.environ.get("FAKE_SGLANG", "")
    print("fake sglang:", *sys.argv[1:], flush=True)
    shown = ("SGLANG", "PYTHON", "OMP", "HF_", "TRANSFORMERS", "TORCH", "CUDA")
    print("environment:", {name: value for name, value in os.environ.items() if name.startswith(shown)}, flush=True)
    if behaviour == "fails":
        sys.exit("fake sglang: no such model")
    # It may come to its first line after its parent has gone.
    here = f"os.getppid() == {os.getpid()}"
    die_too = "import ctypes, os, signal, sys, time; ctypes.CDLL(None).prctl(1, signal.SIGKILL)"
    child = f"{die_too}; {here} or sys.exit(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    if behaviour == "hangs":
        time.sleep(600)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    try:
        server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    except OSError:
        sys.exit(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use")
    server.serve_forever()


if __name__ == "__main__":
    main()
