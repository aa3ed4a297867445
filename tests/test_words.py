"""Words by which programs that share a row tell each other its sums: whose they are."""

from __future__ import annotations

import pytest
import torch

from transformer_engine_fl.backends import _words

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nobodys_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has launched nothing."""
    monkeypatch.setattr(_words, "_of_streams", {})


def on_stream(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    monkeypatch.setattr(_words, "_stream", lambda device: number)


def test_no_two_launches_of_a_stream_have_a_turn_in_common() -> None:
    turns = [7, 1, 30]
    firsts = [_words.words_of(CPU, 4, many)[0] for many in turns]
    assert firsts == [1, 8, 9]


def test_words_of_a_stream_are_cleared_once_and_shared_by_its_launches() -> None:
    _, words = _words.words_of(CPU, 4, 1)
    assert words.dtype == torch.int64
    assert not words.any()
    words.fill_(5)
    assert _words.words_of(CPU, 100, 1)[1] is words


def test_each_stream_has_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for stream in (3, 4, 3):
        on_stream(monkeypatch, stream)
        found.append(_words.words_of(CPU, 4, 2))
    assert [first for first, _ in found] == [1, 1, 3]
    assert found[0][1] is found[2][1] is not found[1][1]


def test_a_graph_has_words_of_its_own_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch, None)
    (first, words), (other_first, other_words) = (_words.words_of(CPU, 4, 9) for _ in range(2))
    assert first == other_first == 1
    assert words is not other_words
    assert words.numel() == 4 * _words.TURNS * _words.SUMS
    assert not _words._of_streams


def test_there_are_as_many_words_as_the_largest_grid_needs() -> None:
    _, few = _words.words_of(CPU, 4, 1)
    programs = few.numel()
    _, many = _words.words_of(CPU, programs, 1)
    assert many.numel() == programs * _words.TURNS * _words.SUMS
    assert not many.any()
    assert _words.words_of(CPU, 4, 1)[1] is many


def test_turns_begin_again_on_cleared_words_when_no_word_could_hold_the_next() -> None:
    _, words = _words.words_of(CPU, 4, _words.MOST_TURNS - 10)
    words.fill_(5)
    first, same = _words.words_of(CPU, 4, 5)
    assert (first, same) == (_words.MOST_TURNS - 9, words)
    assert first + 5 <= 2**31
    first, other = _words.words_of(CPU, 4, 6)
    assert first == 1
    assert other is not words
    assert not other.any()
