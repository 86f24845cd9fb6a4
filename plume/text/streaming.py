"""Text from ids that come one at a time, never with a part of a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plume.text.tokenizer import Tokenizer


class Streamer:
    """Takes ids, gives text; all of it together is what `decode` gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.first = True
        self.space = ""  # GPT-1: the space after a word, held until another token follows

    def push(self, id: int) -> str:
        """The text that this token completes; it may be empty."""
        piece = self.tokenizer.piece_bytes(id)
        if self.first and self.tokenizer.kind == "wordpiece":
            piece = self.tokenizer.first_piece(id)
        self.first = False
        text = self.space + self.utf8.decode(piece)
        self.space = " " if self.tokenizer.kind == "gpt1-bpe" and text.endswith(" ") else ""
        return text.removesuffix(" ") if self.space else text

    def flush(self) -> str:
        """What is left at the end: a replacement mark for a character that never came whole."""
        return self.utf8.decode(b"", final=True)


class LibraryStreamer(Streamer):
    """The same for a tokenizer whose decoder only the library knows: decode all, give out what is new."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.ids: list[int] = []
        self.given = ""

    def push(self, id: int) -> str:
        self.ids.append(id)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(self.given):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self.tokenizer.decode(self.ids))

    def _give(self, text: str) -> str:
        new, self.given = text[len(self.given) :], text
        return new
