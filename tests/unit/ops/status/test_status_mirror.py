"""What is wrong with a mirror by what its workers say, and what an operator is shown of it."""

from __future__ import annotations

import io
from typing import Any

from logferry.gateway.api.diagnosis import SilentWorker, as_document
from logferry.ops.status.mirror import Mirror, MirrorStatus, diagnose_mirror, links_of, print_mirror
from rich.console import Console

NOW_MS = 1_700_000_000_000
A, B = "http://a:1", "http://b:1"


def wait(since_s: float, ended_s: float | None = None, reason: str = "it does not answer", fault: bool = True) -> Any:
    ended_ms = None if ended_s is None else NOW_MS - round(ended_s * 1000)
    return {"reason": reason, "since_ms": NOW_MS - round(since_s * 1000), "ended_ms": ended_ms, "is_fault": fault}


def link(dc: str, **changes: Any) -> dict[str, Any]:
    well = {"topics": 3, "partitions": 6, "stopped": 0, "lag_records": 0, "lag_bytes": 0, "lag_s": 0.0}
    return {"dc": dc, **well, "bytes_per_s": None, "last_wait": None, **changes}


def worker(url: str, lanes: list[int], links: list[dict[str, Any]], stops: Any = (), **changes: Any) -> MirrorStatus:
    serving = {"state": "serving", "why": "open", "since_ms": NOW_MS - 5000, "error": None}
    facts = {"dc": "dc1", "source_next": 81, "local_next": 80, "source_end": 90, "waiting_bytes": 5}
    partitions = [
        {"topic": t, "partition": n, "state": "stopped" if stop else "mirroring", **facts, "stop": stop}
        for t, n, stop in stops
    ]
    document = {
        "dc": "dc2",
        "now_ms": NOW_MS,
        "url": url,
        "workers": [A, B],
        "lanes_total": 4,
        "lanes": [{"lane": number, **serving, **changes} for number in lanes],
        "links": links,
        "partitions": partitions,
        "what a newer one says": 1,
    }
    return MirrorStatus.model_validate(document)


def mirror(*workers: MirrorStatus, **silent: str) -> Mirror:
    away = {f"http://{name}:1": SilentWorker(why) for name, why in silent.items()}
    return Mirror({found.url: found for found in workers}, away)


def test_all_is_well() -> None:
    well = mirror(worker(A, [0, 1], [link("dc1")]), worker(B, [2, 3], [link("dc1")]))
    assert diagnose_mirror(well) == []
    assert as_document([], 1.0, well)["well"]


def test_lags_are_put_together_over_the_workers() -> None:
    first = link("dc1", lag_records=10, lag_bytes=1000, lag_s=4.0, last_wait=wait(100, 90, "earlier"))
    second = link("dc1", lag_records=5, lag_bytes=500, lag_s=9.0, stopped=1, last_wait=wait(50, 40, "later"))
    [(found, _)] = links_of(mirror(worker(A, [0, 1], [first]), worker(B, [2, 3], [second])))
    assert (found.lag_records, found.lag_bytes, found.lag_s, found.stopped) == (15, 1500, 9.0, 1)
    assert (found.topics, found.partitions) == (3, 12)
    assert found.last_wait is not None
    assert found.last_wait.reason == "later"
    unknown = link("dc1", lag_bytes=None, lag_s=None)
    [(found, _)] = links_of(mirror(worker(A, [0, 1], [first]), worker(B, [2, 3], [unknown])))
    assert (found.lag_bytes, found.lag_s) == (None, 4.0)


def test_a_link_that_waits_is_wrong_unless_a_limit_holds_it() -> None:
    [finding] = diagnose_mirror(mirror(worker(A, [0, 1, 2, 3], [link("dc1", last_wait=wait(7))])))
    assert (finding.wrong, finding.what, finding.for_s) == (True, "the link to dc1 waits", 7.0)
    held = link("dc1", last_wait=wait(7, None, "bytes_per_s", fault=False))
    assert [finding.wrong for finding in diagnose_mirror(mirror(worker(A, [0, 1, 2, 3], [held])))] == [False]
    over = link("dc1", last_wait=wait(7, 3))
    assert diagnose_mirror(mirror(worker(A, [0, 1, 2, 3], [over]))) == []


def test_a_stopped_partition_is_named_with_its_remedy() -> None:
    kinds = (("log-truncated", True), ("write-rejected", False))
    for kind, is_resumed in kinds:
        stop = {"kind": kind, "detail": "why", "since_ms": NOW_MS - 60_000, "what_to_do": "look at it"}
        [finding] = diagnose_mirror(
            mirror(worker(A, [0, 1, 2, 3], [link("dc1")], [("dc1.nginx", 3, stop), ("dc1.a", 0, None)]))
        )
        assert finding.wrong
        assert finding.what == f"dc1.nginx-3 of dc1 stopped: {kind}"
        assert finding.reason.startswith("why; look at it")
        assert (f"logferry mirror resume dc1.nginx 3 --url {A}" in finding.reason) == is_resumed
        assert finding.for_s == 60.0


def test_the_document_has_the_positions_by_which_a_partition_is_resumed() -> None:
    stop = {"kind": "records-removed", "detail": "why", "since_ms": NOW_MS, "what_to_do": "resume"}
    document = as_document([], 1.0, mirror(worker(A, [0], [], [("dc1.nginx", 3, stop)])))
    [partition] = document["workers"][A]["partitions"]
    assert partition == {
        "topic": "dc1.nginx",
        "partition": 3,
        "dc": "dc1",
        "state": "stopped",
        "source_next": 81,
        "local_next": 80,
        "source_end": 90,
        "waiting_bytes": 5,
        "stop": stop,
    }


def test_lanes_and_workers() -> None:
    found = diagnose_mirror(
        mirror(worker(A, [0, 1], [], state="fencing", error="while serving: no"), b="connection refused")
    )
    assert [finding.what for finding in found] == [
        f"worker {B} does not answer",
        "lanes 2 to 3 served by nobody",
        "lane 0 is fencing",
        "lane 1 is fencing",
    ]
    assert all(finding.wrong for finding in found)


def test_what_is_shown() -> None:
    behind = link("dc1", lag_records=1234, lag_bytes=5_600_000, lag_s=61.0, last_wait=wait(20, 10, "broker 1 is away"))
    out = io.StringIO()
    shown = mirror(worker(A, [0, 1, 2, 3], [behind, link("dc3", lag_bytes=None, lag_s=None)]))
    print_mirror(shown, [], 1.0, Console(file=out, width=200))
    said = out.getvalue()
    for text in ("1,234 records", "about 5.6 MB", "1 min 1 s", "for 10 s: broker 1 is away", "not known yet", "never"):
        assert text in said


def test_settings_that_cannot_be_copied_and_risks_of_the_configuration_are_named_once() -> None:
    both = [worker(url, lanes, [link("dc1")]) for url, lanes in ((A, [0, 1]), (B, [2, 3]))]
    for one in both:
        one.unaltered["dc1.nginx"] = "retention.ms: no right"
        one.warnings.append("tokens are shown: configure tls")
    settings, risk = diagnose_mirror(mirror(*both))
    assert (settings.wrong, settings.what) == (False, "the settings of dc1.nginx here may differ from its original's")
    assert "retention.ms: no right" in settings.reason
    assert (risk.wrong, risk.what, risk.reason) == (False, "tokens are shown", "configure tls")
