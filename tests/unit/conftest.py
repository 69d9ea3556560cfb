"""What holds for all unit tests."""

import pytest


@pytest.fixture(autouse=True)
def _no_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever test called the push-client's main function before: its events go to `logging`."""
    monkeypatch.setattr("logferry.client.events._least_level", None)
