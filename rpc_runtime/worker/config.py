"""The configuration of a worker and its command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rpc_runtime.errors import InputError
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.transports.transport import TRANSPORTS
from rpc_runtime.wire.security import TOKEN_VARIABLE, TlsFiles, Token, numeric_address, token_from
from rpc_runtime.worker.tracker_options import TrackerOptions, add_tracker_options, tracker_options

SILENCE_VARIABLE = "TVM_SPLIT_SILENCE_SECONDS"
"""Environment variable: seconds of silence after which a link's other end counts as dead; for tests."""
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a worker.

    Args:
        listen: HOST:PORT (port 0: any free port).
        threads: threads per kernel.
        cores: the CPUs to pin the whole process to.
        cache: folder for blobs, of at most ``cache_limit_bytes`` (default: four fifths of the disk space that is free
            at the start, where existing blobs count as free).
        insecure: allow a missing ``token`` or ``tls``.
        log_level: one of `LOG_LEVELS`.
        ready_json: print one line of JSON when the worker listens.
        exit_with_parent: end when standard input ends.
        transports: transports to prepare at the start, such as ``mpi`` for a rank of ``mpiexec``.
        health_listen: HOST:PORT that serves only health checks, without TLS.
        tracker: how to register with TVM's RPC tracker; None: do not register.
        timeouts: the timeouts of links.
    """

    listen: str = "127.0.0.1:0"
    threads: int = 1
    name: str = ""
    cores: tuple[int, ...] = ()
    cache: Path | None = None
    cache_limit_bytes: int | None = None
    token: Token | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    log_level: str = "warning"
    ready_json: bool = False
    exit_with_parent: bool = False
    transports: tuple[str, ...] = ()
    health_listen: str | None = None
    tracker: TrackerOptions | None = None
    timeouts: LinkTimeouts = USUAL_TIMEOUTS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error as one line, like every other error of a worker, instead of printing the usage."""
        raise InputError(f"{message}; `tvm-split worker --help` has the options")


def _parser(program: str, *, with_help: bool = True) -> argparse.ArgumentParser:
    description = "Runs stages on this machine until Ctrl-C or SIGTERM."
    parser = _Parser(prog=program, description=description, add_help=with_help)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default %(default)s, 0: any port")
    parser.add_argument("--threads", type=int, default=1, help="threads of a kernel (default %(default)s)")
    parser.add_argument("--cores", default="", metavar="0,1", help="run on these CPUs only")
    parser.add_argument("--name", default="", help="the machine's name in the cluster (default: the host's)")
    parser.add_argument("--cache", type=Path, help="folder for libraries and weights")
    parser.add_argument("--cache-limit-bytes", type=int, help="the cache's size (default: 4/5 of the free disk)")
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token that callers must know (else ${TOKEN_VARIABLE}; else, on loopback, one is made)",
    )
    parser.add_argument("--tls-certificate", type=Path, metavar="PEM")
    parser.add_argument("--tls-key", type=Path, metavar="PEM")
    parser.add_argument("--tls-ca", type=Path, metavar="PEM", help="callers need a certificate from this authority")
    parser.add_argument("--insecure", action="store_true", help="trust all who reach the address")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="default %(default)s")
    parser.add_argument("--json", "--ready-json", action="store_true", help="print one line of JSON when ready")
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME",
        help="make a transport ready that needs it, such as mpi for a worker that mpiexec starts; may be repeated",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input ends")
    parser.add_argument(
        "--health-listen",
        metavar="HOST:PORT",
        help="answer grpc.health.v1 here too, without TLS and nothing else: for probes that know none, as Kubernetes'",
    )
    add_tracker_options(parser)
    return parser


def require_options(arguments: Sequence[str]) -> None:
    """Raise an `InputError` for options that a worker does not have; files they name may be on another machine."""
    _parser("", with_help=False).parse_args(arguments)


def config_from_arguments(
    arguments: Sequence[str] | None = None, program: str = "python -m rpc_runtime.worker"
) -> WorkerConfig:
    """Return the configuration for a command line (default: ``sys.argv``).

    Raises:
        InputError: an option is unknown, or options contradict each other.
    """
    given = _parser(program).parse_args(arguments)
    if bool(given.tls_certificate) != bool(given.tls_key):
        raise InputError("--tls-certificate and --tls-key belong together")
    if given.tls_ca and not given.tls_certificate:
        raise InputError("--tls-ca needs --tls-certificate and --tls-key as well")
    try:
        cores = tuple(int(core) for core in given.cores.split(",") if core)
    except ValueError:
        raise InputError(f"--cores takes numbers with commas between them, got {given.cores!r}") from None
    tls = TlsFiles(given.tls_ca, given.tls_certificate, given.tls_key) if given.tls_certificate else None
    return WorkerConfig(
        listen=given.listen,
        threads=given.threads,
        name=given.name,
        cores=cores,
        cache=given.cache,
        cache_limit_bytes=given.cache_limit_bytes,
        token=token_from(given.token_file),
        tls=tls,
        insecure=given.insecure,
        log_level=given.log_level,
        ready_json=given.json,
        exit_with_parent=given.exit_with_parent,
        transports=_transports(given.transport),
        health_listen=numeric_address(given.health_listen) if given.health_listen else None,
        tracker=tracker_options(given),
        timeouts=_timeouts(os.environ.get(SILENCE_VARIABLE)),
    )


def _timeouts(silence: str | None) -> LinkTimeouts:
    try:
        return USUAL_TIMEOUTS if silence is None else LinkTimeouts.of_silence(float(silence))
    except ValueError as error:
        raise InputError(f"${SILENCE_VARIABLE} is a number of seconds, got {silence!r}: {error}") from None


def _transports(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown:
        raise InputError(f"--transport takes {', '.join(TRANSPORTS)}, got {', '.join(unknown)}")
    return tuple(dict.fromkeys(names))
