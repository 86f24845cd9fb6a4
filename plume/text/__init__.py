"""Tokenizers: byte-level BPE, GPT-1's BPE, WordPiece, characters, bytes; train, encode, decode, save."""

from plume.text.folder import load_tokenizer
from plume.text.inspecting import inspect_table
from plume.text.tokenizer import Piece, Tokenizer
from plume.text.training import train_command, train_tokenizer

__all__ = ["Piece", "Tokenizer", "inspect_table", "load_tokenizer", "train_command", "train_tokenizer"]
