"""Accelerate's launcher of the ranks, with its port open on one interface alone.

    python -m shardwise.trainer.runtime.run.launcher --config_file accelerate.yaml -m shardwise.trainer plan.json

The ranks and launchers of a run meet at torchrun's store, on the first machine. torch opens its port on every interface
and has no authentication there: any process that connects can change what the ranks read. `TCPStore` listens elsewhere
only if it is given a socket that listens already (W67). Here it gets one at the address at which they meet: the
loopback of a single machine, else the address by which the other machines reached the first.
"""

import socket
from datetime import timedelta

from accelerate.commands import launch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

_BACKLOG = 4096  # ranks that connect at one moment; the kernel's limit is net.core.somaxconn


def store_at_address(
    host: str,
    port: int,
    world_size: int,
    is_master: bool,  # noqa: FBT001  # as torchrun calls it
    timeout: timedelta,
    *,
    multi_tenant: bool,
) -> TCPStore:
    """A `TCPStore` that listens, if it is the master, at the address of `host` alone."""
    listener = socket.create_server((host, port), backlog=_BACKLOG).detach() if is_master else None
    return TCPStore(host, port, world_size, is_master, timeout, multi_tenant=multi_tenant, master_listen_fd=listener)


def main() -> None:
    """Runs Accelerate's launcher with the arguments of this process."""
    vars(static_tcp_rendezvous)["TCPStore"] = store_at_address  # torchrun has no option for it
    launch.main()


if __name__ == "__main__":
    main()
