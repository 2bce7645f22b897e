"""``tvm-split status``: what the workers say of themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, bytes_text, print_json

if TYPE_CHECKING:
    from rpc_runtime.client import WorkerEndpoint

ASKED_AT_ONCE = 32


def status(
    cluster: options.ClusterOption = None,
    address: Annotated[
        list[str] | None, typer.Option("--address", metavar="HOST:PORT", help="A worker to ask. Repeatable.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The workers' secret, for --address [default: $TVM_SPLIT_TOKEN].")
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option("--tls-ca", metavar="PEM", help="Use TLS, for --address.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option("--tls-certificate", metavar="PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="PEM")] = None,
    timeout: options.TimeoutOption = 5.0,
    json: options.JsonOption = False,
) -> None:
    """Ask workers what they are and what they hold. Exit code 1 if one of them does not answer."""
    if (cluster is None) == (not address):
        raise typer.BadParameter("give one of them", param_hint="--cluster, --address")
    if cluster is not None:
        from tvm_split.cluster import Cluster

        endpoints = list(Cluster.from_yaml(cluster).endpoints().values())
    else:
        endpoints = _endpoints(address or [], token_file, tls_ca, tls_certificate, tls_key)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = list(pool.map(lambda endpoint: _ask(endpoint, timeout), endpoints))
    if json:
        print_json({"workers": answers})
    else:
        _print(answers)
    if not all(answer["reachable"] for answer in answers):
        raise typer.Exit(1)
