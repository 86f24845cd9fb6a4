"""The notes of a release: its section of CHANGELOG.md. `python tests/release_notes.py 0.1.0` prints them."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


def notes(version: str) -> str:
    """What stands between the heading of a version and the next one; an error where there is nothing."""
    sections = re.split(r"^## ", CHANGELOG.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {section.split()[0]: section.partition("\n")[2].strip() for section in sections}
    if not found.get(version):
        raise SystemExit(f"CHANGELOG.md has no notes for {version}; it has {', '.join(found)}")
    return found[version]


if __name__ == "__main__":
    print(notes(sys.argv[1]))
