"""Folders of this user to write to: the cache, or one in the temporary folder where there is no home."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path


def user_cache() -> Path:
    """The folder of this user for what can be made again."""
    root = cache_root()
    if root is not None and (os.path.isdir(root / "plume") or writable(root / "plume")):
        return root / "plume"
    return own_folder(tempfile.gettempdir())


def cache_root() -> Path | None:
    """Where programs keep such folders; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(given) if given else Path.home() / ".cache"
    except RuntimeError:
        return None


@cache
def own_folder(temporary: str) -> Path:
    """The same for every run of this user, and nobody else's: code is loaded from there."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    place = Path(temporary) / f"plume-{user}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    safe = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    return place if safe or os.name == "nt" else Path(tempfile.mkdtemp(prefix="plume-", dir=temporary))


def writable(path: Path) -> bool:
    while not os.path.exists(path) and path != path.parent:  # False for what may not be read, too
        path = path.parent
    return os.path.isdir(path) and os.access(path, os.W_OK)
