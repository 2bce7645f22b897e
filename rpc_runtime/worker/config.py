"""The configuration of a worker: the options of its command line, and what follows from them."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from rpc_runtime.errors import InputError
from rpc_runtime.option import default_of, option, options
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.transports.transport import TRANSPORTS
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.security import TOKEN_VARIABLE, TlsFiles, Token, token_from
from rpc_runtime.wire.tracker import TrackerEntry, require_key

SILENCE_VARIABLE = "TVM_SPLIT_SILENCE_SECONDS"
"""Environment variable: seconds of silence after which a link's other end counts as dead; for tests."""
_OF_TRACKER = ("key", "advertise", "insecure_tuning", "tuning_port")


@dataclass(frozen=True)
class WorkerConfig:
    """The options of a worker, its ``entry`` at a tracker (None: no tracker), and the timeouts of its links.

    Raises:
        InputError: an option is invalid, or options contradict each other.
    """

    listen: str = option("127.0.0.1:0", "where it is called (default 127.0.0.1:0; port 0: any)", metavar="HOST:PORT")
    threads: int = option(1, "threads of a kernel (default 1)", minimum=1)
    cores: str = option("", "run on these CPUs only", metavar="0,1")
    name: str = option("", "the machine's name in the cluster (default: the host's)")
    cache: Path | None = option(None, "folder for libraries and weights")
    cache_limit_bytes: int | None = option(None, "the cache's size (default: 4/5 of the free disk)", minimum=0)
    token_file: Path | None = option(
        None, f"file with the token that callers must know (else ${TOKEN_VARIABLE}; else, on loopback, one is made)"
    )
    tokens: Path | None = option(None, "file of the callers and their roles, by `tvm-split token`; read at each call")
    audit: Path | None = option(None, "append who deploys, and who is refused, to this file, as JSON lines")
    tls_certificate: Path | None = option(None, "certificate of this worker", metavar="PEM")
    tls_key: Path | None = option(None, "key of the certificate", metavar="PEM")
    tls_ca: Path | None = option(None, "callers need a certificate from this authority", metavar="PEM")
    insecure: bool = option(False, "trust all who reach the address")
    drain_seconds: float = option(
        5.0, "after SIGTERM, wait so long for clients to move their stages away (default 5)", minimum=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("warning", "default warning")
    json: bool = option(False, "print one line of JSON when ready")
    transport: tuple[str, ...] = option(
        (),
        "make a transport ready that needs it, such as mpi for a worker that mpiexec starts; may be repeated",
        metavar="NAME",
    )
    exit_with_parent: bool = option(False, "end when standard input ends")
    health_listen: str | None = option(
        None,
        "answer grpc.health.v1 here too, without TLS and nothing else: for probes that know none, as Kubernetes'",
        metavar="HOST:PORT",
    )
    metrics_listen: str | None = option(
        None, "serve metrics for Prometheus here, over HTTP, or HTTPS with --tls-certificate", metavar="HOST:PORT"
    )
    nvtx: bool = option(False, "mark stages and micro-batches for NVIDIA Nsight, with the package nvtx")
    tracker: str | None = option(None, "register this machine at TVM's RPC tracker, under --key", metavar="HOST:PORT")
    key: str | None = option(None, "the kind of machine, as `tvm.exec.rpc_server --key` has it")
    advertise: str | None = option(None, "the host by which others reach this machine", metavar="HOST")
    insecure_tuning: bool = option(
        False,
        "let kernels be tuned here through the tracker also where the worker itself knows its callers: TVM's RPC knows "
        "none, so whoever reaches its port runs code here",
    )
    tuning_port: int | None = option(
        None, "where TVM's RPC is served, with --insecure… (default: any)", metavar="PORT", minimum=0
    )
    timeouts: LinkTimeouts = USUAL_TIMEOUTS
    entry: TrackerEntry | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for option_field in options(type(self)):
            value, minimum = getattr(self, option_field.name), option_field.metadata.get("ge")
            if minimum is not None and value is not None and value < minimum:
                raise InputError(f"{_flag(option_field.name)} is at least {minimum}, got {value}")
        has_pair = self.tls_certificate and self.tls_key
        if not has_pair and (self.tls_certificate or self.tls_key or self.tls_ca):
            raise InputError("--tls-certificate and --tls-key belong together, and --tls-ca needs both")
        if self.tokens and self.token_file:
            raise InputError("--tokens names all callers, so give no --token-file beside it")
        if self.name == CLIENT:
            raise InputError(f"--name {CLIENT} is the name of the process that deploys; give another name")
        if unknown := [name for name in self.transport if name not in TRANSPORTS]:
            raise InputError(f"--transport takes {', '.join(TRANSPORTS)}, got {', '.join(unknown)}")
        object.__setattr__(self, "entry", self._entry())

    @cached_property
    def token(self) -> Token | None:
        """The token in its file or the environment; None without, or with ``tokens``. Raises `InputError`."""
        return None if self.tokens else token_from(self.token_file)

    @cached_property
    def certificates(self) -> Any:
        """The `WorkerCertificates`; None without TLS. Raises `InputError` if they cannot be used."""
        if self.tls is None:
            return None
        from rpc_runtime.wire.certificates import WorkerCertificates  # few workers have TLS

        return WorkerCertificates(self.tls)

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(self.tls_ca, self.tls_certificate, self.tls_key) if self.tls_certificate else None

    @property
    def is_tuned(self) -> bool:
        """Whether kernels may be tuned here by TVM's RPC, which has no authentication."""
        return self.insecure or self.insecure_tuning

    def _entry(self) -> TrackerEntry | None:
        """Return the worker's entry at its tracker; None without ``--tracker``.

        Without ``--advertise``, its host is the one on which the worker listens; None if that is all addresses.
        """
        if self.tracker is None:
            if names := [name for name in _OF_TRACKER if getattr(self, name)]:
                raise InputError(f"{_flag(names[0])} belongs to --tracker")
            return None
        if self.key is None:
            raise InputError("--tracker needs --key as well, under which this machine is listed")
        if self.tuning_port is not None and not self.is_tuned:
            raise InputError(
                "TVM's RPC does not authenticate callers, and this worker does: to tune on it, give "
                "--insecure-tuning with --tuning-port, on a network where you trust everyone, or leave it out"
            )
        if (self.tuning_port or 0) >= 1 << 16:
            raise InputError(f"--tuning-port is a port from 0 to 65535, got {self.tuning_port}")
        tracker, listen = Address.callable(self.tracker), Address.parse(self.listen)
        if self.advertise is None and listen.is_loopback and not tracker.is_loopback:
            raise InputError(
                f"the tracker {tracker} is on another machine, and its clients cannot reach {self.listen}: listen "
                "on an address of the network, or give --advertise with the host by which others reach this worker"
            )
        host = None if listen.is_unspecified else listen.host
        if self.advertise:
            host = Address(self.advertise.strip("[]"), listen.port).host
        return TrackerEntry(tracker, require_key(self.key), host)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error as one line, like every other error of a worker, instead of printing the usage."""
        raise InputError(f"{message}; `tvm-split worker --help` has the options")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser(program: str, *, with_help: bool = True) -> argparse.ArgumentParser:
    description = "Runs stages on this machine until Ctrl-C or SIGTERM."
    parser = _Parser(prog=program, description=description, add_help=with_help)
    kinds = get_type_hints(WorkerConfig)
    for option_field in options(WorkerConfig):
        kind, parts = kinds[option_field.name], get_args(kinds[option_field.name])
        settings = {"help": option_field.metadata["description"], "default": default_of(option_field)}
        if kind is bool:
            settings |= {"action": "store_true"}
        elif isinstance(option_field.default, tuple):
            settings |= {"action": "append", "default": []}
        elif isinstance(option_field.default, str) and parts:
            settings |= {"choices": parts}
        else:
            settings |= {"type": parts[0] if parts else kind}
        if metavar := option_field.metadata["json_schema_extra"]["metavar"]:
            settings |= {"metavar": metavar}
        parser.add_argument(_flag(option_field.name), **settings)
    return parser


def require_options(arguments: Sequence[str]) -> None:
    """Raise an `InputError` for options that a worker does not have; do not look for the files that they name."""
    _parser("", with_help=False).parse_args(arguments)


def config_from_arguments(
    arguments: Sequence[str] | None = None, program: str = "python -m rpc_runtime.worker"
) -> WorkerConfig:
    """Return the configuration for a command line (default: ``sys.argv``).

    Raises:
        InputError: an option is unknown or invalid, or options contradict each other.
    """
    values = vars(_parser(program).parse_args(arguments))
    values["transport"] = tuple(dict.fromkeys(values["transport"]))
    for name in ("listen", "health_listen", "metrics_listen"):
        if values[name] is not None:
            values[name] = str(Address.parse(values[name]).numeric)
    return WorkerConfig(**values, timeouts=_timeouts(os.environ.get(SILENCE_VARIABLE)))


def _timeouts(silence: str | None) -> LinkTimeouts:
    try:
        return USUAL_TIMEOUTS if silence is None else LinkTimeouts.of_silence(float(silence))
    except ValueError as error:
        raise InputError(f"${SILENCE_VARIABLE} is a number of seconds, got {silence!r}: {error}") from None
