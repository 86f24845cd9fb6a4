"""Tokenizers: byte-level BPE, GPT-1's BPE, WordPiece, characters, bytes; train, encode, decode, save."""

from plume.text.tokenizer import Piece, Tokenizer, inspect_table
from plume.text.tokenizer_folder import load_tokenizer, tokenizer_of_model
from plume.text.tokenizer_training import train_command, train_tokenizer

__all__ = [
    "Piece",
    "Tokenizer",
    "inspect_table",
    "load_tokenizer",
    "tokenizer_of_model",
    "train_command",
    "train_tokenizer",
]
