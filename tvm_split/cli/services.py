"""``tvm-split worker`` and ``tracker``: processes that run until Ctrl-C or SIGTERM."""

import asyncio
import secrets
from contextlib import redirect_stdout
from dataclasses import replace

import typer

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.option import option
from rpc_runtime.wire.addresses import Address
from rpc_runtime.worker.runtime_alone import load_runtime
from tvm_split.display.console import STDOUT, print_unwrapped


def worker(context: typer.Context) -> None:
    """Run stages on this machine until Ctrl-C or SIGTERM.

    A worker runs the machine code that it is sent. So it listens on this host only, for its own user, unless it gets
    TLS and a way to know its callers (--tls-ca or a token), or --insecure.

    Example: tvm-split worker --listen 0.0.0.0:9000 --tls-certificate box.pem --tls-key box.key --tls-ca ca.pem
    """
    from rpc_runtime.worker.config import config_from_arguments
    from rpc_runtime.worker.process import serve

    with redirect_stdout(STDOUT.file):  # so that --help is written to stdout
        config = config_from_arguments(context.args, "tvm-split worker")
    serve(config, STDOUT.file)


def tracker(
    listen: str = option("127.0.0.1:9190", "Where it listens (port 0: any free port).", metavar="HOST:PORT"),
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
