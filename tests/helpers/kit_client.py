"""Run a bundle of one machine on a kit's worker in an empty root, in namespaces without a network.

``python -m tests.helpers.kit_client ROOT KIT BUNDLE INPUTS`` writes the first output of every micro-batch in INPUTS
(``.npy``) as JSON, and ends the worker.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import tvm_split
from tests.helpers.empty_root import command_in_root, python_in_root
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cli.source import load_tvm

TOKEN = "open-sesame"


def main() -> None:
    load_tvm()
    root, kit, folder, inputs = map(Path, sys.argv[1:])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=20)
    bundle = tvm_split.Bundle.load(folder)
    (machine,) = bundle.program.machines
    options = ["--listen", "127.0.0.1:0", "--name", machine, "--cache", "/tmp/blobs", "--json"]
    worker = subprocess.Popen(
        command_in_root(root, kit, [python_in_root(), "/kit", *options]),
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TVM_SPLIT_TOKEN": TOKEN},
    )
    try:
        assert worker.stdout is not None
        ready = json.loads(worker.stdout.readline())
        cluster_file = Path(str(folder) + ".json")
        (cluster_file.parent / "token").write_text(TOKEN)
        machines = [{"name": machine, "address": ready["address"], "token_file": "token"}]
        cluster_file.write_text(json.dumps({"machines": machines}))
        batches = np.load(inputs)
        with tvm_split.deploy(bundle, tvm_split.Cluster.from_yaml(cluster_file)) as deployment:
            outputs = [results[0].tolist() for results in deployment.stream([(batch,) for batch in batches])]
    finally:
        worker.terminate()
        code = worker.wait(PATIENCE_SECONDS)
    print(json.dumps({"outputs": outputs, "code": code}))


if __name__ == "__main__":
    main()
