"""The command line: a thin skin over the library, same verbs. A table on a terminal, one JSON object a line when piped.

Nothing heavy is imported here at the top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from tdasearch.errors import TdasearchError, UsageError

_LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}  # to some readers of lines, not to JSON
_LEFT_OUT = {"skipped": "rows skipped", "duplicates": "duplicates", "truncated": "documents cut at --max-windows"}


class _Failure(click.ClickException):
    """An error as one line: exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class _Misuse(_Failure):
    """A wrong request: exit status 2."""

    exit_code = 2


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise _Misuse(str(error)) from error
    except TdasearchError as error:
        raise _Failure(str(error)) from error
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "tdasearch"
        raise _Misuse(f"{error.format_message().rstrip('.')}; see {command} --help") from error


class _Commands(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            writes = ctx.invoked_subcommand in ("build", "add")
            kept = " What was committed is kept: run the same command again to go on." if writes else ""
            click.echo(f"\nStopped.{kept}", err=True)
            ctx.exit(130)


def _show_warning(message: Warning | str, *_: object) -> None:
    click.echo("Warning: " + " ".join(str(message).split()), err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tdasearch")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Which training documents made the model say that?"""
    ctx.with_resource(warnings.catch_warnings())
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


_corpus_options = _options(
    click.option(
        "--id-field", default="id", show_default=True, help="Field with the document's id; missing: a hash of its content."
    ),
    click.option("--text-field", default="text", show_default=True, help="Field with the text."),
    click.option("--prompt-field", default="prompt", show_default=True, help="Field with a prompt, which is context only."),
    click.option(
        "--completion-field", default="completion", show_default=True, help="Field with the completion that the loss is taken on."
    ),
    click.option("--messages-field", default="messages", show_default=True, help="Field with a conversation."),
    click.option("--strict", is_flag=True, help="Stop at the first bad row instead of reporting it."),
)
_quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
_device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, ...")
_model_option = click.option("--model", help="The model, where it is no longer where the index was built with it.")
_json_option = click.option("--json", "as_json", is_flag=True, help="JSON even on a terminal.")


def _number_or_all(_: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "all":
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"expected a number or 'all', found {value!r}", param=parameter) from None


def _must_be_set(_: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value:
        raise click.UsageError(f"expected what to explain, found nothing; say {parameter.opts[-1]}")


@main.command(short_help="Build an index over a corpus.")
@click.argument("corpus")
@click.option("--model", required=True, help="Hub id or folder of the causal language model.")
@click.option("--index", "path", required=True, help="Folder of the new index.")
@click.option("--method", default="ekfac", show_default=True, help="ekfac or kfac.")
@click.option("--budget", default="1KB", show_default=True, help="Bytes a document (a row of the index).")
@click.option("--code", default="1bit", show_default=True, help="1bit, fp16 or fp32.")
@click.option(
    "--modules", multiple=True, metavar="PATTERN", help="Cover modules of this name, such as '*.mlp.*'; may be given again."
)
@click.option(
    "--kinds", multiple=True, metavar="KIND", help="Cover layers of this kind: norm, embedding, ...; may be given again."
)
@click.option("--blocks", metavar="RANGE", help="Cover these transformer blocks: 22:30, -8:, 3. [default: all]")
@click.option(
    "--eigenbasis-share", type=float, help="Share of each eigenbasis that is kept. [default: a quarter, or more if it fits]"
)
@click.option(
    "--window", "window_tokens", type=int, help="Longest run of tokens that is one row. [default: 1024, or the context]"
)
@click.option("--stride", type=int, help="Tokens from one window to the next. [default: 7/8 of the window]")
@click.option("--max-windows", type=int, help="At most so many windows a document; cut documents are counted.")
@click.option("--fisher", default="sampled", show_default=True, help="Targets of the factors: sampled or empirical.")
@click.option(
    "--fit-documents", callback=_number_or_all, metavar="N|all", help="Documents to fit on. [default: 1/20, 1000 to 20000]"
)
@click.option("--damping-scale", default=0.1, show_default=True, help="Damping, in mean eigenvalues of the module.")
@click.option("--seed", default=0, show_default=True, help="Of the sample, the sampled targets and the sketch.")
@click.option("--shard-documents", default=256, show_default=True, help="Documents written in one commit.")
@click.option("--batch-tokens", default=2048, show_default=True, help="Tokens run at once, at most.")
@click.option("--memory", help="What the process may use, such as 8GB: fewer tokens at once if need be. [default: no bound]")
@click.option("--dtype", default="float32", show_default=True, help="Type of the weights.")
@_device_option
@_corpus_options
@_quiet_option
def build(
    corpus: str,
    model: str,
    path: str,
    modules: tuple[str, ...],
    id_field: str,
    text_field: str,
    prompt_field: str,
    completion_field: str,
    messages_field: str,
    **options: Any,
) -> None:
    """Build an index over CORPUS: a JSONL, Parquet or CSV file, or a folder of them or of .txt and .md files.

    A build that was stopped goes on when the same command is run again.
    """
    from tdasearch.api import build_index

    fields = _fields(id_field, text_field, prompt_field, completion_field, messages_field)
    index = build_index(corpus, model=model, path=path, modules=modules, fields=fields, **options)
    if not options["quiet"]:
        _summarise(index.info(), path, added=False)


@main.command(short_help="Add documents to an index.")
@click.argument("path")
@click.argument("corpus")
@_model_option
@_device_option
@_corpus_options
@_quiet_option
def add(
    path: str,
    corpus: str,
    model: str | None,
    device: str,
    id_field: str,
    text_field: str,
    prompt_field: str,
    completion_field: str,
    messages_field: str,
    strict: bool,
    quiet: bool,
) -> None:
    """Add the documents of CORPUS to the index PATH; those it holds already are not added twice."""
    from tdasearch.api import open_index

    index = open_index(path, model=model, device=device)
    index.add(
        corpus, fields=_fields(id_field, text_field, prompt_field, completion_field, messages_field), strict=strict, quiet=quiet
    )
    if not quiet:
        _summarise(index.info(), path, added=True)


@main.command(short_help="Find the documents behind an output.")
@click.argument("path")
@click.option("--prompt", default="", help="The text before the output: context only.")
@click.option("--completion", required=True, help="The output to explain; usually begins with a space.")
@click.option("-k", "k", default=10, show_default=True, help="Documents wanted.")
@click.option("--where", help="SQL filter on the metadata, such as \"source = 'wiki'\".")
@click.option(
    "--rescore", default="200", show_default=True, callback=_number_or_all, metavar="N|all|0", help="Windows to score exactly."
)
@click.option("--opponents", is_flag=True, help="The other end: documents that speak against the output.")
@click.option("--score", default="influence", show_default=True, help="influence or cosine.")
@_model_option
@_device_option
@_json_option
def search(
    path: str,
    prompt: str,
    completion: str,
    k: int,
    where: str | None,
    rescore: int | str,
    opponents: bool,
    score: str,
    model: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Find the documents in the index PATH that made the model say COMPLETION after PROMPT."""
    from tdasearch.api import open_index

    index = open_index(path, model=model, device=device)
    hits = index.search(prompt, completion, k=k, where=where, rescore=rescore, score=score, opponents=opponents, quiet=False)
    rows = [asdict(hit) for hit in (hits.opponents if opponents else hits.proponents)]
    if as_json or not sys.stdout.isatty():
        _print_json(rows)
        return
    from tdasearch.tables import print_hits

    print_hits(rows, title="Opponents" if opponents else "Proponents", loss=hits.loss, num_targets=hits.num_targets)


@main.command(short_help="Describe an index.")
@click.argument("path")
@_json_option
def info(path: str, as_json: bool) -> None:
    """Describe the index PATH: what it holds, how it was made, what it covers."""
    from tdasearch.api import open_index

    described = open_index(path).info()
    if as_json or not sys.stdout.isatty():
        _print_json([described])
        return
    from tdasearch.tables import print_info

    print_info(described)


@main.command(short_help="Explain what an index costs.")
@click.argument("path")
@click.option(
    "--costs",
    is_flag=True,
    expose_value=False,
    callback=_must_be_set,
    help="How gradients of each module are computed on this machine, and predicted times.",
)
@click.option("--batch-tokens", default=2048, show_default=True, type=click.IntRange(min=1), help="Tokens run at once.")
@_device_option
@_json_option
def explain(path: str, batch_tokens: int, device: str, as_json: bool) -> None:
    """Explain how the gradients of the index PATH are computed here: the routes that the cost model chooses.

    Factored: what the gradient is made of is rotated or paired first; dense: the gradient is formed first.
    """
    from tdasearch.api import open_index

    rows = open_index(path, device=device).explain_costs(batch_tokens=batch_tokens)
    if as_json or not sys.stdout.isatty():
        _print_json(rows)
        return
    from tdasearch.tables import print_costs

    print_costs(rows)


@main.command(short_help="Show it on a real corpus and model, in minutes.")
@click.option("--folder", default="tdasearch-demo", show_default=True, help="Where the model, the corpus and the index go.")
@click.option("--seed", default=0, show_default=True, help="Of the altered facts.")
@_quiet_option
def demo(folder: str, seed: int, quiet: bool) -> None:
    """Alter facts in a real corpus, train a real model on it, and trace what it then says back to the altered documents."""
    from tdasearch.demo.run import run

    run(folder, seed=seed, quiet=quiet)


def _fields(document_id: str, text: str, prompt: str, completion: str, messages: str) -> Any:
    from tdasearch.indexer.readers import Fields

    return Fields(document_id=document_id, text=text, prompt=prompt, completion=completion, messages=messages)


def _print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        click.echo(json.dumps(row, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS))


def _summarise(described: Mapping[str, Any], path: str, *, added: bool) -> None:
    corpus = described["corpus"][-1]
    left_out = [f"{what}: {corpus[f'num_{key}']}" for key, what in _LEFT_OUT.items() if corpus[f"num_{key}"]]
    there = f"documents: {described['documents']}, windows: {described['windows']} of {described['bytes_per_document']} bytes"
    new = f"added: {corpus['num_documents']}, now " if added else ""
    click.echo(f"{path}: {new}{', '.join([there, *left_out])}", err=True)
    if described["skipped_path"] and left_out:
        click.echo(f"What was left out, and why: {described['skipped_path']}", err=True)
    if not added:
        click.echo(f"Ask it: tdasearch search {shlex.quote(path)} --prompt '...' --completion ' ...'", err=True)
