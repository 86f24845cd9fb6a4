"""Tokenizers: byte-level BPE, GPT-1's BPE, WordPiece, characters, bytes; train, encode, decode, save."""

from plume.text.folder import load_tokenizer
from plume.text.tokenizer import Piece, Tokenizer

__all__ = ["Piece", "Tokenizer", "load_tokenizer"]
