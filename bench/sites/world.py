"""Two network namespaces, a trainer's site and one of workers, joined by the way of link.py. It takes root."""

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEAR, FAR = "10.79.0.1", "10.79.1.1"
"""Addresses of the trainer's site, which this process is in, and of the workers'."""

_NEW_NET = 0x40000000
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True)
class Way:
    """The way between the sites: round trip in ms, share of packets that are lost, and Mbit/s."""

    name: str
    round_trip_ms: float
    loss: float
    mbps: float = 100.0
    congestion: str = "reno"
    """Congestion control. Every kernel lets a namespace have Reno, as which CUBIC behaves at 100 ms and 1 %."""


class World:
    """The two sites. `far`: path of the namespace of the workers, for `enter`."""

    def __init__(self, link: "subprocess.Popen[str]", near: str, far: str) -> None:
        self._link = link
        self._near = near
        self.far = far

    def lay(self, way: Way) -> None:
        """Change the way; connections to come use its congestion control at both ends."""
        print(way.round_trip_ms / 2, way.loss, way.mbps, file=self._link.stdin, flush=True)
        for namespace in (self.far, self._near):
            enter(namespace)
            _CONGESTION.write_text(way.congestion)


def enter(namespace: str) -> None:
    """Have this thread, and what it starts, be in a namespace. Raises OSError."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _call("setns", descriptor, _NEW_NET)
    finally:
        os.close(descriptor)


@contextmanager
def world() -> Iterator[World]:
    """The two sites; this thread is in the trainer's meanwhile. Raises OSError where that is not allowed."""
    with contextlib.ExitStack() as stack:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        stack.callback(os.close, home)
        stack.callback(_call, "setns", home, _NEW_NET)
        ends, devices = [], []
        for address, other in ((NEAR, FAR), (FAR, NEAR)):
            _call("unshare", _NEW_NET)
            end = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            device = os.open("/dev/net/tun", os.O_RDWR)
            for each in (end, device):
                stack.callback(os.close, each)
            ends.append(f"/proc/{os.getpid()}/fd/{end}")
            devices.append(device)
            fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", b"way", _TUN_WITHOUT_HEADER))
            for command in (
                "link set lo up",
                f"addr add {address}/32 dev way",
                "link set way txqueuelen 5000 up",
                f"route add {other}/32 dev way src {address}",
            ):
                subprocess.run(["ip", *command.split()], check=True)
        enter(ends[0])
        link = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "bench.sites.link", *map(str, devices)],
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=devices,
            )
        )
        stack.callback(link.kill)
        yield World(link, *ends)


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
