"""SIGHUP: tokens and certificate of a worker, of gateway or mirror, are taken from the configuration again."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Callable
from typing import TypeVar

from logferry.gateway import log
from logferry.gateway.config import ConfigError, ServiceConfig
from logferry.gateway.http.auth import Gate
from logferry.gateway.tls import load_certificate, server_context

_Config = TypeVar("_Config", bound=ServiceConfig)


def reload_on_hangup(
    reload: Callable[[], _Config],
    gate: Gate,
    context: ssl.SSLContext | None,
    more: Callable[[_Config], None] = lambda _: None,
) -> None:
    """From now on. ``context``: of the connections to this worker; ``more``: takes over what the service has besides.

    Connections stay open; an invalid configuration changes nothing.
    """

    def take_over() -> None:
        try:
            fresh = reload()
            if context is not None and fresh.tls is not None:
                server_context(fresh.tls)  # checked apart: half of a pair must not be loaded
            gate.replace(fresh.tokens)
            more(fresh)
            if context is not None and fresh.tls is not None:
                load_certificate(context, fresh.tls)
        except (ConfigError, ValueError) as error:
            log.event("configuration_not_reloaded", reason=str(error))
        else:
            log.event("configuration_reloaded", tokens=[token.name for token in fresh.tokens])

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, take_over)
