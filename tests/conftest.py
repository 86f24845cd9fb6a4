"""What every test shares: the folder of real data, if it is there, and a watch on skipped tests."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).resolve().parents[2] / "shared"
EXPECTED_SKIPS = ("needs the real data folder", "needs a GPU")  # any other skip fails a run with CI=true

# begun first, so that all workers end together: `make test` hands out whole files, in this order
LONGEST = [
    "serve/test_explorer",
    "data/test_data_prepare",
    "serve/test_hostile",
    "serve/test_page",
    "train/test_train_pretrain",
    "finetune/test_finetune",
    "test_foreign_folders",
    "serve/test_views",
    "data/test_data_shards",
    "finetune/test_findings",
    "train/test_train_loop",
    "serve/test_saved",
    "inference/test_export",
    "train/test_train_init_from",
    "test_cli",
    "text/test_encoding",
    "serve/test_steady",
    "inference/test_beam",
    "test_architecture",
    "train/test_cooccurrence",
    "test_plan",
    "serve/test_connections",
    "inference/test_engines",
    "lab/test_lab",
    "evaluate/test_evaluate_report",
    "text/test_training",
    "data/test_data_masked",
    "finetune/test_defects",
    "evaluate/test_evaluate_formats",
]

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped where everything should run: {reason}"
    return report
