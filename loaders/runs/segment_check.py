"""What the gateways of the data centres know of the sources of a topic: who is alive, and how far each says it is.

Asked before Kafka is, so that what a heartbeat promises is in Kafka by then. A gateway that does not answer makes the
look fail, and no window closes by it.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from logferry.gateway.contract.chunk import full_topic, split_topic
from logferry.loaders.config import GatewayAccess
from logferry.loaders.errors import ConfigError, GatewayAway
from logferry.loaders.planning.segment_states import SourceView
from logferry.loaders.planning.source_facts import Known, SourceKey

_TIMEOUT_S: Final = 30.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Heard(NamedTuple):
    """``beat``: of the last heartbeat; ``watermark``: it has sent all that happened before."""

    recorded_seqno: int | None
    written: datetime | None
    beat: datetime | None
    watermark: datetime | None
    finished: bool


def ask(gateways: Mapping[str, GatewayAccess], topics: Iterable[str]) -> dict[SourceKey, Heard]:
    """Each topic asked of its own data centre's gateway, if one is known. Raises GatewayAway, ConfigError."""
    found: dict[SourceKey, Heard] = {}
    for topic in sorted(set(topics)):
        dc, name = split_topic(topic)
        if dc in gateways:
            for row in _pages(gateways[dc], name):
                key, heard = SourceKey(full_topic(dc, name), row["source_id"]), _heard(row)
                before = found.get(key)
                found[key] = heard if before is None else _both(before, heard)
    return found


def views(known: Known, heard: Mapping[SourceKey, Heard], topics: Iterable[str]) -> list[SourceView]:
    """What a look sees of the sources of these topics. Pure.

    Of a source that wrote in several data centres each topic's part is a source of its own: what came by one says
    nothing of what the other still holds.
    """
    wanted, found = set(topics), []
    for key in sorted({*known, *heard}):
        if key.topic not in wanted:
            continue
        facts, said = known.get(key), heard.get(key)
        owes = (
            said is not None
            and said.recorded_seqno is not None
            and (facts is None or facts.last_seqno < said.recorded_seqno)
        )
        recorded = facts.recorded if facts else None
        if said is not None and said.written is not None:
            recorded = max(said.written, recorded) if recorded else said.written
        found.append(
            SourceView(
                *key,
                facts.event if facts else None,
                recorded,
                said.beat if said else None,
                said.watermark if said else None,
                said is not None and said.finished,
                owes,
            )
        )
    return found


def _both(one: Heard, other: Heard) -> Heard:
    """Two of one id under different keys: the more alive of both, and the less far."""
    seqnos = [heard.recorded_seqno for heard in (one, other) if heard.recorded_seqno is not None]
    marks = [heard.watermark for heard in (one, other)]
    return Heard(
        max(seqnos, default=None),
        max((at for at in (one.written, other.written) if at), default=None),
        max((at for at in (one.beat, other.beat) if at), default=None),
        None if None in marks else min(mark for mark in marks if mark is not None),
        one.finished and other.finished,
    )


def _heard(row: Mapping[str, Any]) -> Heard:
    beat, watermark = _moment(row.get("heartbeat_ms")), _moment(row.get("watermark_ms"))
    position, size = row.get("position"), row.get("size")
    if watermark is None and beat is not None and position is not None and size is not None and position >= size:
        # It has sent all of its file as of then.
        watermark = beat
    return Heard(row.get("recorded_seqno"), _moment(row.get("written_ms")), beat, watermark, bool(row.get("finished")))


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else _EPOCH + timedelta(milliseconds=ms)


def _pages(gateway: GatewayAccess, topic: str) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        query = f"?after={urllib.parse.quote(after, safe='')}" if after else ""
        page = _get(gateway, f"/v1/topics/{urllib.parse.quote(topic, safe='')}/sources{query}")
        if page is None:
            return
        yield from page["sources"]
        after = page.get("next") or ""
        if not after:
            return


def _get(gateway: GatewayAccess, path: str) -> dict[str, Any] | None:
    """From the first of its URLs that answers; None: it has no such topic, so nobody wrote there."""
    headers = {} if gateway.token_file is None else {"Authorization": f"Bearer {_token(gateway)}"}
    why = ""
    for url in gateway.urls:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        try:
            context = ssl.create_default_context(cafile=gateway.ca_file) if url.startswith("https:") else None
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:
                page: dict[str, Any] = json.load(answer)
                return page
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            if error.code in (401, 403):
                raise ConfigError(
                    f"{url} answers {error.code}: the token may not see the sources of this topic"
                ) from None
            why = f"{url} answers {error.code}"
        except (OSError, ValueError) as error:
            why = f"{url}: {error}"
    raise GatewayAway(why)


def _token(gateway: GatewayAccess) -> str:
    assert gateway.token_file is not None
    try:
        return gateway.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{gateway.token_file}: {error.strerror}") from None


__all__: Sequence[str] = ["Heard", "ask", "views"]
