"""A pytest plugin, loaded with `-p tests.no_skip`: a skipped test, or module, counts as failed.

For runs whose point is that every selected test took place, such as the comparison with PyTorch. (When none is
selected, pytest itself exits with 5.)
"""

from collections.abc import Generator

import pytest


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: no test may be skipped in this run. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail(report)
    return report
