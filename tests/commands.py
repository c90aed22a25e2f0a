"""Runs of the command line: in this process, or in one of its own that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner, Result

# A process that has imported the heavy packages, but not tdasearch, and forks: a run then costs a second, not ten.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "transformers", "transformers.models.gpt2.modeling_gpt2", "pyarrow.parquet", "lancedb"])
_EXPECTED_WARNING = "ignore:lancedb fork support is experimental"  # of a fork amid work; the server is idle


def run(*arguments: object) -> Result:
    """Run a command in this process; what it raises but a clean exit is a failure of the test."""
    from tdasearch.cli import main

    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="tdasearch")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{arguments}: a traceback instead of a message") from result.exception
    return result


def rows(*arguments: object) -> list[dict[str, Any]]:
    """The JSON objects that a command prints, read strictly; it must succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in result.stdout.splitlines()]


def error(*arguments: object, status: int) -> str:
    """The one line that a command fails with."""
    result = run(*arguments)
    assert result.exit_code == status, (arguments, result.exit_code, result.stdout, result.stderr)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.stderr.splitlines()[-1:] == lines, result.stderr  # one, and the last: nothing but progress before it
    return lines[0]


def on_a_terminal(folder: Path, *arguments: object) -> str:
    """What a command shows on a terminal of 80 columns, colours left out; it must succeed."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    running = Running(folder, *arguments, output=Path(os.ttyname(theirs)))
    shown = b""
    while running.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert running.end() == 0, shown
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown.decode("utf-8"))


class Running:
    """A command in a process of its own.

    Args:
        folder: A folder for files of its own.
        arguments: Of the command.
        output: Where its output is written, in place of a file in ``folder``.
    """

    def __init__(self, folder: Path, *arguments: object, output: Path | None = None) -> None:
        self._output = output or folder / "output.txt"
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        with mock.patch.dict(os.environ, {"PYTHONWARNINGS": _EXPECTED_WARNING}):
            forkserver.ensure_running()
        self._process = _FORKS.Process(target=_child, args=([str(argument) for argument in arguments], self._output, ready))
        self._process.start()
        self.wait_for(ready.exists)
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_for(self, condition: Callable[[], object], *, seconds: float = 120) -> None:
        """Return as soon as a condition holds; the process must live until then."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.is_alive() or condition(), self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.001)

    def kill(self) -> bool:
        """End it at once; return whether it was still at work."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode == -signal.SIGKILL

    def interrupt(self) -> int | None:
        """What Ctrl-C does."""
        os.kill(self.pid, signal.SIGINT)
        return self.end()

    def end(self, *, seconds: float = 120) -> int | None:
        """Wait for its end; return its exit status."""
        self._process.join(seconds)
        return self._process.exitcode


def _child(arguments: list[str], output: Path, ready: Path) -> None:
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    import tdasearch.indexer.build  # noqa: F401 (the clock starts when all is imported)
    from tdasearch.cli import main

    ready.touch()
    main(arguments, prog_name="tdasearch")
