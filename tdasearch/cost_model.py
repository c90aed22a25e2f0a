"""The cost model: which of two routes to the same numbers is faster here, from operation counts and four measured constants.

The constants (seconds per multiply-add of a large and of a small matrix product, seconds per byte moved, fixed seconds per call)
are measured when they are first needed, in a fraction of a second, and kept in ``tdasearch/cost_constants.json`` in the user's
cache folder ($XDG_CACHE_HOME, or ~/.cache), for each device, version of torch, number of threads and type. Delete the file, or
let any of these change, and they are measured again.

Routes differ by rounding, so the constants decide the last bits of a result, and nothing else. One machine decides alike in every
run while the file is kept; to rule the rounding out between machines, force a route where one can be given.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

Route = Literal["factored", "dense"]
ROUTES: tuple[Route, ...] = ("factored", "dense")

_FORMAT = 1
_SMALL_DIM = 32
_SMALL_PRODUCTS, _LARGE_DIM, _MOVED = {"cpu": 256, "gpu": 4096}, {"cpu": 384, "gpu": 2048}, {"cpu": 1 << 21, "gpu": 1 << 25}
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation does, counted.

    Attributes:
        multiply_adds: In matrix products.
        face_elements: The same, each product's divided by its shortest side: elements of the largest of its three matrices.
        moved_bytes: Read and written by elementwise operations.
        calls: Operations started.
    """

    multiply_adds: float = 0.0
    face_elements: float = 0.0
    moved_bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.multiply_adds + other.multiply_adds,
            self.face_elements + other.face_elements,
            self.moved_bytes + other.moved_bytes,
            self.calls + other.calls,
        )

    def times(self, number: float) -> Work:
        """Return this work done so many times."""
        return Work(self.multiply_adds * number, self.face_elements * number, self.moved_bytes * number, self.calls * number)


def product(batch: int, *sides: int) -> Work:
    """Count a batch of matrix products.

    Args:
        batch: Products.
        sides: The three sides of one: rows, summed, columns.

    Returns:
        Its work, in one call.
    """
    multiply_adds = batch * math.prod(sides)
    return Work(multiply_adds, multiply_adds / max(min(sides), 1), 0.0, 1.0)


def moved(num_bytes: float, *, calls: float = 1.0) -> Work:
    """Count elementwise operations that read and write so many bytes."""
    return Work(0.0, 0.0, num_bytes, calls)


@dataclass(frozen=True, slots=True)
class Constants:
    """What this machine takes, in seconds.

    Attributes:
        large_seconds: Per multiply-add of a large matrix product.
        small_seconds: Per multiply-add of a batched product of 32 x 32 matrices.
        byte_seconds: Per byte read or written by an elementwise operation.
        call_seconds: Per operation, however small.
    """

    large_seconds: float
    small_seconds: float
    byte_seconds: float
    call_seconds: float

    def seconds(self, work: Work) -> float:
        """Predict how long a computation takes.

        A product's time per multiply-add falls with its shortest side d as ``large + (small - large) * 32 / d``: each element
        of its largest matrix is used d times.

        Args:
            work: The computation.

        Returns:
            Seconds.
        """
        per_face_element = _SMALL_DIM * max(0.0, self.small_seconds - self.large_seconds)
        return (
            self.large_seconds * work.multiply_adds
            + per_face_element * work.face_elements
            + self.byte_seconds * work.moved_bytes
            + self.call_seconds * work.calls
        )


def cheaper(count: Callable[..., Work], *arguments: Any, device: torch.device, dtype: torch.dtype) -> Route:
    """Choose the route that is predicted to be faster; the factored one, which needs less memory, where they tie.

    Args:
        count: Counts the work of a route: called with ``arguments`` and the route.
        arguments: Hashable.
        device: Where it is computed.
        dtype: In which type.

    Returns:
        The route.
    """
    return _cheaper(count, arguments, constants(device, dtype))


@lru_cache(maxsize=1 << 12)
def _cheaper(count: Callable[..., Work], arguments: Sequence[Any], found: Constants) -> Route:
    return min(ROUTES, key=lambda route: found.seconds(count(*arguments, route)))


def constants(device: torch.device | str, dtype: torch.dtype) -> Constants:
    """Return the machine's constants: from this process, from the cache file, or measured now.

    Args:
        device: The device.
        dtype: The type of the matrices.

    Returns:
        The constants.
    """
    device = torch.device(device)
    return _constants(str(device), dtype, torch.get_num_threads() if device.type == "cpu" else 0)


@cache
def _constants(device: str, dtype: torch.dtype, num_threads: int) -> Constants:
    key = f"{device_name(device)}, torch {torch.__version__}, {num_threads} threads, {dtype}"
    path = cache_path()
    kept = _read(path)
    if key in kept:
        return kept[key]
    found = measure(device, dtype)
    _write(path, {**_read(path), key: found})  # read again: another process may have added to it
    return found


def cache_path() -> Path:
    """Where the constants are kept: in the user's cache folder, as the XDG base directory specification names it."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "tdasearch" / "cost_constants.json"


def device_name(device: torch.device | str) -> str:
    """Return the name of the hardware, such as "NVIDIA H200" or the processor's."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} {platform.machine()} of {os.cpu_count()} cores"


def _read(path: Path) -> dict[str, Constants]:
    """Read what is kept; what is broken, or of another format, counts as not there and will be measured again."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if rows["format"] != _FORMAT:
            return {}
        found = {str(key): Constants(**values) for key, values in rows["constants"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {key: values for key, values in found.items() if _plausible(values)}


def _plausible(found: Constants) -> bool:
    values = [getattr(found, field.name) for field in fields(found)]
    return all(isinstance(value, float) and 0.0 < value < 1.0 for value in values)


def _write(path: Path, found: dict[str, Constants]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "constants": {key: asdict(values) for key, values in found.items()}}, indent=1)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        warnings.warn(
            f"{path}: the machine's measured constants cannot be kept: {error}; they are measured in each run, and results may "
            "differ by rounding from run to run: set XDG_CACHE_HOME to a folder that can be written",
            stacklevel=2,
        )


def measure(device: torch.device | str, dtype: torch.dtype) -> Constants:
    """Measure the constants: the fastest of a few repeats each, as anything else that runs here only adds time.

    Args:
        device: The device.
        dtype: The type.

    Returns:
        The constants.
    """
    device = torch.device(device)
    kind = "cpu" if device.type == "cpu" else "gpu"

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=device, dtype=dtype)

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        num, dim = _SMALL_PRODUCTS[kind], _LARGE_DIM[kind]
        large, small, vector, tiny = ones(dim, dim), ones(num, _SMALL_DIM, _SMALL_DIM), ones(_MOVED[kind]), ones(4, 4)
        call = _fastest(lambda: tiny * tiny, device, calls=50)
        return Constants(
            large_seconds=_fastest(lambda: large @ large, device) / dim**3,
            small_seconds=_fastest(lambda: torch.bmm(small, small), device) / (num * _SMALL_DIM**3),
            byte_seconds=_fastest(lambda: vector * vector, device) / (3 * vector.numel() * vector.element_size()),
            call_seconds=call,
        )


def _fastest(run: Callable[[], object], device: torch.device, *, calls: int = 1) -> float:
    def synchronise() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    run()
    best = math.inf
    for _ in range(_REPEATS):
        synchronise()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        synchronise()
        best = min(best, (time.perf_counter() - started) / calls)
    return best
