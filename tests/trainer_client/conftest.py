"""A run for each test."""

import zlib

import pytest


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """A run of the test's own on the shared service."""
    name: str = request.node.name
    return f"{zlib.crc32(name.encode()):08x}-" + "".join(c if c.isalnum() else "-" for c in name)[:50]
