"""The benchmark of speed runs, and its table has every row; what it measured is not looked at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "benchmarks"


@pytest.mark.slow
def test_build_speed_runs(tmp_path):
    found = tmp_path / "found.json"
    options = "--without-peers --model neox14m --documents 8 --fit-documents 2 --training-batches 1 --repeats 1 --json"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent.parent)}
    subprocess.run([sys.executable, FOLDER / "build_speed.py", *options.split(), found], env=environment, check=True)
    rows = {row["name"]: row for row in json.loads(found.read_text())["neox14m"]}
    assert rows["forward and backward"]["ratios"] == [1.0]
    for plan in ("default plan", "fastest plan"):
        assert rows[f"encode, {plan}"]["recall"]["2 percent"] > 0
        build = rows[f"build, {plan}"]
        *parts, at_the_default_fit = build["parts"].values()
        assert sum(parts) == pytest.approx(build["ratios"][0])
        assert at_the_default_fit < build["ratios"][0]


def test_a_peer_that_is_not_there_is_a_row_that_says_so(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import argparse

    import build_speed

    rows = build_speed.measure_peer("bergson", "neox14m", argparse.Namespace(peers="/nowhere/python", documents=8, repeats=1))
    assert "No such file" in str(rows[0])
