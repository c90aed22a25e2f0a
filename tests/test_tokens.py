"""Content to tokens, targets and windows, with real tokenizers built in code."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tdasearch.errors import ModelError, TdasearchError, UsageError
from tdasearch.records import Content
from tdasearch.tokens import Tokenised, UnusableContent, tokenise, tokenise_many, tokenizer_fingerprint, windows

SENTENCES = ["The capital of France is Paris.", "The capital of Italy is Rome.", "You are a helpful assistant.", "a b c d e f"]
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
GENERATION_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
CHAT = (
    {"role": "user", "content": "Where is Paris?"},
    {"role": "assistant", "content": "In France."},
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "In Italy."},
)


@cache
def build(*, bos: bool = False, eos: bool = False, trim: bool = False, template: str | None = None) -> Any:
    """A byte-level BPE tokenizer of about 300 tokens. trim: offsets without leading blanks, as GPT-2's older files have them."""
    core = Tokenizer(tokenizer_models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|turn|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=310, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim)]
    if bos or eos:
        pattern = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        steps.append(processors.TemplateProcessing(single=pattern, special_tokens=[("<s>", 0), ("</s>", 1)]))
    core.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|turn|>", "<|end|>"],
        chat_template=template,
    )


def target_text(tokenizer: Any, tokenised: Tokenised) -> str:
    return str(tokenizer.decode(tokenised.token_ids[tokenised.is_target], clean_up_tokenization_spaces=False))


def test_plain_text_is_tokenised_as_by_default_and_all_but_token_0_are_targets() -> None:
    tokenizer = build()
    text = SENTENCES[0]
    tokenised = tokenise(tokenizer, Content(text))
    assert tokenised.token_ids.tolist() == tokenizer(text)["input_ids"]
    assert tokenised.is_target.tolist() == [False] + [True] * (len(tokenised.token_ids) - 1)
    assert (tokenised.token_ids.dtype, tokenised.is_target.dtype, tokenised.char_end.dtype) == (np.int32, np.bool_, np.int64)
    assert tokenised.char_end[-1] == len(text)
    assert not tokenised.has_bos


def test_special_tokens_are_the_tokenizers_own() -> None:
    tokenizer = build(bos=True, eos=True)
    tokenised = tokenise(tokenizer, Content(" Paris.", prompt="The capital of France is"))
    assert tokenised.token_ids.tolist() == tokenizer("The capital of France is Paris.")["input_ids"]
    assert tokenised.token_ids[0] == 0 and tokenised.token_ids[-1] == 1 and tokenised.has_bos
    assert target_text(tokenizer, tokenised) == " Paris.</s>"
    assert tokenised.char_end[0] == 0 and tokenised.char_end[-1] == len(tokenised.text)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion", "targets"),
    [
        ("The capital of France is", " Paris", " Paris"),
        ("The capital of France is ", "Paris", " Paris"),  # the blank belongs to the completion's first token
        ("a", "\U0001f600", "\U0001f600"),  # four byte tokens of one character
        ("a", "b\U0001f600\U0001f600", "b\U0001f600\U0001f600"),
        ("\U0001f600", "b", "b"),
        ("\u6f22\u5b57", "\u304b\u306a", "\u304b\u306a"),
        ("e", "\u0301", "\u0301"),  # a combining accent alone
        ("a\r\n", "b\r\n", "b\r\n"),
        ("a", " ", " "),
        ("a", "\n\n", "\n\n"),
        ("", "ab", "b"),
        ("a", "\x00", "\x00"),
        ("a b", "\u2028c", "\u2028c"),
    ],
)
def test_targets_begin_with_the_token_that_holds_the_completions_first_character(
    prompt: str, completion: str, targets: str, trim: bool
) -> None:
    tokenizer = build(trim=trim)
    tokenised = tokenise(tokenizer, Content(completion, prompt=prompt))
    assert tokenised.text == prompt + completion
    assert target_text(tokenizer, tokenised) == targets


def test_a_normaliser_that_shortens_the_text_leaves_characters_of_the_original() -> None:
    core = Tokenizer.from_str(build().backend_tokenizer.to_str())
    core.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenised = tokenise(tokenizer, Content("e\u0301 b", prompt="e\u0301 a"))
    assert tokenised.char_end[-1] == len(tokenised.text) == 8
    assert target_text(tokenizer, tokenised) == "\u00e9 b"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (Content(""), "the text is empty|no tokens"),
        (Content("", prompt="a b"), "completion is empty"),
        (Content("a"), "single token"),
        (Content("a\ud800b"), "surrogate"),
    ],
)
def test_no_target_is_a_reason(content: Content, reason: str) -> None:
    with pytest.raises(UnusableContent, match=reason):
        tokenise(build(), content)
    assert issubclass(UnusableContent, TdasearchError)


def test_a_bos_token_lets_a_single_token_be_a_target() -> None:
    assert tokenise(build(bos=True), Content("a")).is_target.tolist() == [False, True]


def test_a_text_that_is_rendered_already_gets_no_second_bos() -> None:  # B12
    tokenizer = build(bos=True, template=PLAIN_TEMPLATE)
    rendered = tokenizer.apply_chat_template(list(CHAT), tokenize=False)
    tokenised = tokenise(tokenizer, Content(rendered))
    assert tokenised.token_ids.tolist() == tokenizer.apply_chat_template(list(CHAT), tokenize=True)["input_ids"]
    assert tokenised.token_ids.tolist().count(0) == 1


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, GENERATION_TEMPLATE])
def test_a_conversation_has_one_bos_and_the_templates_ids(template: str, bos: bool) -> None:  # B12
    tokenizer = build(bos=bos, template=template)
    tokenised = tokenise(tokenizer, Content(messages=CHAT))
    assert tokenised.token_ids.tolist() == tokenizer.apply_chat_template(list(CHAT), tokenize=True)["input_ids"]
    assert tokenised.token_ids.tolist().count(0) == 1 and tokenised.has_bos
    assert tokenised.text == tokenizer.apply_chat_template(list(CHAT), tokenize=False)


def test_assistant_turns_are_targets_with_and_without_generation_blocks() -> None:
    plain, marked = build(template=PLAIN_TEMPLATE), build(template=GENERATION_TEMPLATE)
    content = Content(messages=CHAT)
    assert target_text(plain, tokenise(plain, content)) == "In France.<|end|>\nIn Italy.<|end|>\n"
    assert target_text(marked, tokenise(marked, content)) == "In France.<|end|>In Italy.<|end|>"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, GENERATION_TEMPLATE])
def test_a_conversation_without_an_assistant_has_no_target(template: str) -> None:
    with pytest.raises(UnusableContent, match="assistant"):
        tokenise(build(template=template), Content(messages=CHAT[:1]))


def test_an_assistant_that_begins_needs_generation_blocks() -> None:
    content = Content(messages=CHAT[1:])
    with pytest.raises(UnusableContent, match="begins with the assistant"):
        tokenise(build(template=PLAIN_TEMPLATE), content)
    marked = build(template=GENERATION_TEMPLATE)
    assert target_text(marked, tokenise(marked, content)).startswith("In France.")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_cause() -> None:
    # As reasoning models do: what the assistant said before the last question is shortened.
    rewriting = PLAIN_TEMPLATE.replace("m['content']", "(m['content'] if loop.revindex < 3 else m['content'][:3])")
    with pytest.raises(UnusableContent, match=r"messages up to 2 differently once later ones.*generation"):
        tokenise(build(template=rewriting), Content(messages=CHAT))
    assert tokenise(build(template=rewriting), Content(messages=CHAT[:2])).is_target.any()
    no_prompt = PLAIN_TEMPLATE.replace("<|turn|>assistant\n", "something else")
    with pytest.raises(UnusableContent, match=r"before 2 \(or the generation prompt"):
        tokenise(build(template=no_prompt), Content(messages=CHAT))


def test_a_template_that_raises_is_a_reason() -> None:
    strict = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message first') }}{% endif %}" + PLAIN_TEMPLATE
    with pytest.raises(UnusableContent, match="a system message first"):
        tokenise(build(template=strict), Content(messages=CHAT))


def test_messages_that_were_rendered_already_are_refused() -> None:  # B12
    tokenizer = build(template=PLAIN_TEMPLATE)
    rendered = tokenizer.apply_chat_template(list(CHAT[:1]), tokenize=False)
    twice = ({"role": "user", "content": rendered}, CHAT[1])
    with pytest.raises(UnusableContent, match="message 1 begins with the special token '<s>'"):
        tokenise(tokenizer, Content(messages=twice))
    quoting = ({"role": "user", "content": "What does <s> mean?"}, CHAT[1])
    assert tokenise(tokenizer, Content(messages=quoting)).is_target.any()


def test_a_conversation_without_a_chat_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template"):
        tokenise(build(), Content(messages=CHAT))


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    for call in (lambda: tokenise(Slow(), Content("a b")), lambda: tokenizer_fingerprint(Slow())):
        with pytest.raises(ModelError, match="fast"):
            call()


def test_many_equals_one_at_a_time_whatever_the_neighbours() -> None:  # R9
    tokenizer = build(bos=True, template=PLAIN_TEMPLATE)
    contents = [
        Content("a b"),
        Content(""),
        Content(messages=CHAT),
        Content("x" * 5000),
        Content("<s>a"),
        Content("b", prompt="a"),
    ]
    for content, found in zip(contents, tokenise_many(tokenizer, contents), strict=True):
        if isinstance(found, UnusableContent):
            with pytest.raises(UnusableContent, match=str(found)):
                tokenise(tokenizer, content)
        else:
            alone = tokenise(tokenizer, content)
            assert alone.token_ids.tolist() == found.token_ids.tolist()
            assert alone.is_target.tolist() == found.is_target.tolist()
    assert tokenise_many(tokenizer, []) == []


def test_truncation_and_padding_of_an_earlier_call_change_nothing() -> None:  # B23
    tokenizer = build()
    content = Content("a b c d e f " * 50)
    ids, fingerprint = tokenise(tokenizer, content).token_ids.tolist(), tokenizer_fingerprint(tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["a b c d", "a"], truncation=True, padding=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    assert tokenise(tokenizer, content).token_ids.tolist() == ids


def test_windows_hold_the_tail_of_a_long_document() -> None:  # B23: 40 tokens into 32 positions, the end matters
    tokenizer = build()
    text = "a b c d e f " * 6 + "The capital of France is Paris."
    found = windows(tokenise(tokenizer, Content(text)), window_tokens=32, stride=24)
    assert len(found) > 1 and all(len(window.token_ids) <= 32 for window in found)
    assert text[found[-1].start : found[-1].end].endswith("Paris.")
    for window in found:
        assert tokenizer.decode(list(window.token_ids)) == text[window.start : window.end]


def test_a_prompt_that_fills_the_first_windows_leaves_only_those_with_targets() -> None:  # B05
    tokenised = tokenise(build(), Content(" Paris", prompt="a b c d e f " * 6))
    (window,) = windows(tokenised, window_tokens=16, stride=8, max_windows=1)
    assert window.number == window.num_windows - 1 > 0
    assert sum(window.is_target) == tokenised.is_target.sum()


def test_max_windows_cuts_the_list_and_the_targets_tell() -> None:
    tokenised = tokenise(build(), Content("a b c d e f " * 20))
    whole, cut = (windows(tokenised, window_tokens=16, stride=16, max_windows=limit) for limit in (None, 2))
    assert cut == whole[:2] and cut[0].num_windows == len(whole)
    assert sum(sum(window.is_target) for window in cut) < tokenised.is_target.sum()


def test_a_text_of_one_window_is_the_tokens_themselves() -> None:
    tokenised = tokenise(build(bos=True), Content("b", prompt="a "))
    (window,) = windows(tokenised, window_tokens=64, stride=64)
    assert list(window.token_ids) == tokenised.token_ids.tolist()
    assert list(window.is_target) == tokenised.is_target.tolist()
    assert (window.start, window.end, window.number, window.num_windows) == (0, len(tokenised.text), 0, 1)


@pytest.mark.parametrize(
    ("window_tokens", "stride", "max_windows"), [(1, 1, None), (0, 1, None), (8, 0, None), (8, 9, None), (8, -1, None), (8, 8, 0)]
)
def test_window_settings_out_of_range_are_usage_errors(window_tokens: int, stride: int, max_windows: int | None) -> None:
    with pytest.raises(UsageError, match="expected"):
        windows(tokenise(build(), Content("a b")), window_tokens=window_tokens, stride=stride, max_windows=max_windows)


@settings(deadline=None, max_examples=120)
@given(
    text=st.text(min_size=2, max_size=60),
    prompt=st.text(max_size=40),
    bos=st.booleans(),
    trim=st.booleans(),
    sizes=st.integers(2, 20).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size))),
)
def test_windows_tile_the_text_and_each_target_is_a_target_once(
    text: str, prompt: str, bos: bool, trim: bool, sizes: tuple[int, int]
) -> None:
    try:
        tokenised = tokenise(build(bos=bos, trim=trim), Content(text, prompt=prompt))
    except UnusableContent:
        return
    window_tokens, stride = sizes
    found = windows(tokenised, window_tokens=window_tokens, stride=stride)
    first, step = int(tokenised.has_bos), min(stride, window_tokens - 1)
    times = np.zeros(len(tokenised.token_ids), dtype=int)
    for window in found:
        begin = first + window.number * step
        body = list(window.token_ids)[first:]
        assert len(window.token_ids) == len(window.is_target) <= window_tokens
        assert body == tokenised.token_ids[begin : begin + len(body)].tolist()
        assert list(window.token_ids)[:first] == tokenised.token_ids[:first].tolist()
        assert any(window.is_target) and not window.is_target[0]  # nothing is before token 0 to predict it from
        times[begin : begin + len(body)] += np.array(window.is_target[first:], dtype=int)
        assert 0 <= window.start <= window.end <= len(tokenised.text)
    assert times.tolist() == tokenised.is_target.astype(int).tolist()
    # The same slices with every token wanted: none is left out, so they must cover the text.
    wanted = Tokenised(
        tokenised.text, tokenised.token_ids, np.ones_like(tokenised.is_target), tokenised.char_end, tokenised.has_bos
    )
    slices = windows(wanted, window_tokens=window_tokens, stride=stride)
    assert [window.number for window in slices] == list(range(slices[0].num_windows))
    assert slices[0].start == 0 and slices[-1].end == len(tokenised.text)
    for before, after in itertools.pairwise(slices):
        assert before.start <= after.start <= before.end <= after.end
        assert after.start == before.end or step < window_tokens - first
    assert {window.number: (window.start, window.end) for window in slices}.items() >= {
        (window.number, (window.start, window.end)) for window in found
    }


def test_fingerprint_survives_saving_and_tells_tokenizers_apart(tmp_path: Path) -> None:
    variants = [build(), build(bos=True), build(template=PLAIN_TEMPLATE), build(template=GENERATION_TEMPLATE)]
    prints = [tokenizer_fingerprint(tokenizer) for tokenizer in variants]
    assert len(set(prints)) == len(prints)
    for number, tokenizer in enumerate(variants):
        tokenizer.save_pretrained(tmp_path / str(number))
        assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path / str(number))) == prints[number]


def test_importing_tokens_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, tdasearch.tokens; print([m for m in ('torch', 'transformers', 'lancedb') if m in sys.modules])"
    root = Path(__file__).parents[1]
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert output.stdout.strip() == "[]"
