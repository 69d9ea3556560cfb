"""URLs and tokens that users give: what is accepted. Pure. Loads little, and runs on Python 3.9."""

from __future__ import annotations

from urllib.parse import urlsplit


def origin_of(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None if it is not an http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port


def check_url(url: object, where: str) -> None:
    """Raises ValueError, which begins with ``where``."""
    if not isinstance(url, str) or origin_of(url) is None or "@" in url or "?" in url or "#" in url:
        raise ValueError(f"{where} {url!r} is not http(s)://host[:port][/path]")


def check_token(text: str, where: str) -> str:
    """The token, fit for a header. Raises ValueError, which names ``where`` and never the token."""
    token = text.strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ValueError(f"{where}: does not hold a token, which is one word of printable ASCII")
    return token
