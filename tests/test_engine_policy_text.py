"""SamplingParams, and text that grows token by token: characters and stop strings that span tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanopd.engine.detokenizer import Detokenizer
from nanopd.engine.outputs import RequestMetrics
from nanopd.engine.request import Stamp
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import InvalidSamplingParamsError


class ByteTokenizer:
    """One token per byte; 256 is the end of the sequence and 257 another special token, both without text."""

    eos_token_ids = (256,)

    def __init__(self) -> None:
        self.num_decoded = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return bytes(t for t in token_ids if t < 256).decode("utf-8", errors="replace")


class WordTokenizer:
    """Words with a space before each but the first, as SentencePiece models decode."""

    eos_token_ids = ()
    words = ("in", "the", "beginning", "was", "stop", "word")

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[t] for t in token_ids)


def grow(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """The visible text after each token, up to the one that completes a stop string."""
    texts = []
    for token in token_ids:
        stopped = detokenizer.append(token)
        texts.append(detokenizer.text)
        if stopped:
            break
    return texts


# --- text ----------------------------------------------------------------------------------------------------------


def test_a_character_appears_when_its_last_byte_does() -> None:
    tokenizer = ByteTokenizer()
    assert grow(Detokenizer(tokenizer), tokenizer.encode("né€👍")) == [
        "n", "n", "né", "né", "né", "né€", "né€", "né€", "né€", "né€👍",
    ]  # fmt: skip


def test_space_before_a_word_survives() -> None:
    assert grow(Detokenizer(WordTokenizer()), [0, 1, 2]) == ["in", "in the", "in the beginning"]  # type: ignore


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=30).map(lambda s: list(s.encode())), st.lists(st.integers(0, 257), max_size=60)))
def test_text_only_grows_and_ends_as_the_whole_decodes(token_ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    texts = grow(detokenizer, token_ids)
    detokenizer.finish()
    for before, after in zip(texts, [*texts[1:], detokenizer.text], strict=True) if texts else []:
        assert after.startswith(before)
    assert detokenizer.text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("token", [0x80, 0xE2, 256, ord("a")])
def test_decoding_work_is_linear_whatever_the_tokens(token: int) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    grow(detokenizer, [token] * 1000)
    assert tokenizer.num_decoded < 60 * 1000


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abé€", max_size=30),
    st.lists(st.text(alphabet="abé€", min_size=1, max_size=5), min_size=1, max_size=3),
)
@example("xab", ["b", "ab"])
@example("xab", ["ab", "b"])
def test_stop_strings(text: str, stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, stop)
    texts = grow(detokenizer, tokenizer.encode(text))
    detokenizer.finish()
    # Where the first stop string is complete; if several are at once, the one that begins first counts.
    ends = [text.find(s) + len(s) for s in stop if s in text]
    complete = [text.find(s) for s in stop if s in text and text.find(s) + len(s) == min(ends)]
    expected = text[: min(complete)] if complete else text
    assert detokenizer.text == expected
    assert all(expected.startswith(shown) for shown in texts), "a part of the stop string was shown"
    assert (detokenizer.stopped_by is not None) == bool(complete)


def test_stop_string_is_hidden_while_it_may_be_coming_and_shown_if_it_does_not() -> None:
    detokenizer = Detokenizer(WordTokenizer(), ["stop word"])  # type: ignore[arg-type]
    assert grow(detokenizer, [3, 4]) == ["wa", "was "]  # the s of "was" might have been its first letter
    assert detokenizer.append(0) is False
    assert detokenizer.text == "was stop in"
    assert grow(detokenizer, [4, 5, 0]) == ["was stop in ", "was stop in "]
    assert detokenizer.stopped_by == "stop word"


def test_held_back_text_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["ab"])
    grow(detokenizer, [ord("x"), ord("a")])
    assert detokenizer.text == "x"
    assert detokenizer.finish() is False and detokenizer.text == "xa"


# --- parameters ----------------------------------------------------------------------------------------------------


def test_defaults_and_normalisation() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert params.stop == ("end",) and params.stop_token_ids == (3, 4) and not params.greedy
    assert SamplingParams(temperature=0, max_tokens=0, stop=["a", "b"]).greedy  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=(3, 4)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", True), ("n", 1.0), ("n", None),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", True), ("temperature", "1"),
        ("top_k", -1), ("top_k", False), ("top_k", 2.5),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", True),
        ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("seed", True),
        ("max_tokens", -1), ("max_tokens", True), ("max_tokens", None),
        ("stop", ""), ("stop", ("a", "")), ("stop", (1,)), ("stop", 5),
        ("stop_token_ids", (-1,)), ("stop_token_ids", (True,)), ("stop_token_ids", 3), ("stop_token_ids", "3"),
        ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=name.split("_")[0]):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_the_message_names_value_and_limit() -> None:
    with pytest.raises(InvalidSamplingParamsError, match=r"top_p must be in \(0.0, 1.0\], got 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidSamplingParamsError, match=r"n must be in \[1, 65536\], got 0"):
        SamplingParams(n=0)


# --- metrics -------------------------------------------------------------------------------------------------------


def stamps(arrived: float, start: float, tokens: list[float], end: float, cached: int = 0) -> list[Stamp]:
    return [
        Stamp(arrived, "arrived", 5),
        Stamp(arrived + 0.25, "waiting"),
        Stamp(start, "prefilling", cached),
        *(Stamp(t, "token", 1) for t in tokens),
        Stamp(end, "finished"),
    ]


def test_metrics_follow_from_the_stamps() -> None:
    metrics = RequestMetrics.from_stamps([stamps(1.0, 2.0, [4.0, 7.0, 8.0], 8.0, cached=3)])
    assert (metrics.ttft, metrics.queue_time, metrics.latency) == (3.0, 1.0, 7.0)
    assert (metrics.tpot, metrics.second_token_gap) == (2.0, 3.0)
    assert metrics.itls == (3.0, 1.0)
    assert (metrics.num_output_tokens, metrics.num_cached_tokens, metrics.num_preemptions) == (3, 3, 0)


def test_metrics_of_what_did_not_happen_are_none() -> None:
    one = RequestMetrics.from_stamps([stamps(1.0, 2.0, [4.0], 4.0)])
    assert one.tpot is None and one.second_token_gap is None and one.itls == () and one.ttft == 3.0
    none = RequestMetrics.from_stamps([[Stamp(1.0, "arrived"), Stamp(1.0, "waiting"), Stamp(5.0, "finished")]])
    assert none.ttft is None and none.queue_time is None and none.latency == 4.0


def test_metrics_of_several_samples() -> None:
    samples = [stamps(1.0, 2.0, [4.0, 6.0], 6.0), stamps(1.0, 3.0, [5.0, 9.0], 9.0)]
    metrics = RequestMetrics.from_stamps(samples)
    assert (metrics.ttft, metrics.tpot, metrics.latency, metrics.num_output_tokens) == (3.0, 3.0, 8.0, 4)
    assert metrics.itls == (2.0, 4.0)
