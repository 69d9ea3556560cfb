"""What is wrong with a mirror by what its workers say, and what an operator is shown of it."""

from __future__ import annotations

import io
from typing import Any

from logferry.ops.status.mirror import Mirror, MirrorStatus, as_dict, judge, links_of, show_tables
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
    partitions = [{"topic": t, "partition": n, "dc": "dc1", "stop": stop} for t, n, stop in stops]
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
    return Mirror({found.url: found for found in workers}, {f"http://{name}:1": why for name, why in silent.items()})


def test_all_is_well() -> None:
    well = mirror(worker(A, [0, 1], [link("dc1")]), worker(B, [2, 3], [link("dc1")]))
    assert judge(well) == []
    assert as_dict(well, [], 1.0)["well"]


def test_lags_are_put_together_over_the_workers() -> None:
    first = link("dc1", lag_records=10, lag_bytes=1000, lag_s=4.0, last_wait=wait(100, 90, "earlier"))
    second = link("dc1", lag_records=5, lag_bytes=500, lag_s=9.0, stopped=1, last_wait=wait(50, 40, "later"))
    [found] = links_of(mirror(worker(A, [0, 1], [first]), worker(B, [2, 3], [second])))
    assert (found.lag_records, found.lag_bytes, found.lag_s, found.stopped) == (15, 1500, 9.0, 1)
    assert (found.topics, found.partitions) == (3, 12)
    assert found.wait is not None
    assert found.wait[0].reason == "later"
    unknown = link("dc1", lag_bytes=None, lag_s=None)
    [found] = links_of(mirror(worker(A, [0, 1], [first]), worker(B, [2, 3], [unknown])))
    assert (found.lag_bytes, found.lag_s) == (None, 4.0)


def test_a_link_that_waits_is_wrong_unless_it_is_told_to() -> None:
    [finding] = judge(mirror(worker(A, [0, 1, 2, 3], [link("dc1", last_wait=wait(7))])))
    assert (finding.wrong, finding.what, finding.for_s) == (True, "the link to dc1 waits", 7.0)
    held = link("dc1", last_wait=wait(7, None, "bytes_per_s", fault=False))
    assert [finding.wrong for finding in judge(mirror(worker(A, [0, 1, 2, 3], [held])))] == [False]
    over = link("dc1", last_wait=wait(7, 3))
    assert judge(mirror(worker(A, [0, 1, 2, 3], [over]))) == []


def test_what_stands_still_is_named_with_the_way_on() -> None:
    kinds = (("cut-back", True), ("refused", False))
    for kind, is_resumed in kinds:
        stop = {"kind": kind, "detail": "why", "since_ms": NOW_MS - 60_000, "what_to_do": "look at it"}
        [finding] = judge(mirror(worker(A, [0, 1, 2, 3], [link("dc1")], [("dc1.nginx", 3, stop), ("dc1.a", 0, None)])))
        assert finding.wrong
        assert finding.what == f"dc1.nginx-3 of dc1 stands still: {kind}"
        assert finding.reason.startswith("why; look at it")
        assert (f"logferry mirror resume dc1.nginx 3 --url {A}" in finding.reason) == is_resumed
        assert finding.for_s == 60.0


def test_lanes_and_workers() -> None:
    found = judge(mirror(worker(A, [0, 1], [], state="fencing", error="while serving: no"), b="connection refused"))
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
    show_tables(
        mirror(worker(A, [0, 1, 2, 3], [behind, link("dc3", lag_bytes=None, lag_s=None)])), Console(file=out, width=200)
    )
    said = out.getvalue()
    for text in ("1,234 records", "about 5.6 MB", "1 min 1 s", "for 10 s: broker 1 is away", "not known yet", "never"):
        assert text in said
