import json
import platform
import sys


def test_what_is_packed_is_told(invoke, invoke_json, tmp_path):
    report = invoke_json("worker-kit", tmp_path / "kit")
    assert (report["device"], report["architecture"]) == ("cpu", platform.machine())
    assert report["python"] == ".".join(map(str, sys.version_info[:2]))
    assert report["size_bytes"] == sum(part["size_bytes"] for part in report["parts"])
    names = {part["name"] for part in report["parts"]}
    assert {"tvm-split", "apache-tvm", "numpy", "grpcio"} <= names
    assert json.loads((tmp_path / "kit/kit.json").read_text())["packages"].keys() == names
    result = invoke("worker-kit", tmp_path / "kit.tar", "--architecture", platform.machine())
    assert "apache-tvm" in result.stdout
    assert "packed: " in result.stdout


def test_wrong_options(invoke, tmp_path):
    for options, expected in (
        (["--python", "3.9"], "error: --python: "),
        (["--device", "metal"], "error: --device: "),
        (["--architecture", "riscv64"], "error: --architecture: "),
    ):
        assert expected in invoke("worker-kit", tmp_path / "kit", *options, code=2).stderr
    assert "exists already" in invoke("worker-kit", tmp_path, code=1).stderr
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in invoke("worker-kit", tmp_path / "link", code=1).stderr
    assert "/proc/kit cannot be written: " in invoke("worker-kit", "/proc/kit", code=1).stderr
    assert "has a name before" in invoke("worker-kit", tmp_path / ".tar.gz", code=1).stderr
