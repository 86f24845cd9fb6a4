"""What every test shares: the folder of real data, if it is there."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """Real data and vocabularies beside the checkout; they are not part of the project."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the real data folder ../shared, which is not part of the project")
    return SHARED
