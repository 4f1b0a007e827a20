"""How tests are spread over processes (`pytest -n`, `make test`): file by file, those with engines in one process.

A file keeps its servers to itself that way. Two SGLang servers of different tests at a time would take a small
machine's cores from each other and run into deadlines that are meant for one.
"""

import pytest

ENGINES = "engines"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = ENGINES if item.get_closest_marker("engine") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    # They are the longest piece of work and so the first to begin.
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)
