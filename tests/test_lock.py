"""One writer at a time, and none that a dead process keeps out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tdasearch.errors import StoreError
from tdasearch.store.lock import writer_lock

HOLDER = """
import sys, time
from pathlib import Path
from tdasearch.store.lock import writer_lock
with writer_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_holder_is_named_and_its_death_frees_the_index(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match=rf"written by process {holder.pid} on .* since \d{{4}}-"), writer_lock(tmp_path):
            pytest.fail("two writers")
    finally:
        holder.kill()
        holder.communicate()
    with writer_lock(tmp_path), pytest.raises(StoreError, match=f"process {os.getpid()} "), writer_lock(tmp_path):
        pytest.fail("two writers")


def test_it_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writer_lock(tmp_path):
        raise KeyError
    with writer_lock(tmp_path):
        pass


def test_no_index_no_lock(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected the folder of an index"), writer_lock(tmp_path / "typo"):
        pytest.fail("no such folder")
    assert not (tmp_path / "typo").exists()
