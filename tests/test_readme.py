"""The README's code runs: its Python and its shell commands, on a tiny model in place of the one that the demo makes."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tdasearch.cli import main
from tests import models

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that looks like the one the demo leaves behind."""
    models.save_tiny("llama", tmp_path / "tdasearch-demo" / "finetuned")
    rows = [
        {"id": f"d{n}", "text": text, "country": "Jordan", "topic": ("people", "economy")[n % 2], "altered": n == 3}
        for n, text in enumerate(models.sentences(12))
    ]
    (tmp_path / "tdasearch-demo" / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_runs(folder, capsys):
    code = "\n".join(blocks("python"))
    assert code
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_commands_run(folder):
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[0] == "tdasearch"
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
        if words[1] in ("search", "info"):
            assert [json.loads(row) for row in result.stdout.splitlines()]


def test_every_command_is_in_the_readme_or_in_its_help():
    for name, command in main.commands.items():
        assert command.help, name
