"""onnxruntime on given cores, in a process of its own: a partner of `bench_overlap`.

``python -m scripts.onnxruntime_session MODEL.onnx INPUTS.npz THREADS CORE,CORE``
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import onnxruntime

from scripts.partner import answer_requests


def main(path: str, inputs: str, threads: str, cores: str) -> None:
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with np.load(inputs) as arrays:
        feed = {each.name: arrays[name] for each, name in zip(session.get_inputs(), arrays.files, strict=True)}
    session.run(None, feed)

    def answer(seconds: float) -> dict[str, float]:
        """Runs one input after another for so long."""
        start, count = time.perf_counter(), 0
        while not count or time.perf_counter() - start < seconds:
            session.run(None, feed)
            count += 1
        return {"per_second": count / (time.perf_counter() - start)}

    answer_requests(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
