"""Reading ahead, writing behind, batches that fit the memory."""

import threading
import time

import pytest
import torch

import tdasearch
from tdasearch.capture import Capture
from tdasearch.errors import UsageError
from tdasearch.indexer.memory import window_bytes
from tdasearch.indexer.overlap import Behind, ahead
from tdasearch.indexer.plan import memory_bytes
from tdasearch.language_model import LanguageModel, halved_if_too_big
from tdasearch.modules import choose_modules
from tests import models


def ids_of(index):
    return [row["document_id"] for batch in index.table.latest().batches(["document_id"]) for row in batch.to_pylist()]


def test_items_come_in_order_and_one_ahead():
    made = []

    def items():
        for n in range(4):
            made.append(n)
            yield n

    seen = []
    for item in ahead(items()):
        for _ in range(200):
            if len(made) > item + 1 or len(made) == 4:
                break
            time.sleep(0.01)
        seen.append((item, len(made)))
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_an_error_while_reading_is_raised_in_its_place():
    def items():
        yield 1
        raise OSError("disk")

    seen = []
    with pytest.raises(OSError, match="disk"):
        seen.extend(ahead(items()))
    assert not seen or seen == [1]
    threads = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("tdasearch-read") for name in threads)


def test_calls_run_in_order_in_the_background_and_are_done_at_the_end():
    done, gate = [], threading.Event()
    with Behind() as writer:
        writer.submit(lambda: (gate.wait(10), done.append(1)))
        assert not done
        gate.set()
        writer.submit(lambda: done.append(2))
    assert done == [1, 2]


@pytest.mark.parametrize("later", [0, 3])
def test_a_failed_write_is_raised_and_nothing_after_it_is_written(later):
    done = []

    def fail():
        raise OSError("full")

    with pytest.raises(OSError, match="full"), Behind(depth=5) as writer:
        writer.submit(fail)
        for _ in range(later):
            writer.submit(lambda: done.append(1))
    assert not done


def test_a_build_whose_write_fails_raises_and_goes_on_when_it_is_run_again(tmp_path, monkeypatch):
    from tdasearch.indexer import ledger

    model, tokenizer = models.tiny("llama")
    corpus = [{"id": f"d{n}", "text": text} for n, text in enumerate(models.sentences(20))]
    build = dict(model=model, tokenizer=tokenizer, path=tmp_path / "x.tda", fit_documents="all", shard_documents=4, quiet=True)
    write, calls = ledger.write_shard, []

    def failing(*args, shard, **options):
        calls.append(shard)
        if shard == 2:
            raise OSError("no space left")
        write(*args, shard=shard, **options)

    monkeypatch.setattr(ledger, "write_shard", failing)
    with pytest.raises(OSError, match="no space left"):
        tdasearch.build_index(corpus, **build)
    assert calls == [0, 1, 2]
    monkeypatch.undo()
    index = tdasearch.build_index(corpus, **build)
    assert index.manifest.corpus[0].num_documents == len(set(ids_of(index))) == 20


def test_a_batch_too_big_for_the_accelerator_is_run_in_halves():
    ran = []

    def run(rows):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("out of memory")
        ran.append(rows)

    halved_if_too_big(list(range(7)), run)
    assert sum(ran, []) == list(range(7))
    assert max(map(len, ran)) == 2
    with pytest.raises(torch.OutOfMemoryError):
        halved_if_too_big([1], lambda rows: run([1, 2, 3]))


def test_the_batch_fits_the_memory_that_is_stated(tmp_path, capsys):
    model, tokenizer = models.tiny("llama")
    corpus = [{"id": f"d{n}", "text": text} for n, text in enumerate(models.sentences(8))]
    build = dict(model=model, tokenizer=tokenizer, fit_documents="all")
    with pytest.raises(UsageError, match="expected at least .* GB .* found 0.49 GB"):
        tdasearch.build_index(corpus, path=tmp_path / "small.tda", memory="500MB", quiet=True, **build)
    ample = tdasearch.build_index(corpus, path=tmp_path / "ample.tda", memory="8GB", **build)
    assert "memory: 2,048 tokens at once" in capsys.readouterr().err
    assert len(ids_of(ample)) == 8


def test_the_tensors_of_a_pass_are_counted():
    model, tokenizer = models.tiny("llama")
    language_model = LanguageModel(model, tokenizer)
    with Capture(model, choose_modules(model).names) as capture:
        short, long = (window_bytes(language_model, capture, num_tokens=num) for num in (16, 32))
    width = 4 * 16 * (24 * 8 + 40 * 3)  # one layer's inputs of linear maps and the residual stream, at least
    assert 2 * width < short
    assert 1.8 < long / short < 4.2  # linear in the tokens, but for attention


@pytest.mark.parametrize(("text", "expected"), [("8GB", 8 << 30), ("1.5 gib", 3 << 29), ("512MB", 512 << 20), (1000, 1000)])
def test_amounts_of_memory(text, expected):
    assert memory_bytes(text) == expected


@pytest.mark.parametrize("text", ["much", "-1GB", "8 PB", ""])
def test_wrong_amounts_of_memory(text):
    with pytest.raises(UsageError, match="memory: expected"):
        memory_bytes(text)
