"""``tvm-split worker``: the process that runs stages on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tvm_split.cli.wrong_use import WrongUseError
from tvm_split.rpc_runtime.errors import InputError


def worker(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes any that is free.")
    ] = "127.0.0.1:0",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of a kernel.")] = 1,
    cores: Annotated[str, typer.Option("--cores", metavar="0,1", help="Run on these CPUs only.")] = "",
    name: Annotated[str, typer.Option("--name", help="The machine's name (default: the host's).")] = "",
    cache: Annotated[Path | None, typer.Option("--cache", help="The folder for libraries and weights.")] = None,
    cache_limit_bytes: Annotated[
        int | None,
        typer.Option("--cache-limit-bytes", min=1, help="Its size (default: 4/5 of what the disk has free)."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="A file with the secret that callers must know (else $TVM_SPLIT_TOKEN, else one is made on loopback).",
        ),
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option("--tls-certificate", metavar="PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="PEM")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", metavar="PEM", help="Callers need a certificate of this authority.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Trust all who can reach the address: no TLS, or no proof of who calls.")
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="What to log on standard error.")
    ] = "warning",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")] = False,
) -> None:
    """Run stages on this machine until Ctrl-C or SIGTERM.

    A worker runs the machine code that it is sent. So it listens on this host only, for its own user, unless it gets
    TLS and a way to know its callers (--tls-ca or a token), or --insecure.
    """
    from tvm_split.rpc_runtime.wire.security import TlsFiles, token_from
    from tvm_split.rpc_runtime.worker.process import WorkerConfig, serve

    if (tls_certificate is None) != (tls_key is None):
        raise WrongUseError("a certificate and its key belong together", "--tls-certificate, --tls-key")
    if tls_ca is not None and tls_certificate is None:
        raise WrongUseError("needs --tls-certificate and --tls-key as well", "--tls-ca")
    serve(
        WorkerConfig(
            listen=listen,
            threads=threads,
            name=name,
            cores=_cores(cores),
            cache=cache,
            cache_limit_bytes=cache_limit_bytes,
            token=token_from(token_file),
            tls=None if tls_certificate is None else TlsFiles(tls_ca, tls_certificate, tls_key),
            insecure=insecure,
            log_level=log_level,
            ready_json=json,
        )
    )


def _cores(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(core) for core in text.split(",") if core)
    except ValueError:
        raise InputError(f"--cores takes numbers with commas between them, got {text!r}") from None
