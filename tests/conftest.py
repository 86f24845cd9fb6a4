"""What every test shares: the folder of real data, if it is there, and a watch on skipped tests."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).resolve().parents[2] / "shared"
EXPECTED_SKIPS = ("needs the real data folder", "needs a GPU")  # any other skip fails a run with CI=true

# no example fails because a machine is slow, and fixtures that every example of a test shares are meant so
settings.register_profile(
    "plume", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("plume")


@pytest.fixture
def shared() -> Path:
    """Real data and vocabularies beside the checkout; they are not part of the project."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the real data folder ../shared, which is not part of the project")
    return SHARED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped where everything should run: {reason}"
    return report


def pytest_unconfigure() -> None:
    """llama-cpp-python opens the null device when it is imported and never closes it, which would be the last word."""
    if utils := sys.modules.get("llama_cpp._utils"):
        utils.outnull_file.close()
        utils.errnull_file.close()
