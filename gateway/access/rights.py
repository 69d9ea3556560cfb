"""Who may do what: patterns of topics, sources and consumers, and the rights of a caller. Pure.

A denial is stronger than every grant: each set of patterns holds both, and nobody asks it for one of them alone.

A **pattern** is a shell's (``*``, ``?``, ``[…]``). With a known data centre or ``*`` before its first dot it is one of
full names: ``dc1.nginx``, ``dc2.*``, ``*.nginx``; else it is the topic's name in every data centre: ``nginx-*``.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from logferry.gateway.access.certificates import Identity
from logferry.gateway.access.settings import ConsumerSettings, TokenSettings
from logferry.gateway.contract.names import split_topic

_DECISIONS: Final = 4096
ConsumerAct = Literal["read", "commit", "reset"]


class Patterns:
    """Patterns of topics, without those that are denied, with a cache of decisions."""

    def __init__(self, texts: Iterable[str], dcs: frozenset[str], denied: Iterable[str] = ()) -> None:
        texts, denied = list(texts), list(denied)
        self._granted, self._denied = _compiled(texts, dcs), _compiled(denied, dcs)
        self._decided: dict[str, bool] = {}
        self.is_everything = any(text in ("*", "*.*") for text in texts) and not denied
        self.is_nothing = not texts
        self.has_denials = bool(denied)

    def match(self, topic: str) -> bool:
        """Whether one of the patterns matches the topic, by its full name, and no denial does."""
        known = self._decided.get(topic)
        if known is None:
            known = _fits(self._granted, topic) and not _fits(self._denied, topic)
            if len(self._decided) >= _DECISIONS:
                self._decided.clear()
            self._decided[topic] = known
        return known

    def denies(self, topic: str) -> bool:
        """Whether a denial matches the topic, granted or not."""
        return _fits(self._denied, topic)


_TopicPattern = tuple[re.Pattern[str], re.Pattern[str]]


def _compiled(texts: Iterable[str], dcs: frozenset[str]) -> list[_TopicPattern]:
    found = []
    for text in texts:
        first, dot, rest = text.partition(".")
        dc, name = (first, rest) if dot and (first == "*" or first in dcs) else ("*", text)
        found.append((re.compile(fnmatch.translate(dc)), re.compile(fnmatch.translate(name))))
    return found


def _fits(patterns: list[_TopicPattern], topic: str) -> bool:
    if not patterns:
        return False
    dc, name = split_topic(topic)
    return any(dcs.match(dc) is not None and names.match(name) is not None for dcs, names in patterns)


class NamePatterns:
    """Patterns of source ids or consumers; ``texts`` None: all but the denied ones."""

    def __init__(self, texts: Iterable[str] | None = None, denied: Iterable[str] = ()) -> None:
        denied = list(denied)
        self._granted = None if texts is None else _any_of(texts)
        self._denied = _any_of(denied)
        self.is_everything = self._granted is None and not denied

    def match(self, name: str) -> bool:
        return (self._granted is None or self._granted.match(name) is not None) and self._denied.match(name) is None


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, texts)) or r"(?!)")


_ALL_NAMES: Final = NamePatterns()
_NO_NAMES: Final = NamePatterns([])


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller and its rights. ``name``: None where no tokens are configured. ``sha256``: of its token.

    Its secret is valid from ``begins_s`` until before ``ends_s``. ``claims``: of its JSON Web Token, by ``issuer``.
    ``identity``: of its certificate, verified while the authorities were those of ``generation``.
    """

    name: str | None
    write: Patterns
    read: Patterns
    admin: Patterns
    sources: NamePatterns = _ALL_NAMES
    consumers: Mapping[ConsumerAct, NamePatterns] | None = None
    report: Patterns = field(default_factory=lambda: Patterns([], frozenset()))
    sha256: bytes = field(default=b"", repr=False)
    begins_s: float = -math.inf
    ends_s: float = math.inf
    issuer: str | None = None
    claims: Mapping[str, Any] = field(default_factory=dict, repr=False)
    identity: Identity | None = None
    generation: int = 0

    def may_write_as(self, topic: str, source_id: str) -> bool:
        return self.write.match(topic) and self.sources.match(source_id)

    def may_read(self, topic: str) -> bool:
        return self.read.match(topic)

    def may_use(self, consumer: str, act: ConsumerAct) -> bool:
        """Whether the caller may do this with the consumer; ``commit`` is also to read as it."""
        return self.consumers is None or self.consumers.get(act, _NO_NAMES).match(consumer)

    def may_see(self, topic: str) -> bool:
        """Whether the caller may know that there is such a topic."""
        return self.write.match(topic) or self.read.match(topic) or self.admin.match(topic)

    def may_see_source(self, topic: str, source_id: str) -> bool:
        """Whoever reads or administers a topic sees its sources anyway; a writer sees its own."""
        return self.read.match(topic) or self.admin.match(topic) or self.may_write_as(topic, source_id)


_EVERY: Final = Patterns(["*"], frozenset())
_NONE: Final = Patterns([], frozenset())
ANYBODY: Final = Caller(None, _EVERY, _EVERY, _EVERY, report=_EVERY)
NOBODY: Final = Caller(None, _NONE, _NONE, _NONE, _NO_NAMES, {})


def role_of(token: TokenSettings, dcs: frozenset[str]) -> Caller:
    """The rights of an entry, for whoever has one of its secrets."""
    deny = token.deny
    write, read = Patterns(token.write, dcs, deny.write), Patterns(token.read, dcs, deny.read)
    admin, report = Patterns(token.admin, dcs, deny.admin), Patterns(token.report, dcs, deny.report)
    sources = NamePatterns(None if token.sources is None else [token.sources], deny.sources)
    return Caller(token.name, write, read, admin, sources, _consumers(token.consumers, deny.consumers), report)


def callers_of(token: TokenSettings, role: Caller) -> list[Caller]:
    """One for each secret: the same caller to everybody else, told apart when a secret ends or is removed."""
    return [
        replace(role, sha256=bytes.fromhex(secret.sha256), begins_s=secret.begins_s, ends_s=secret.ends_s)
        for secret in token.all_secrets
    ]


def caller_by_claims(
    role: Caller, subject: str, issuer: str, claims: Mapping[str, Any], digest: bytes, ends_s: float
) -> Caller:
    """The caller of a JSON Web Token. No entry has a colon in its name, so no caller is taken for another one."""
    name = f"{role.name}:{subject}"
    return replace(role, name=name, issuer=issuer, claims=claims, sha256=digest, ends_s=ends_s)


def caller_by_certificate(role: Caller, name: str, identity: Identity, generation: int) -> Caller:
    """The caller of a client certificate, by its name in it."""
    name = f"{role.name}:{name}"
    return replace(role, name=name, identity=identity, generation=generation, ends_s=identity.ends_s)


def entry_of(name: str | None) -> str | None:
    """The name of the entry that gives a caller of this name its rights."""
    return None if name is None else name.partition(":")[0]


def _consumers(settings: list[str] | ConsumerSettings | None, denied: list[str]) -> dict[ConsumerAct, NamePatterns]:
    if not isinstance(settings, ConsumerSettings):
        every = NamePatterns(settings, denied)
        return {"read": every, "commit": every, "reset": every}
    commit, reset = settings.commit, settings.reset
    granted: dict[ConsumerAct, list[str]] = {
        "read": [*settings.read, *commit, *reset],
        "commit": commit,
        "reset": reset,
    }
    return {act: NamePatterns(texts, denied) for act, texts in granted.items()}
