"""The worker process of one machine: ``python -m rpc_runtime.worker --listen HOST:PORT --threads N``.

It runs machine code that a client sends, so every authorized caller controls it. Callers authenticate by a token (on
loopback, the worker makes one itself) or by a certificate, unless ``--insecure`` allows all callers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from rpc_runtime.errors import RAISE_FILES, InputError, TvmSplitError, WorkerError
from rpc_runtime.execution.observed_stage import mark_for_nsight
from rpc_runtime.files import cache_folder
from rpc_runtime.hardware import own_cores
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.audit import Audit
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.security import TOKEN_VARIABLE, Token, new_token, published
from rpc_runtime.wire.server import (
    RAISE_LIMITS,
    bind,
    health_quotas,
    health_server,
    health_servicer,
    new_server,
    require_answer,
)
from rpc_runtime.wire.text import CleanFormatter
from rpc_runtime.wire.tokens import Tokens
from rpc_runtime.wire.tracker import Registration
from rpc_runtime.wire.worker_pb2_grpc import add_ControlServicer_to_server
from rpc_runtime.worker.config import WorkerConfig, config_from_arguments
from rpc_runtime.worker.memory import keep_heap
from rpc_runtime.worker.runtime_alone import load_runtime
from rpc_runtime.worker.tracker_registration import TrackerRegistration

if TYPE_CHECKING:
    from rpc_runtime.execution.blob_store import BlobStore
    from rpc_runtime.worker.service import WorkerService

logger = logging.getLogger(__name__)

MINIMUM_FILES, MINIMUM_CONNECTIONS, MAXIMUM_CONNECTIONS = 128, 64, 16_384
OWN_FILES = 512
"""File descriptors reserved for blobs, locks and gRPC; a worker without free descriptors cannot work."""
STOP_SECONDS = 2.0
LEFT_SECONDS = 0.05
"""Time between two looks at whether clients have moved their stages away."""
CHECK_SECONDS = 86400.0
"""Time between two looks at when certificates expire."""
EXHAUSTED = b"!"
"""Written to the pipe of signals when a thread has failed because no memory or no further thread was left."""
FORCED_EXIT_SECONDS = 8.0
"""Time after which the process exits even if a kernel still runs."""


def serve(config: WorkerConfig, results: IO[str]) -> None:
    """Run a worker until SIGTERM, SIGINT, SIGHUP, or the end of its parent. Call it from the main thread.

    After SIGTERM, clients that move their stages away have ``config.drain_seconds`` for that.

    The ready line, which says where the worker listens, is written to ``results``.

    Raises:
        InputError: the configuration is contradictory or unsafe, or a transport cannot be used.
        WorkerError: the address cannot be used.
        BlobError: the cache folder cannot be used.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(CleanFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    _check_callers(config)
    if config.certificates is not None:
        config.certificates.warn()
    _prepare_process(config)
    # A signal only writes to a pipe. Python's own handlers run when the main thread wakes: not if another one is hit.
    signalled, signal_end = os.pipe()
    os.set_blocking(signal_end, False)
    signal.set_wakeup_fd(signal_end, warn_on_full_buffer=False)
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup ignores it
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        signal.signal(number, lambda *_: None)

    def end(failed: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(failed)
        if _is_exhausted(failed.exc_value):
            os.write(signal_end, EXHAUSTED)

    threading.excepthook = end  # gRPC's own thread may have ended, without which a worker answers nothing
    _serve_until(config, results, signalled)


def _is_exhausted(error: BaseException | None) -> bool:
    """Return whether an error says that this process gets no memory, or no further thread."""
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _knows_callers(config: WorkerConfig) -> bool:
    """Return whether callers must authenticate. The worker's own certificate does not authenticate callers."""
    return any((config.tokens, config.token, config.tls and config.tls.authority))


def _check_callers(config: WorkerConfig) -> None:
    """Reject serving unauthenticated callers or an open network without TLS, unless ``insecure`` allows it.

    Raises:
        InputError: the configuration is unsafe; the message says which options to give.
    """
    loopback, knows_callers = Address.parse(config.listen).is_loopback, _knows_callers(config)
    is_open = config.metrics_listen is not None and not Address.parse(config.metrics_listen).is_loopback
    if is_open and config.tls is None and not config.insecure:
        raise InputError(
            f"metrics on {config.metrics_listen} can be read from other machines, with the names of models and owners: "
            "give --tls-certificate and --tls-key, or --insecure on a network that you trust"
        )
    if not config.insecure and not loopback:
        problem = f"{config.listen} can be reached from other machines, and a worker runs the code it is sent"
        if config.tls is None:
            raise InputError(
                f"{problem}: give --tls-certificate and --tls-key, and --tls-ca or a token, or --insecure on a network "
                "that you trust"
            )
        if not knows_callers:
            raise InputError(
                f"{problem}. --tls-certificate proves this worker to its callers, not them to it: give --tls-ca or "
                "--token-file, or --insecure on a network that you trust"
            )


def _warn_of_callers(config: WorkerConfig) -> None:
    """Log who controls this machine, once the worker listens."""
    loopback, knows_callers = Address.parse(config.listen).is_loopback, _knows_callers(config)
    if config.insecure and not knows_callers:
        who = "every user of this host" if loopback else "anybody who reaches this port"
        lacking = "TLS" if config.tls is None and not loopback else "--tls-ca or a token"
        logger.warning("listening on %s without %s: %s controls this machine", config.listen, lacking, who)
    elif not loopback and config.tls is None:
        logger.warning("listening on %s without TLS: only the token protects this machine", config.listen)


def _prepare_process(config: WorkerConfig) -> None:
    """Pin the process to its cores, and prepare its heap and the environment variables that TVM reads at import."""
    keep_heap()
    if config.cores:
        try:
            os.sched_setaffinity(0, [int(core) for core in config.cores.split(",")])
        except (OSError, ValueError) as error:
            raise InputError(
                f"--cores takes numbers of {sorted(os.sched_getaffinity(0))} with commas between them, got "
                f"{config.cores!r}: {error}"
            ) from error
    os.environ.update(TVM_NUM_THREADS=str(config.threads), TVM_BIND_THREADS="0")
    if config.nvtx:
        mark_for_nsight()


def _maximum_connections() -> int:
    """Return the limit of connections: that of open files less `OWN_FILES`. Raises `WorkerError` if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # the soft limit is low only for programs that use select()
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft < MINIMUM_FILES:
        raise WorkerError(f"a worker needs {MINIMUM_FILES} file descriptors, and {soft} are allowed. {RAISE_FILES}")
    return max(MINIMUM_CONNECTIONS, min(soft - OWN_FILES, MAXIMUM_CONNECTIONS))


def _serve_until(config: WorkerConfig, results: IO[str], signalled: int) -> None:
    ending = threading.Event()
    threading.Thread(target=_force_exit, args=(ending,), name="force-exit", daemon=True).start()
    load_runtime()

    from rpc_runtime.execution.blob_store import BlobStore
    from rpc_runtime.transports.transport import transport_named
    from rpc_runtime.worker.service import WorkerService

    name = config.name or socket.gethostname()
    blobs = BlobStore(config.cache or cache_folder("blobs"), config.cache_limit_bytes)
    transports = [transport_named(name) for name in config.transport]
    for transport in transports:
        transport.start()
    makes_token = not config.insecure and not _knows_callers(config)
    token = new_token() if makes_token else config.token
    source = config.tokens or token
    servicer = health_servicer()
    service = WorkerService(name, config, blobs)
    quotas = {**WorkerService.quotas(), **health_quotas()}
    callers = (Tokens(source) if source is not None else None, service.knows_link, Audit(config.audit))
    server = new_server(quotas, _maximum_connections(), *callers, handlers=(service.link_handlers(),))
    add_ControlServicer_to_server(service, server)
    add_HealthServicer_to_server(servicer, server)
    probed = health_server(servicer, config.health_listen) if config.health_listen else None
    try:
        address = bind(server, config.listen, config.certificates and config.certificates.credentials())
        _warn_of_callers(config)
        with contextlib.ExitStack() as until_end:
            if token is not None and makes_token:
                token = Token(token.text, until_end.enter_context(published(token, address)))
            server.start()
            if probed is not None:
                probed.start()
            if config.metrics_listen is not None:
                # Imported here: few workers serve metrics.
                from rpc_runtime.program.metrics import families
                from rpc_runtime.wire.metrics_server import metrics_server

                listen = Address.parse(config.metrics_listen)
                until_end.enter_context(metrics_server(listen, lambda: families(service.measured()), config.tls))
            require_answer(address, has_tls=config.tls is not None)
            registration = until_end.enter_context(_registered(config, name, address, service))
            service.prepare()
            gc.freeze()  # what is there stays; collections, as after each deployment, need not look at it
            print(_announcement(config, name, address, token, blobs, registration), file=results, flush=True)
            if _wait_for_end(signalled, config) == bytes([signal.SIGTERM]):
                _drain(service, config.drain_seconds, signalled)
    finally:
        ending.set()
        servicer.enter_graceful_shutdown()
        if probed is not None:
            probed.stop(None)
        stopped = server.stop(STOP_SECONDS)
        service.close()
        stopped.wait(STOP_SECONDS + 1)
        for transport in transports:
            transport.stop()
        blobs.close()


@contextlib.contextmanager
def _registered(
    config: WorkerConfig, name: str, address: str, service: WorkerService
) -> Iterator[TrackerRegistration | None]:
    """Register the worker with its tracker while the body runs; yield the registration (None: no tracker)."""
    if config.entry is None:
        yield None
        return
    own_address = Address.parse(address)
    own_registration = Registration(
        name, config.threads, config.tls is not None, tunes=False, state="ready", since=time.time()
    )
    tuning = replace(own_address, port=config.tuning_port or 0) if config.is_tuned else None
    with TrackerRegistration(config.entry, own_address.port, own_registration, service.is_busy, tuning) as registration:
        service.on_change = registration.request_update
        if tuning is not None and not config.insecure:
            logger.warning(
                "kernels can be tuned on port %s: anyone who can reach it can run code here", registration.tuning_port
            )
        yield registration


def _announcement(
    config: WorkerConfig,
    name: str,
    address: str,
    token: Token | None,
    blobs: BlobStore,
    registration: TrackerRegistration | None,
) -> str:
    file = token.file.absolute() if token is not None and token.file is not None else None
    if config.json or config.exit_with_parent:
        ready = {"address": address, "name": name, "pid": os.getpid(), "protocol": PROTOCOL_VERSION}
        tuning_port = None if registration is None else registration.tuning_port
        return json.dumps({**ready, "token_file": None if file is None else str(file), "tuning_port": tuning_port})
    secret = "no token" if token is None else f"token in {file}" if file else f"token from ${TOKEN_VARIABLE}"
    secret = secret if config.tokens is None else f"tokens in {config.tokens}"
    protection = f"{'TLS' if config.tls else 'no TLS'}, {secret}"
    threads = f"threads per kernel: {config.threads} on {own_cores().text}"
    cache = f"cache of {blobs.limit_bytes / 1e9:.3g} GB at most in {blobs.folder}"
    line = f"worker {name!r} listens on {address} ({protection}, {threads}, {cache}); Ctrl-C ends it"
    if config.entry is not None and registration is not None:
        port = registration.tuning_port
        for_what = "deployment alone" if port is None else f"deployment, and for tuning on port {port}"
        line += f"\n  registers with {config.entry.tracker} under the key {config.entry.key!r} for {for_what}"
    return line


def _drain(service: WorkerService, seconds: float, signalled: int) -> None:
    """Ask clients to move their stages away; wait until they have, or for another signal."""
    service.drain()
    end = time.monotonic() + seconds
    while not service.is_left() and time.monotonic() < end and not select.select([signalled], (), (), LEFT_SECONDS)[0]:
        pass


def _wait_for_end(signalled: int, config: WorkerConfig) -> bytes:
    """Wait for a signal or, with ``--exit-with-parent``, for the end of standard input, which may be a file.

    Return the numbers of the signals.

    Raises:
        WorkerError: a thread has failed because no memory or no further thread was left.
    """
    with selectors.PollSelector() as selector:  # epoll rejects files
        selector.register(signalled, selectors.EVENT_READ)
        if config.exit_with_parent:
            selector.register(0, selectors.EVENT_READ)
        while True:
            events = selector.select(CHECK_SECONDS)
            if not events and config.certificates is not None:
                config.certificates.warn()
            for key, _ in events:
                word = os.read(key.fd, 4096)
                if key.fd == signalled and EXHAUSTED in word:
                    raise WorkerError(f"this worker has no memory or no thread left: {RAISE_LIMITS}")
                if key.fd == signalled or not word:
                    return word


def _force_exit(ending: threading.Event) -> None:
    ending.wait()
    threading.Event().wait(FORCED_EXIT_SECONDS)
    os._exit(1)


def main(results: IO[str], arguments: Sequence[str] | None = None) -> int:
    """Run a worker; return the exit code: 0 after a clean end, 1 if it cannot run, 2 for a wrong command line.

    ``results`` gets the line that says where the worker listens.
    """
    try:
        with contextlib.redirect_stdout(results):  # for --help
            config = config_from_arguments(arguments)
        serve(config, results)
    except TvmSplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except (MemoryError, RuntimeError) as error:
        if not _is_exhausted(error):
            raise
        text = f"error: a worker gets too little memory or too few threads here ({error}): {RAISE_LIMITS}"
        print(text, file=sys.stderr, flush=True)
        os._exit(1)  # Python's own end could wait for threads that never started
    return 0
