"""Two data centres for the tests of one mirror, and a topic for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.ops.stack.stack import Stack

from tests.support.mirrored_topic import World


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2")) as stack:
        yield stack


@pytest.fixture
def world(stack: Stack, request: pytest.FixtureRequest, tmp_path: Path) -> World:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:60].strip("-")
    return World(stack, name, tmp_path)
