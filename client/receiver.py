"""The receiving end of `logferry deliver`, for a program: checks signatures, and takes every batch once.

``take`` notes in a database how far each partition was taken, in the transaction of the program's own output. So a
batch that comes again, whole or in part, changes nothing, whatever died in between.

Standard library only, Python 3.9+. SQLite by `sqlite3`, PostgreSQL by any driver of the DB-API with ``%s`` parameters
(psycopg).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# An older signature may be a request that was recorded and is sent again.
MAX_AGE_S = 300


class Refused(Exception):
    """The request is not answered with success. ``status``: the HTTP status to answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Delivery(NamedTuple):
    """A batch: its place in the log. ``first`` and ``last``: offsets of its chunks in the data centre that sends."""

    subscription: str
    topic: str
    partition: int
    shard: int
    replay: int
    epoch: int
    first: int
    last: int
    body: bytes


class Receiver:
    """``keys``: those that a signature may be made with; several while one is replaced, none: signatures are not asked
    for. ``connection``: of the database that has the program's output; ``style``: how its driver writes parameters,
    ``?`` or ``%s``.
    """

    def __init__(
        self,
        connection: Any,
        keys: Iterable[bytes] = (),
        *,
        style: str = "?",
        table: str = "logferry_delivered",
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if style not in ("?", "%s"):
            raise ValueError(f"style: {style!r} is neither ? nor %s")
        if not table.isidentifier():
            raise ValueError(f"table: {table!r} is not a plain name")
        self._connection, self._keys, self._style, self._table = connection, list(keys), style, table
        self._max_age_s, self._clock = max_age_s, clock

    def create_table(self) -> None:
        """Creates the table if it is missing, and commits."""
        cursor = self._connection.cursor()
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {self._table} (subscription TEXT, topic TEXT, part BIGINT, shard BIGINT, "
            "replay BIGINT, epoch BIGINT, reached BIGINT, PRIMARY KEY (subscription, topic, part, shard))"
        )
        self._connection.commit()

    def check(self, headers: Mapping[str, str], body: bytes) -> Delivery:
        """The batch of a request, with its signature checked. Raises Refused.

        ``headers``: by name, in any case. ``body``: after a Content-Encoding is undone.
        """
        found = {name.lower(): value for name, value in headers.items()}
        if self._keys:
            self._check_signature(found.get("x-logferry-signature", ""), body)
        try:
            place, _, span = found["x-logferry-token"].rpartition("/")
            topic, _, partition = place.rpartition("/")
            first, _, last = span.partition("-")
            numbers = (found[f"x-logferry-{name}"] for name in ("shard", "replay", "epoch"))
            shard, replay, epoch = map(int, numbers)
            return Delivery(
                found["x-logferry-subscription"],
                topic,
                int(partition),
                shard,
                replay,
                epoch,
                int(first),
                int(last),
                body,
            )
        except (KeyError, ValueError) as error:
            raise Refused(400, f"not a delivery of logferry: {error}") from None

    def _check_signature(self, text: str, body: bytes) -> None:
        parts = [part.strip().partition("=")[::2] for part in text.split(",")]
        stamps = [value for name, value in parts if name == "t" and value.isascii() and value.isdigit()]
        if len(stamps) != 1 or len(stamps[0]) > 12:
            raise Refused(401, "the signature is missing or malformed")
        stamped = stamps[0].encode() + b"." + body
        good = [hmac.new(key, stamped, hashlib.sha256).hexdigest() for key in self._keys]
        given = [value for name, value in parts if name == "v1" and value.isascii()]
        if not any(hmac.compare_digest(one, other) for one in good for other in given):
            raise Refused(401, "the signature is wrong")
        if abs(self._clock() - int(stamps[0])) > self._max_age_s:
            raise Refused(401, "the signature is too old, or the clocks differ")

    def take(self, delivery: Delivery) -> int | None:
        """Notes the batch, in the transaction that is open on the connection; the caller commits, or rolls back.

        Returns the offset below which its chunks were taken before: those are to be left out, if there are any. None:
        all of it was taken; answer with success and do nothing. Raises Refused for a worker that was replaced.
        """
        where = "WHERE subscription = ? AND topic = ? AND part = ? AND shard = ?"
        key = (delivery.subscription, delivery.topic, delivery.partition, delivery.shard)
        lock = " FOR UPDATE" if self._style == "%s" else ""
        cursor = self._connection.cursor()
        # The row is there before it is read, so that two requests at once wait for each other.
        columns = f"{self._table} (subscription, topic, part, shard, replay, epoch, reached)"
        self._execute(cursor, f"INSERT INTO {columns} VALUES (?, ?, ?, ?, 0, 0, 0) ON CONFLICT DO NOTHING", key)
        self._execute(cursor, f"SELECT replay, epoch, reached FROM {self._table} {where}{lock}", key)
        replay, epoch, reached = cursor.fetchone()
        if (delivery.replay, delivery.epoch) < (replay, epoch):
            raise Refused(409, f"epoch {delivery.epoch} was replaced by {epoch}")
        if delivery.replay > replay:
            reached = 0
        if delivery.last < reached:
            return None
        values = (delivery.replay, delivery.epoch, delivery.last + 1, *key)
        self._execute(cursor, f"UPDATE {self._table} SET replay = ?, epoch = ?, reached = ? {where}", values)
        return int(reached)

    def _execute(self, cursor: Any, statement: str, values: tuple[Any, ...]) -> None:
        cursor.execute(statement.replace("?", self._style), values)
