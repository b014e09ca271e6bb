"""What tests start: ports."""

import socket

import torch.distributed as dist

from tests.ranks import as_processes, free_port


def drawn() -> int:
    """A port of this rank, while the other ranks hold theirs."""
    port = free_port()
    dist.init_process_group("gloo")
    dist.barrier()
    return port


def test_no_two_processes_have_the_same_port() -> None:
    """Nor does the kernel give it to a third, while a server can listen there."""
    ports = as_processes(4, drawn)
    assert len(set(ports)) == 4
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] not in ports
