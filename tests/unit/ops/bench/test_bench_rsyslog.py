"""Where rsyslog is not installed its benchmarks say what to install, and nothing fails."""

from __future__ import annotations

import pytest
from logferry.ops.bench import __main__ as bench


@pytest.mark.parametrize("name", ["push_drain_vs_rsyslog", "push_cpu_vs_rsyslog", "push_rss_mb"])
def test_it_is_skipped_with_a_word(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("logferry.ops.bench.harness.peers.shutil.which", lambda *_, **__: None)
    kept: list[object] = []
    monkeypatch.setattr(bench, "append_figure", lambda name, figure: kept.append(name))
    assert bench.main([name]) == 0
    assert f"{name}: skipped: " in (said := capsys.readouterr().err)
    assert "apt-get install rsyslog rsyslog-kafka" in said
    assert not kept
