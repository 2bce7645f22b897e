"""``tvm-split certs`` and ``token``: who may call the workers of a lab."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer

from rpc_runtime.option import option
from rpc_runtime.wire.security import new_token
from rpc_runtime.wire.tokens import token_line
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.display.console import print_json, print_line, print_note


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the authority, made if it is missing.")],
    host: list[str] | None = option(
        None, "A worker's certificate, for these names and IP addresses. Repeatable.", metavar="NAME[=ADDRESS,…]"
    ),
    client: list[str] | None = option(None, "A caller's certificate. Repeatable.", metavar="NAME"),
    days: int = option(365, "How long the certificates are valid.", minimum=1),
    json: bool = options.JSON,
) -> None:
    """Make or renew certificates of a lab's workers and clients: NAME.pem and NAME.key, signed by lab-ca.pem.

    The authority is made once, for ten years. Whoever reads its key, lab-ca.key, can make certificates that all workers
    accept: copy to each machine only its own files and lab-ca.pem.

    Example: tvm-split certs lab --host box=box.lab.example,192.0.2.10 --client me
    """
    from rpc_runtime.wire.authority import certify  # imported here, since it needs an extra

    if not host and not client:
        raise WrongUseError("name the machines and people to make certificates for", "--host, --client")
    hosts = [(name, addresses or name) for name, _, addresses in (entry.partition("=") for entry in host or ())]
    wanted = {name: addresses.split(",") for name, addresses in hosts} | {name: [] for name in client or ()}
    made = {name: str(certify(folder, name, addresses, timedelta(days))) for name, addresses in wanted.items()}
    print_json(made) if json else print_line("\n".join(made.values()))
    print_note(f"valid for {days} days; the same command renews them, and running workers read them again")


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is, for messages and the audit log.")],
    role: Literal["deploy", "observe"] = option("deploy", "What it allows: observe is status, trace and dashboard."),
    tokens: Path | None = options.output(None, "Add the token's line to this file of workers.", file="FILE"),
    json: bool = options.JSON,
) -> None:
    """Make a token and print it. Workers (--tokens) get a line with its SHA-256; without that line it is revoked.

    Example: tvm-split token alice --tokens lab-tokens > alice.token
    """
    made = new_token()
    line = token_line(name, role, made)
    if tokens is not None:
        with tokens.open("a") as file:
            file.write("\n" * bool(file.tell()) + line)
    print_json({"token": made.text, "line": line}) if json else print_line(made.text)
    print_note(f"its line is in {tokens}" if tokens else f"its line for the workers' file: {line}")
