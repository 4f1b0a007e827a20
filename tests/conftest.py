"""Spread of tests over processes (`pytest -n`, `make test`): file by file, those with engines in one process.

A file keeps its servers to itself that way. SGLang servers of different tests at a time would take a small machine's
cores from each other. They would run into deadlines that are meant for one.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support import upstreams


def pytest_report_header() -> list[str]:
    return upstreams.described()


@functools.cache
def _group_of(file: Path) -> str:
    """Tell the group by its text, because the process that hands out tests imports none."""
    return "engines" if "pytest.mark.engine" in file.read_text() else str(file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # They are the longest piece of work and so the first to begin.
    items.sort(key=lambda item: _group_of(item.path) != "engines")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(config.rootpath / nodeid.partition("::")[0])

    return ByGroup(config, log)
