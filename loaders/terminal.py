"""What the commands of the loader and of operators show on a terminal by rich."""

from __future__ import annotations

from logferry.gateway.contract.names import visible
from rich import markup


def escape(text: str) -> str:
    """Text of others: neither rich's markup nor the terminal's own escapes have an effect."""
    return markup.escape(visible(text))
