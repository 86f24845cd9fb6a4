"""Texts to documents, documents to token shards, shards to batches."""

from plume.data.batches import IGNORE, Batch, Dataset, JoinedPairs, PackedWindows, Phases, SequencePairs, decoder_start
from plume.data.documents import Document, read_documents
from plume.data.masked import FullSentences, MaskedPairs
from plume.data.prepare import Prepared, keyed_folder, prepare, reuse, show_report
from plume.data.shards import Shards, TokenStream, open_shards, verify_shards
from plume.data.tables import Tally, read_rows

__all__ = [
    "IGNORE",
    "Batch",
    "Dataset",
    "Document",
    "FullSentences",
    "JoinedPairs",
    "MaskedPairs",
    "PackedWindows",
    "Phases",
    "Prepared",
    "SequencePairs",
    "Shards",
    "Tally",
    "TokenStream",
    "decoder_start",
    "keyed_folder",
    "open_shards",
    "prepare",
    "read_documents",
    "read_rows",
    "reuse",
    "show_report",
    "verify_shards",
]
