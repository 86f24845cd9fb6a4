"""Documents from the web: the articles of HTML pages, WARC and WET archives, and datasets of the hub."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from plume.config import UserError
from plume.data.rows import Row, Tally, open_bytes

PAGES = (".html", ".htm")
ARCHIVES = (".warc", ".wet")
PATIENCE = 3.0  # seconds that the hub may take to answer at all


@dataclass(frozen=True, slots=True)
class Document:
    """One text and what is known of it."""

    text: str
    where: str
    url: str | None = None
    score: float | None = None
    target: str | None = None  # the other side of a pair
    goes_on: bool = False  # the next part of the document before it, which was too long for one piece


def page(html: bytes, where: str, url: str | None, tally: Tally) -> Iterator[Document]:
    """The article of a web page without its menus and footers."""
    trafilatura = optional("trafilatura", "HTML pages")
    text = trafilatura.extract(html, url=url, include_comments=False)
    if text is None:
        tally.add("no article found in the page", where)
    else:
        yield Document(text, where, url=url)


def archive(path: Path, tally: Tally) -> Iterator[Document]:
    """Pages of a WARC file (responses), or the texts of a WET file (conversions)."""
    optional("warcio", "WARC files")
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    with path.open("rb") if path.suffix == ".gz" else open_bytes(path) as stream:
        try:
            for record in ArchiveIterator(stream):
                url = record.rec_headers.get_header("WARC-Target-URI")
                where = f"{path} {url}"
                if record.rec_type == "conversion":
                    text = record.content_stream().read().decode("utf-8", errors="replace")
                    yield Document(text, where, url=url)
                elif record.rec_type == "response":
                    kind = record.http_headers.get_header("Content-Type", "") if record.http_headers else ""
                    if "html" in kind:
                        yield from page(record.content_stream().read(), where, url, tally)
                    else:
                        tally.add("not an HTML page", where)
        except ArchiveLoadFailed:
            tally.add("damaged WARC record", str(path))


def optional(module: str, purpose: str, extra: str = "web") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{purpose} need the package {module}: pip install 'plume-lm[{extra}]'") from None


def hub_name(spec: str) -> tuple[str, str | None, str]:
    """`hub:NAME[:CONFIG[:SPLIT]]` taken apart; the split is train unless said."""
    name, configuration, split = [*spec.removeprefix("hub:").split(":"), "", ""][:3]
    return name, configuration if configuration else None, split if split else "train"


def hub_shards(spec: str) -> int:
    """How many parts of its own a hub dataset has."""
    return int(getattr(load_hub(spec), "num_shards", 1))


def hub_is_far() -> bool:
    """Whether only the hub's cache can be had: it is off limits, or nobody answers there.

    Its libraries are then told so; by themselves they would try again for half a minute.
    """
    if any(
        os.environ.get(v, "0").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    ):
        return True
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    if not constants.HF_HUB_OFFLINE and place.scheme not in getproxies() and not answers(place):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that are started from here, and for what is not loaded yet
        for module in (constants, sys.modules.get("datasets.config")):
            if module is not None:
                module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return bool(constants.HF_HUB_OFFLINE)


def answers(place: SplitResult) -> bool:
    try:
        port = place.port if place.port is not None else 443 if place.scheme == "https" else 80
        socket.create_connection((place.hostname, port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def load_hub(spec: str) -> Any:
    """A hub dataset, streamed unless the hub is off limits; then what the cache holds."""
    offline = hub_is_far()
    datasets = optional("datasets", "hub datasets", "hub")
    name, configuration, split = hub_name(spec)
    try:
        return datasets.load_dataset(name, configuration, split=split, streaming=not offline)
    except Exception as error:  # the library has many ways to fail; the user needs its last sentence
        state = "offline" if offline else "online"
        raise UserError(f"{spec} ({state}): {type(error).__name__}: {str(error).strip().splitlines()[-1]}") from error


def hub_rows(spec: str, shard: int, shards: int) -> Iterator[Row]:
    dataset = load_hub(spec)
    yield from dataset.shard(num_shards=shards, index=shard) if shards > 1 else dataset
