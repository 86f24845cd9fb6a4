"""The tour at small sizes: the very steps of `make tour`, from a text to models that answer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tour is not part of the package

from tour import BROWSERS, VIEWS  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_tour_from_text_to_served_models(tmp_path):
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("needs Chromium; Debian's package chromium-headless-shell would do")
    folder = tmp_path / "a place with spaces"
    command = [sys.executable, str(ROOT / "tour.py"), "--small", "--folder", str(folder)]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert {path.stem for path in (folder / "views").iterdir()} == {*VIEWS, "runs-live"}
    assert "Traceback" not in done.stdout
