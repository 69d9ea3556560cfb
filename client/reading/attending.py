"""The thread that holds a consumer's session for a reader, one after the other."""

from __future__ import annotations

import http.client
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from logferry.client.reading.decode import decoder
from logferry.client.reading.group_membership import Membership, has_news
from logferry.client.reading.requests import Again, trouble
from logferry.client.reading.shelf import Shelf
from logferry.client.reading.subscription import Wanted
from logferry.client.transport.connections import Reply, cut
from logferry.client.transport.dialer import Dialer

SILENCE_S = 30.0  # a session says something every 10 s
_READ_BYTES = 256 << 10


class Attending:
    """Hands the frames to `Membership`, no more of them than the caller takes."""

    def __init__(self, wanted: Wanted, membership: Membership, topics: list[str], shelf: Shelf, dialer: Dialer) -> None:
        self._wanted, self._membership, self._topics = wanted, membership, topics
        self._shelf, self._dialer = shelf, dialer
        shelf.start(self._run)

    def _run(self) -> None:
        """Until the end, or an error that the next session would have, too."""
        failures = 0
        while self._shelf.goes_on:
            again = Again("the session ended")
            try:
                has_begun = self._attend()
            except Again as error:
                has_begun, again = False, error
            failures = 1 if has_begun else failures + 1
            self._shelf.pause(again.pause_s(failures))

    def _attend(self) -> bool:
        """One session, to its end; whether it had begun. Raises `Again`, and what the caller must hear of."""
        base = self._wanted.cluster.given()
        parts = urlsplit(base + self._wanted.stream_path(self._topics))
        has_begun = False
        connection = self._dialer.connection(parts)
        try:
            with self._shelf.cutting(partial(cut, connection)):
                target, more = self._dialer.request_to(parts)
                connection.connect()
                connection.sock.settimeout(SILENCE_S)
                format_ = decoder()
                headers = {**self._wanted.headers(base, format_.media_type), **more}
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise self._refused(base, response)
                while self._shelf.goes_on and (data := response.read1(_READ_BYTES)):
                    frames = list(format_.feed(data))
                    self._feed(frames)
                    has_begun = has_begun or has_news(frames)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._wanted.cluster.failed(base)
            if not has_begun:
                raise Again(f"{base}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        return has_begun

    def _refused(self, base: str, response: http.client.HTTPResponse) -> Exception:
        headers = {name.lower(): value for name, value in response.getheaders()}
        error = trouble(Reply(response.status, headers, response.read(_READ_BYTES)))
        if isinstance(error, Again):
            self._wanted.cluster.failed(base)
        return error

    def _feed(self, frames: list[Any]) -> None:
        """Waits until what came before is handed out: nothing piles up."""
        with self._shelf.lock:
            while self._membership.has_frames and self._shelf.goes_on:
                self._shelf.room.wait()
            self._membership.feed(frames)
            self._shelf.came.notify_all()
