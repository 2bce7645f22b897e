"""Refuses calls in the thread that takes them in, which is the cheapest place that gRPC has with an answer in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc


def refusal(code: grpc.StatusCode, message: str) -> Any:
    """A handler that refuses its calls and hands them to no other thread, which would take twice the time."""

    def refuse(requests: Iterator[bytes], context: Any) -> None:
        context.abort(code, message)

    refuse.experimental_thread_pool = _CALLING_THREAD  # type: ignore[attr-defined]
    return grpc.stream_unary_rpc_method_handler(refuse)


class _CallingThread(ThreadPoolExecutor):
    """gRPC takes a pool of its own for a method, if it is a ``ThreadPoolExecutor``; this one has no threads."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        try:
            done.set_result(function(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done


_CALLING_THREAD = _CallingThread(1)
