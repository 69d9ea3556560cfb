"""What holds for all unit tests."""

import pytest
from hypothesis import HealthCheck, settings

# As in the conftest above, which the client's tests on older Pythons do without.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _no_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever test called the push-client's main function before: its events go to `logging`."""
    monkeypatch.setattr("logferry.client.events._least_level", None)
