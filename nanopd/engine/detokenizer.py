"""Detokenizer: token ids to text as they come, correct where a character or a stop string spans several tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders show for bytes that are no character, or not yet
MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes, and a token at least one


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


class Detokenizer:
    """The text of one growing sequence, and where its stop strings are.

    A token's text depends on its neighbours: a character's bytes may be spread over tokens, and some tokenizers put
    the space before a word only if a word precedes it. So the text of new tokens is what they add to the decoding of a
    short window that begins one emission earlier; a window that ends in the middle of a character waits for the rest.
    Each token is decoded a bounded number of times, however long the text is.

    ``text`` is what a client may see. It never includes a stop string, and while the sequence goes on it holds back an
    end that may turn out to be the beginning of one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._window = 0  # decode from this token ...
        self._emitted = 0  # ... and tokens before this one are in the text already
        self._text = ""
        self._num_held_back = 0
        self.stopped_by: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens seen."""
        return len(self._token_ids)

    @property
    def text(self) -> str:
        return self._text[: len(self._text) - self._num_held_back]

    def append(self, token_id: int) -> bool:
        """One more token. True: a stop string is complete and the text ends before it; later tokens are ignored."""
        if self.stopped_by is not None:
            return True
        self._token_ids.append(token_id)
        return self._extend(final=False)

    def finish(self) -> bool:
        """No token follows: emit what was held back, broken characters too. True: that completed a stop string."""
        if self.stopped_by is None:
            self._extend(final=True)
            self._num_held_back = 0
        return self.stopped_by is not None

    def _extend(self, final: bool) -> bool:
        decode, ids = self._tokenizer.decode, self._token_ids
        known = decode(ids[self._window : self._emitted])
        window = decode(ids[self._window :])
        end = len(ids)
        if not final and (window.endswith(REPLACEMENT) or len(window) <= len(known)):
            # In the middle of a character: wait. But a character that four more tokens did not complete is broken for
            # good; what stands before them is emitted, or a long run of such tokens would be decoded again and again.
            end -= MAX_CHARACTER_TOKENS
            before = decode(ids[self._window : end]) if end - self._emitted >= MAX_CHARACTER_TOKENS else None
            if before is None or not window.startswith(before):
                return False
            window = before
        self._window, self._emitted = self._emitted, end
        old_length = len(self._text)
        self._text += window[len(known) :]
        return self._find_stop(old_length)

    def _find_stop(self, old_length: int) -> bool:
        if not self._stop:
            return False
        text = self._text
        found = []
        for stop in self._stop:
            # A new match ends in the new text; so it begins at most len(stop) - 1 before it.
            position = text.find(stop, max(0, old_length - len(stop) + 1))
            if position >= 0:
                found.append((position, stop))
        if found:
            position, self.stopped_by = min(found)
            self._text = text[:position]
            self._num_held_back = 0
            return True
        self._num_held_back = max(_overlap(text, stop) for stop in self._stop)
        return False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    length = min(len(stop) - 1, len(text))
    while length > 0:
        length = stop.rfind(text[-1], 0, length) + 1  # only where the last character fits; a stop string may be long
        if text.endswith(stop[:length]):
            return length
        length -= 1
    return 0
