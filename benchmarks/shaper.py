"""A slow link with latency between two network namespaces (Linux, root), where the kernel has no netem.

    python -m benchmarks.shaper NAMESPACE ADDRESS/24 NAMESPACE ADDRESS/24 MBIT ONE_WAY_MS

Each namespace gets a TUN device `e0`. This process carries packets from one to the other: at the rate, after
the latency. 1,000 packets may wait in each direction, and what comes then is dropped. It prints a line once
the link is up, and the link is gone when the process ends.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN, _WITHOUT_HEADER = 0x0001, 0x1000
_NETWORK_NAMESPACE = 0x40000000
QUEUE_LENGTH = 1000
"""Packets that may wait in each direction: as many as with netem, if it is not told otherwise."""

_LARGEST_PACKET = 65_536
_AT_ONCE = 64


def tun(namespace: str, address: str) -> int:
    """A TUN device `e0` in a namespace; its descriptor, which this process keeps, does not block."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    if libc.setns(other, _NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", b"e0", _TUN | _WITHOUT_HEADER))
    libc.setns(own, _NETWORK_NAMESPACE)
    os.close(own)
    os.close(other)
    for words in (["addr", "add", address, "dev", "e0"], ["link", "set", "e0", "txqueuelen", "1000", "up"]):
        subprocess.run(["ip", "-n", namespace, *words], check=True)
    return device


def carry(devices: tuple[int, int], bytes_per_s: float, latency_s: float) -> None:
    """Carry packets between two devices until this process is ended."""
    other = {devices[0]: devices[1], devices[1]: devices[0]}
    leaves_at = {device: deque[float]() for device in devices}  # the packets of a device that wait, or leave
    under_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, where, the packet
    number = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for device in select.select(devices, [], [], wait)[0]:
            for _ in range(_AT_ONCE):
                try:
                    packet = os.read(device, _LARGEST_PACKET)
                except BlockingIOError:
                    break
                now, waiting = time.monotonic(), leaves_at[device]
                while waiting and waiting[0] <= now:
                    waiting.popleft()
                if len(waiting) > QUEUE_LENGTH:
                    continue
                waiting.append((waiting[-1] if waiting else now) + len(packet) / bytes_per_s)
                number += 1
                heapq.heappush(under_way, (waiting[-1] + latency_s, number, other[device], packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(under_way)
            try:
                os.write(device, packet)
            except OSError:
                continue  # the other end takes none at the moment: as on a real link, it is lost


def main() -> None:
    """Make the link and carry."""
    one, address, two, other_address, mbit, one_way_ms = sys.argv[1:]
    devices = tun(one, address), tun(two, other_address)
    print("up", flush=True)
    carry(devices, float(mbit) * 1e6 / 8, float(one_way_ms) / 1e3)


if __name__ == "__main__":
    main()
