"""From raw text to a pretrained, fine-tuned, measured, served and explorable language model."""

from __future__ import annotations

import os
import stat
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plume.data.prepare import prepare as prepare
    from plume.generate.lm import load as load
    from plume.generate.translating import finetune as finetune
    from plume.train.distill import distill as distill
    from plume.train.pretrain import pretrain as pretrain

__version__ = "0.1.0"
_HOMES = {
    "distill": "plume.train.distill",
    "finetune": "plume.generate.translating",
    "load": "plume.generate.lm",
    "prepare": "plume.data.prepare",
    "pretrain": "plume.train.pretrain",
}
__all__ = ["distill", "finetune", "load", "prepare", "pretrain"]


def _find_places_to_write() -> None:
    """Where compiled code and font lists are kept: by the package, in the user's cache, or else in a temporary folder.

    numba refuses to work without any, and reads where it is when it is imported.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")))
    usual = {"NUMBA_CACHE_DIR": (Path(__file__).parent, cache / "numba"), "MPLCONFIGDIR": (cache / "matplotlib",)}
    for name, places in usual.items():
        if name not in os.environ and not any(map(_writable, places)):
            os.environ[name] = _own_folder()


def _own_folder() -> str:
    """The same for every run of this user, and nobody else's: code is loaded from there."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    place = Path(tempfile.gettempdir()) / f"plume-{user}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    safe = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    return str(place) if safe or os.name == "nt" else tempfile.mkdtemp(prefix="plume-")


def _writable(path: Path) -> bool:
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK)


_find_places_to_write()


def __getattr__(name: str) -> Any:
    if name == "evaluate":  # a package that can be called
        return import_module("plume.evaluate")
    if name not in _HOMES:
        raise AttributeError(f"plume has no {name!r}")
    return getattr(import_module(_HOMES[name]), name)
