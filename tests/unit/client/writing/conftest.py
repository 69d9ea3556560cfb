"""A reference of the gateway over real sockets, which takes chunks without ``prev``, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_gateway import FakeGateway, Served


@pytest.fixture
def gateway() -> FakeGateway:
    fake = FakeGateway()
    fake.prev_always = False
    return fake


@pytest.fixture
def served(gateway: FakeGateway) -> Iterator[Served]:
    with Served(gateway) as served:
        yield served
