"""Texts to documents, documents to token shards, shards to batches."""

from plume.data.batches import IGNORE, Batch, Dataset, PackedWindows, Phases
from plume.data.masked import FullSentences, MaskedPairs
from plume.data.pairs import SequencePairs, decoder_start
from plume.data.prepare import Prepared, prepare
from plume.data.readers import read_documents
from plume.data.report import show_report
from plume.data.rows import Tally, read_rows
from plume.data.shards import Shards, TokenStream, open_shards
from plume.data.web import Document

__all__ = [
    "IGNORE",
    "Batch",
    "Dataset",
    "Document",
    "FullSentences",
    "MaskedPairs",
    "PackedWindows",
    "Phases",
    "Prepared",
    "SequencePairs",
    "Shards",
    "Tally",
    "TokenStream",
    "decoder_start",
    "open_shards",
    "prepare",
    "read_documents",
    "read_rows",
    "show_report",
]
