"""``tvm-split worker``: run stages on this machine, with the options of ``rpc_runtime.worker``."""

from __future__ import annotations

from contextlib import redirect_stdout

import typer

from tvm_split.display.console import STDOUT

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


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
