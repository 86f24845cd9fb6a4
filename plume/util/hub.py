"""Models by name: those that the package contains, and whether the Hugging Face hub can be reached."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

BUNDLED = Path(__file__).parents[1] / "models"  # model folders inside the package
TIMEOUT = 3.0  # seconds for the hub to accept a connection


def bundled(name: str) -> Path | None:
    """The folder of a model that the package contains."""
    folder = BUNDLED / name
    return folder if "/" not in name and (folder / "config.json").is_file() else None


def is_bundled(folder: Path) -> bool:
    return folder.parent == BUNDLED


def hub_is_offline() -> bool:
    """Whether only the hub's cache can be used: offline mode is on, or the hub does not answer.

    In the second case offline mode is turned on: the hub's libraries would retry for half a minute.
    """
    if any(
        os.environ.get(v, "0").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    ):
        return True
    from urllib.request import getproxies

    from huggingface_hub import constants

    endpoint = urlsplit(constants.ENDPOINT)
    direct = not {endpoint.scheme, "all"} & getproxies().keys()
    if not constants.HF_HUB_OFFLINE and direct and not is_reachable(endpoint):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes, and for modules that are not imported yet
        for module in (constants, sys.modules.get("datasets.config")):
            if module is not None:
                module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return bool(constants.HF_HUB_OFFLINE)


def is_reachable(endpoint: SplitResult) -> bool:
    try:
        port = endpoint.port if endpoint.port is not None else 443 if endpoint.scheme == "https" else 80
        socket.create_connection((endpoint.hostname, port), timeout=TIMEOUT).close()
    except OSError:
        return False
    return True
