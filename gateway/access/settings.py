"""The settings of callers: their secrets with dates, their rights, what is denied to them, and quotas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Pattern = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._*?\[\]!-]{1,256}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
CertificatePattern = Annotated[str, Field(pattern=r"^(dns|uri|email|cn):[^\x00-\x1f]{1,256}$")]
SourcePattern = Annotated[str, Field(min_length=1, max_length=512)]
# Before a token ends, so that an operator has the time to rotate it.
EXPIRES_SOON_S: Final = 14 * 86_400.0


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SecretSettings(Strict):
    """A token of the caller with its dates. The clock is that of each gateway host."""

    sha256: Annotated[Sha256, Field(repr=False)]
    """The SHA-256 of the token in hexadecimal digits, as `logferry token` prints it."""
    not_before: AwareDatetime | None = None
    """The token is refused before this time, such as `2027-01-01T00:00:00Z`; default: it is valid at once."""
    not_after: AwareDatetime | None = None
    """The token is refused from this time on; default: it does not end."""

    @model_validator(mode="after")
    def _together(self) -> SecretSettings:
        if self.not_before is not None and self.not_after is not None and self.not_before >= self.not_after:
            raise ValueError("not_before is not earlier than not_after")
        return self

    @property
    def begins_s(self) -> float:
        return -math.inf if self.not_before is None else self.not_before.timestamp()

    @property
    def ends_s(self) -> float:
        return math.inf if self.not_after is None else self.not_after.timestamp()


class ConsumerSettings(Strict):
    """The consumers that the caller may use, by what it does with them."""

    read: list[Pattern] = []
    """Patterns of consumers whose positions and lag the caller may read."""
    commit: list[Pattern] = []
    """Patterns of consumers that the caller may read as and commit positions of; includes `read`."""
    reset: list[Pattern] = []
    """Patterns of consumers whose positions the caller may set; includes `read`."""


class DenySettings(Strict):
    """What the caller may not do, whatever else its entry grants."""

    write: list[Pattern] = []
    """Patterns of topics that the caller may not write."""
    read: list[Pattern] = []
    """Patterns of topics that the caller may not read, nor have delivered by a subscription."""
    admin: list[Pattern] = []
    """Patterns of topics that the caller may not administer; it does not administer everything then."""
    report: list[Pattern] = []
    """Patterns of topics of whose tables the caller may not report the state."""
    sources: list[SourcePattern] = []
    """Patterns of source ids that the caller may not write as."""
    consumers: list[Pattern] = []
    """Patterns of consumers that the caller may not use in any way."""


class IssuerSettings(Strict):
    """An OpenID Connect provider whose JSON Web Tokens are accepted from callers; takes the extra `logferry[oidc]`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,64}$")]
    """The name of the issuer in `tokens[].claims`, logs and metrics."""
    issuer: Annotated[str, Field(min_length=1, max_length=512)]
    """The exact `iss` of its tokens; without `keys_url` its discovery document is below this URL."""
    audience: Annotated[list[Annotated[str, Field(min_length=1, max_length=512)]], OneOrMore, Field(min_length=1)]
    """A token must have one of these as its `aud`."""
    keys_url: str | None = None
    """The URL of its keys (JWKS); default: as its discovery document says."""
    ca_file: Path | None = None
    """The certificates (PEM) that sign that of the issuer; default: those of the system."""
    name_claim: Annotated[str, Field(min_length=1, max_length=256)] = "sub"
    """The claim that names the caller, which is then called by the entry and this, as in `operators:alice`."""
    clock_skew_s: Annotated[float, Field(ge=0, le=300)] = 30
    """Dates of tokens may be off by so many seconds."""
    keys_max_age_s: Annotated[float, Field(ge=600)] = 86_400
    """Keys are used for so many seconds after the issuer gave them last; they are fetched every 5 minutes."""

    @model_validator(mode="after")
    def _encrypted(self) -> IssuerSettings:
        check_fetchable(self.keys_url or self.issuer)
        return self


def check_fetchable(url: str) -> None:
    """Raises ValueError for a URL from which keys cannot be fetched safely."""
    parts = urlsplit(url)
    is_here = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not parts.hostname or not (parts.scheme == "https" or is_here) or parts.username is not None:
        raise ValueError(f"{url!r} is no https URL of a host; plain http is for this machine alone")


class ClaimSettings(Strict):
    """What a JSON Web Token must say for its caller to have the rights of the entry."""

    issuer: str
    """The name of the issuer, as in `[[issuers]]`."""
    claim: Annotated[str, Field(min_length=1, max_length=256)]
    """The name of a claim, or the path to one in others, as in `realm_access.roles`."""
    value: Annotated[str, Field(min_length=1, max_length=512)]
    """The text that it must be, or must have in its list; of `scope` and `scp`: one of its words."""


class TokenSettings(Strict):
    """A caller and its rights. The configuration holds the SHA-256 of its token, never the token."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,64}$")]
    """The name of the caller in logs, metrics and answers."""
    sha256: Annotated[list[Sha256], OneOrMore, Field(min_length=1, repr=False)] = []
    """The SHA-256 of the token in hexadecimal digits, as `logferry token` prints it; or a list of several."""
    secrets: list[SecretSettings] = []
    """Tokens with dates, beside those of `sha256`; in a rotation two of them overlap."""
    claims: list[ClaimSettings] = []
    """JSON Web Tokens with one of these claims have the rights of this entry, if those of no earlier one."""
    certificates: list[CertificatePattern] = []
    """Patterns of names in client certificates, as `dns:web*.example`, `uri:…`, `email:…` or `cn:…`."""
    write: list[Pattern] = []
    """Patterns of topics that the caller may write."""
    read: list[Pattern] = []
    """Patterns of topics that the caller may read."""
    admin: list[Pattern] = []
    """Patterns of topics that the caller may create, grow and forget sources of."""
    report: list[Pattern] = []
    """Patterns of topics of which the caller, a loader, may report the state of tables."""
    sources: SourcePattern | None = None
    """A pattern of the source ids that the caller may write as; default: all."""
    consumers: list[Pattern] | ConsumerSettings | None = None
    """Patterns of the consumers that the caller may use in every way, or a table with more; default: all."""
    deny: DenySettings = DenySettings()
    """What the caller may not do; a denial is stronger than every grant."""
    bytes_per_s: Rate | None = None
    """The most that the caller may write, in bytes per second, at all workers of the data centre together."""
    chunks_per_s: Rate | None = None
    """The most that the caller may write, in chunks per second, at all workers of the data centre together."""
    read_bytes_per_s: Rate | None = None
    """The most that the caller may read, in bytes per second, at all workers of the data centre together."""
    requests_per_s: Rate | None = None
    """The most requests of the caller, per second, at all workers of the data centre together."""
    connections: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The most open connections with requests of the caller, at all workers of the data centre together."""

    @model_validator(mode="after")
    def _together(self) -> TokenSettings:
        if not (self.sha256 or self.secrets or self.claims or self.certificates):
            raise ValueError(f"{self.name} has no secret; give it sha256, secrets, claims or certificates")
        if not (self.write or self.read or self.admin or self.report):
            raise ValueError(f"{self.name} has no right; give it write, read, admin or report")
        for given, right in ("sources", "write"), ("consumers", "read"):
            if getattr(self, given) is not None and not getattr(self, right):
                raise ValueError(f"{self.name}: {given} restricts {right}, but {right} is empty")
        return self

    @property
    def has_quota(self) -> bool:
        rates = (self.bytes_per_s, self.chunks_per_s, self.read_bytes_per_s)
        return self.counts_requests or any(rate is not None for rate in rates)

    @property
    def counts_requests(self) -> bool:
        """Whether it has a quota of what its callers send: a request that is forwarded must not count twice."""
        return self.requests_per_s is not None or self.connections is not None

    @property
    def all_secrets(self) -> list[SecretSettings]:
        return [*(SecretSettings(sha256=sha256) for sha256 in self.sha256), *self.secrets]

    def valid_until_s(self, now_s: float) -> float:
        """Until when one of the secrets is always valid, from now on; now: none is. Others than secrets do not end."""
        until_s = math.inf if self.claims or self.certificates else now_s
        for secret in sorted(self.all_secrets, key=lambda secret: secret.begins_s):
            if secret.begins_s <= until_s:
                until_s = max(until_s, secret.ends_s)
        return until_s


class QuotaSettings(Strict):
    """A limit of the rate of writing to each topic of a pattern."""

    topic: Pattern
    """A pattern of topics; each topic that matches has the quota for itself."""
    bytes_per_s: Rate | None = None
    """The most that may be written to the topic, in bytes per second, at all workers of the data centre together."""
    chunks_per_s: Rate | None = None
    """The most that may be written to the topic, in chunks per second, at all workers of the data centre together."""

    @model_validator(mode="after")
    def _together(self) -> QuotaSettings:
        if self.bytes_per_s is None and self.chunks_per_s is None:
            raise ValueError(f"{self.topic} limits nothing; give it bytes_per_s or chunks_per_s")
        return self


def check_tokens(tokens: list[TokenSettings], issuers: list[IssuerSettings]) -> None:
    """Raises ValueError when two callers have the same name, two secrets the same hash, or an issuer is not there."""
    known = [issuer.name for issuer in issuers]
    if twice := [name for name in known if known.count(name) > 1]:
        raise ValueError(f"issuers: {twice[0]} is given more than once")
    identifiers = [issuer.issuer for issuer in issuers]
    if len({*identifiers}) < len(identifiers):
        raise ValueError("issuers: two of them have the same issuer")
    for token in tokens:
        for rule in token.claims:
            if rule.issuer not in known:
                raise ValueError(f"tokens: {token.name}: claims: there is no issuer {rule.issuer}")
    hashes = [(token.name, secret.sha256) for token in tokens for secret in token.all_secrets]
    for what, entries in ("name", [(token.name, token.name) for token in tokens]), ("sha256", hashes):
        number = Counter(value for _, value in entries)
        if twice := [name for name, value in entries if number[value] > 1]:
            raise ValueError(f"tokens: {' and '.join(twice)} have the same {what}")


def expiring(tokens: Iterable[TokenSettings], now_s: float) -> Iterator[tuple[str, str]]:
    """The callers that soon have no valid secret, each with the time from which on it has none."""
    for token in tokens:
        until_s = token.valid_until_s(now_s)
        if until_s <= now_s + EXPIRES_SOON_S:
            yield token.name, f"{datetime.fromtimestamp(until_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
