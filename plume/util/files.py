"""Files that are whole or not there at all: written aside, then put in place. JSON, rows and pictures."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from plume.config import UserError

WIDE_FONTS = (  # with Chinese, Japanese and Korean letters: of Linux, macOS, Windows
    "Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "PingFang SC", "Hiragino Sans GB", "Arial Unicode MS", "Microsoft YaHei", "SimHei",
)  # fmt: skip
SWAPPING = threading.Lock()  # a folder changes its place in two steps


@contextmanager
def room_on_disk(path: Path) -> Iterator[None]:
    """A full disk, or a folder that is not ours to write to, as one clear message."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{path} cannot be written: {error.strerror}; choose another folder") from error
        cut_short = error.errno is None and ("free space" in str(error) or "written" in str(error))  # numpy's own
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not cut_short:
            raise
        raise UserError(
            f"the disk is full: {path.name} could not be written to {path.parent.resolve()}. What was finished is "
            "kept: free some space and run the same command again to continue, with --resume if it is a training"
        ) from error


@contextmanager
def aside(path: Path, keep: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """A hidden name to write a file or a folder under; it takes its place, whatever was there, when it is complete.

    What a folder held before under names to `keep` stays in it, unless the new one has such a name.
    """
    if not path.name:
        raise UserError(f"{path} has no name that could be written to; name a file, or a folder below it")
    hidden = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    remove(hidden)
    try:
        with room_on_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield hidden
            with SWAPPING:
                swap_in(hidden, path, keep)
    finally:
        remove(hidden)


@contextmanager
def stream_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when all of it is on the disk."""
    with aside(path) as hidden, hidden.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def swap_in(new: Path, place: Path, keep: Callable[[str], bool]) -> None:
    """Rename; a folder, which cannot be renamed over another, makes the old one step away first.

    A file never takes the place of a folder, which may hold anything.
    """
    if place.is_dir() and not new.is_dir():
        raise UserError(f"{place} is a folder, and a file would replace it; name a file")
    if not place.is_dir():
        new.replace(place)
        return
    old = new.with_name(f"{new.name}.old")
    place.rename(old)
    new.rename(place)
    for kept in filter(lambda path: keep(path.name), old.iterdir()):
        if not (place / kept.name).exists():
            kept.rename(place / kept.name)
    remove(old)


def remove(path: Path) -> None:
    """A file or a folder that may not be there; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def encodable(text: str) -> bool:
    """Whether a text is free of half characters, which stand for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def lines_of(text: str) -> list[str]:
    """Divided at line feeds and carriage returns; `splitlines` also divides at U+2028, which may stand in a text."""
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def write_text(path: Path, text: str) -> None:
    """As UTF-8; the bytes of a file's name that are no UTF-8 are escaped, as JSON reads them."""
    with stream_aside(path) as stream:
        stream.write(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A line of JSON for each."""
    with stream_aside(path) as stream:
        for row in rows:
            stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no {path}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is corrupt: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object")
    return value


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")  # not pyplot: no window system, no global state
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, file: Path) -> None:
    """As PNG. Letters outside the usual font come from another that is installed, or are boxes without a warning."""
    from matplotlib.font_manager import get_font_names
    from matplotlib.text import Text

    families = ["DejaVu Sans", *sorted(set(WIDE_FONTS) & set(get_font_names()), key=WIDE_FONTS.index)]
    for text in figure.findobj(Text):
        text.set_fontfamily(families)
    with aside(file) as hidden, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(hidden, format="png", dpi=120)
