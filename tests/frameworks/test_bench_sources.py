"""The benchmark of sources, with the real packages."""

import json
from pathlib import Path

from scripts import bench


def test_every_source_has_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert bench.main(["sources", "--rounds", "1", "--json", str(path)]) == 0
    medians = json.loads(path.read_text())["subjects"]["mobilenet_v2"]["medians"]
    assert {name: figures["seconds"] > 0 for name, figures in medians.items()} == {"torch": True, "keras": True}
