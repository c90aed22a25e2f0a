"""Reading ahead and writing behind: the disk works while the model computes.

One thread each, with a bounded number of items under way, so that memory stays bounded and the order stays what it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Make the next item while the caller is busy with this one.

    Args:
        items: Made in a thread of their own, one ahead.

    Yields:
        The items, in order; an error while making one is raised in its place.
    """
    made = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="tdasearch-read") as thread:
        coming = thread.submit(next, made, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, made, _END)
            yield item  # type: ignore[misc]  # not _END


class Behind:
    """Context whose calls run in the background, one after another, in order.

    Whatever was submitted has run when the context ends, even if it ends by an error. A call that failed raises at the next
    ``submit`` or at the end, and what was submitted after it does not run: a later shard is never written before an earlier one.

    Args:
        depth: Calls under way at most; a further ``submit`` waits.
    """

    def __init__(self, *, depth: int = 1) -> None:
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tdasearch-write")
        self._pending: deque[Future[None]] = deque()
        self._failed = False

    def __enter__(self) -> Behind:
        return self

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call in the background; raises what an earlier one raised."""
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._run, call))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()
        for pending in self._pending:
            failure = pending.exception()
            if failure is not None and error is None:
                raise failure

    def _run(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except BaseException:
            self._failed = True
            raise
