"""TensorBoard's profile plugin lists its tools for a trace, and shows as many events."""

import json
import subprocess

from rpc_runtime.program.events import WINDOW
from tests.viewers.lab import FOLDER, Run

SCRIPT = """
import glob, json, sys
from xprof.convert import raw_to_tool_data as convert
paths = sorted(glob.glob(sys.argv[1] + "/plugins/profile/*/*.xplane.pb"))
tools = list(convert.xspace_to_tool_names(paths))
shown, _ = convert.xspace_to_tool_data(paths, "trace_viewer@", {"trace_viewer_options": {}})
events = [event for event in json.loads(shown)["traceEvents"] if event.get("ph") == "X"]
print(json.dumps({"tools": tools, "events": len(events)}))
"""


def test_resnet_on_two_workers(run: Run) -> None:
    run.trace.save(run.folder / "run.xplane")
    command = [str(FOLDER / "tensorboard" / "bin" / "python"), "-c", SCRIPT, str(run.folder / "run.xplane")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shown = json.loads(ended.stdout.splitlines()[-1])
    assert any(tool.startswith("trace_viewer") for tool in shown["tools"])
    assert shown["events"] == sum(event.kind != WINDOW for event in run.trace)
