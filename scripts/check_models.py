"""Check well-known networks over 1, 2 and 3 workers, cut by hand and automatically, against their source framework.

Prints for each the largest difference from the source as a share of the range of its outputs, and writes JSON. Exits
with 1 if one passes the limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

import tvm_split
from scripts.rounds import largest_difference, written
from tests.models.real_models import load

LIMIT = 1e-4
MACHINES = ("machine-a", "machine-b", "machine-c")
# Where a person would cut: the first layer of each further stage.
CUTS = {
    "resnet50": {2: ["layer3"], 3: ["layer2", "layer4"]},
    "light_resnet50": {2: ["n75"], 3: ["n40", "n110"]},
    "light_vgg19": {2: ["n14"], 3: ["n9", "n23"]},
    "light_squeezenet": {2: ["n22"], 3: ["n15", "n40"]},
}


def splits(model: tvm_split.Model, workers: int) -> Iterator[tuple[str, dict[str, list[str]] | None]]:
    """By hand and automatic; by hand with one worker means all layers named for it."""
    starts = [model.layer_names[0], *CUTS[model.name].get(workers, [])]
    yield "by hand", {machine: [start] for machine, start in zip(MACHINES, starts, strict=False)}
    yield "automatic", None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CUTS)}; all by default")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    with tvm_split.Cluster.local(workers=3, threads=1) as cluster:
        for name in arguments.models or CUTS:
            model = load(name)
            assert model.reference is not None
            generator = np.random.default_rng(7)
            batches = [
                tuple(generator.standard_normal(each.shape).astype(each.dtype) for each in model.inputs)
                for _ in range(4)
            ]
            expected = [model.reference.outputs(batch) for batch in batches]
            for workers in (1, 2, 3):
                for how, split in splits(model, workers):
                    planned = tvm_split.plan(model, cluster, split=split, stages=workers)
                    start = time.perf_counter()
                    bundle = tvm_split.compile(model, planned)
                    compile_seconds = time.perf_counter() - start
                    with tvm_split.deploy(bundle, cluster) as deployment:
                        results = list(deployment.stream(batches))
                    share = max(largest_difference(*each) for each in zip(results, expected, strict=True))
                    rows.append(
                        {
                            "model": name,
                            "workers": workers,
                            "split": how,
                            "stages": len(planned.stages),
                            "largest_difference_of_range": share,
                            "compile_seconds": compile_seconds,
                        }
                    )
                    console.print(
                        f"{name:18} {workers} workers, {how:9}: largest difference {share:.1e} of the range, "
                        f"compiled and verified in {compile_seconds:.1f} s"
                    )
    written(arguments.output, {"limit": LIMIT, "results": rows})
    worst = max(row["largest_difference_of_range"] for row in rows)
    console.print(f"worst {worst:.1e}, limit {LIMIT:.0e}")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
