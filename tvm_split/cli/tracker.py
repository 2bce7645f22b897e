"""``tvm-split tracker``: run a TVM RPC tracker, at which workers and RPC servers register."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import Annotated

import typer

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.worker.runtime_alone import load_runtime
from tvm_split.display.console import STDOUT, print_unwrapped


def tracker(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where it listens (port 0: any free port).")
    ] = "127.0.0.1:9190",
) -> None:
    """Run a TVM RPC tracker until Ctrl-C or SIGTERM: it lists the workers, and the devices for tuning.

    A tracker accepts everyone who can connect to it.

    Example: tvm-split tracker --listen 0.0.0.0:9190
    """
    address = Address.parse(listen)
    load_runtime()
    try:
        from tvm.rpc.tracker import TrackerServerHandler
    except ImportError as error:
        raise TvmSplitError("a tracker needs tornado: pip install 'tvm-split[tracker]'") from error
    try:
        listening = address.listen()
    except OSError as error:
        raise TvmSplitError(f"cannot listen at {listen}: {error.strerror or error}") from error
    asyncio.set_event_loop(asyncio.new_event_loop())  # TVM's server needs one; TVM's command makes it in a subprocess
    server = TrackerServerHandler(listening, secrets.token_hex(16))
    print_unwrapped(f"the tracker listens at {replace(address, port=listening.getsockname()[1])}")
    STDOUT.file.flush()
    server.run()
