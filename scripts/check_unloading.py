"""Whether deployments that were closed leave anything behind: mappings, memory, files and disk space of the workers.

Deploys a small network on two local workers, runs it, and closes it, again and again. Prints what the workers hold now
and then, beside what they held after the first tenth, and ends with 1 if something grew by more than noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields

import psutil
import torch
from rich.console import Console

import tvm_split
from rpc_runtime.client.worker_client import describe
from tests.helpers.mappings import mappings, removed_libraries

MAPPINGS, MEMORY_BYTES, FILES = 50, 16 << 20, 20


@dataclass(frozen=True)
class Held:
    """What both workers hold together."""

    mappings: int
    removed_libraries: int
    memory_bytes: int
    files: int

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def held(process_ids: list[int]) -> Held:
    processes = [psutil.Process(each) for each in process_ids]
    return Held(
        mappings=sum(len(mappings(each)) for each in process_ids),
        removed_libraries=sum(len(removed_libraries(each)) for each in process_ids),
        memory_bytes=sum(each.memory_info().rss for each in processes),
        files=sum(each.num_fds() for each in processes),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployments", type=int, default=2000)
    arguments = parser.parse_args()
    console = Console()
    network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
    x = torch.zeros(1, 16)
    with tvm_split.Cluster.local(workers=2) as cluster:
        model = tvm_split.load_model(network, (x,))
        bundle = tvm_split.compile(
            model, tvm_split.plan(model, cluster, split={"machine-a": ["0"], "machine-b": ["2"]})
        )
        process_ids = [describe(endpoint, timeout_seconds=10).process_id for endpoint in cluster.endpoints().values()]
        first, start = None, time.monotonic()
        for count in range(1, arguments.deployments + 1):
            with tvm_split.deploy(bundle, cluster) as deployment:
                deployment.run(x)
            if count % max(1, arguments.deployments // 10) == 0:
                time.sleep(1.0)  # the last one is still being taken down
                now = held(process_ids)
                first = first or now
                console.print(
                    f"{count} deployments, {time.monotonic() - start:.0f} s: {now}", highlight=False, soft_wrap=True
                )
    assert first is not None
    grown = [
        name
        for name, most in (("mappings", MAPPINGS), ("memory_bytes", MEMORY_BYTES), ("files", FILES))
        if getattr(now, name) - getattr(first, name) > most
    ]
    if now.removed_libraries:
        grown.append("removed_libraries")
    console.print(f"grew: {', '.join(grown)}" if grown else "nothing grew")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
