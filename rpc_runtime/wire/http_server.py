"""A small HTTP server for few readers, which limits the number of callers, their silence and their total time."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from rpc_runtime.errors import WorkerError
from rpc_runtime.processes import Closing, ending_after
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.security import TlsFiles

logger = logging.getLogger(__name__)

CALLERS = 16
CALL_SECONDS = 5.0
"""Timeout of each read and write of a caller."""
DEADLINE_SECONDS = 60.0
"""A caller's time in all: the page may have to wait for machines that hang."""
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""The interface of PEP 3333."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = CALL_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def address_string(self) -> str:
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, tls: TlsFiles | None) -> None:
        self._tls = tls
        self._free = threading.BoundedSemaphore(CALLERS)
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            with ending_after(DEADLINE_SECONDS, _shut, request):  # the timeout of a read begins anew with each byte
                if self._tls is not None:
                    request.settimeout(CALL_SECONDS)
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(str(self._tls.certificate), self._tls.key)  # they may be new ones
                    request = context.wrap_socket(request, server_side=True)
                super().process_request_thread(request, client_address)
        except OSError as error:
            logger.debug("an HTTP caller has gone: %s", error)
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an HTTP caller failed", exc_info=True)


class HttpServer(Closing):
    """Serves an application of WSGI at an address (port 0: any free one), in threads, until it is closed.

    ``what`` names the application in errors. The attribute ``url`` is its address for a browser; it ends in ``path``.

    Raises:
        WorkerError: the address cannot be used.
    """

    def __init__(
        self, listen: Address, application: Application, what: str, path: str = "/", tls: TlsFiles | None = None
    ) -> None:
        try:
            listening = listen.listen()
        except OSError as error:
            raise WorkerError(f"cannot serve {what} on {listen}: {error.strerror or error}") from error
        self._server = _Server(listening, tls)
        self._server.set_app(application)
        self.address = replace(listen, port=self._server.server_port)
        self.url = f"{'http' if tls is None else 'https'}://{self.address}{path}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name=what, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
