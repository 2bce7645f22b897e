"""A cluster file of running workers, and a stream in the background."""

import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpc_runtime.wire.channels import WorkerEndpoint


def write_lab(folder: Path, endpoints: Mapping[str, WorkerEndpoint]) -> Path:
    """Write ``lab.yaml`` with these workers, and beside it their tokens; return its path."""
    machines = []
    for name, end in endpoints.items():
        (folder / f"{name}.token").write_text(f"{end.token}\n")
        machines.append({"name": name, "address": end.address, "token_file": f"{name}.token"})
    (folder / "lab.yaml").write_text(json.dumps({"machines": machines}))
    return folder / "lab.yaml"


@contextmanager
def streaming(runner: Any, batches: Sequence[Any]) -> Iterator[None]:
    """Let a session or deployment compute these micro-batches again and again."""
    ended = threading.Event()

    def stream() -> None:
        for _ in runner.stream(itertools.takewhile(lambda _: not ended.wait(0.002), itertools.cycle(batches))):
            pass

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
