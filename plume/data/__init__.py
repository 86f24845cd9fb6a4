"""Texts to documents, documents to token shards, shards to batches."""

from plume.data.batches import IGNORE, Batch, Dataset, PackedWindows, Phases
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
    "PackedWindows",
    "Phases",
    "Prepared",
    "Shards",
    "Tally",
    "TokenStream",
    "open_shards",
    "prepare",
    "read_documents",
    "read_rows",
    "show_report",
]
