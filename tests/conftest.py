"""What holds for every test: nothing is fetched, the user's caches are left alone, and tests marked gpu skip without one."""

import os
import tempfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="tdasearch-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_collection_modifyitems(items):
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
