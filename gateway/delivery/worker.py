"""One worker of `deliver`: its parts, and its work in the background."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from logferry.gateway import log
from logferry.gateway.config import Limits
from logferry.gateway.delivery.catalog import SubscriptionView
from logferry.gateway.delivery.config import DeliverConfig
from logferry.gateway.delivery.lane import DeliveryLane
from logferry.gateway.delivery.pages import BatchRoom, TopicPages
from logferry.gateway.delivery.status_api import DeliverApi
from logferry.gateway.delivery.unit import UnitServices
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Routes
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service import preflight
from logferry.gateway.service.processes import Parts, serve_worker
from logferry.gateway.service.worker import compare_clocks, watch_clocks
from logferry.gateway.subscriptions import StoredSubscription
from logferry.gateway.topics.compacted_store import CompactedStore
from logferry.gateway.topics.copies import OffsetTranslation


async def serve(config: DeliverConfig, worker: int, reload: Callable[[], DeliverConfig]) -> None:
    """Delivers as long as `serve_worker` serves. Changed subscriptions in the file take a restart."""
    await serve_worker(config, worker, reload, partial(_parts, config))


async def _parts(
    config: DeliverConfig, url: str, kafka: KafkaClient, gate: Gate, stack: AsyncExitStack
) -> Parts[DeliveryLane]:
    await preflight.check(kafka, config, ())
    await compare_clocks(kafka)
    store = CompactedStore(kafka, config.subscriptions_topic, config.accept_weak_kafka, StoredSubscription.decode)
    await store.create()
    await store.refresh()
    await publish(store, config, kafka.clock.now_ms())
    pages, room = TopicPages(kafka, config.limits.pages_bytes), BatchRoom(config.limits.batches_bytes)

    def adopt() -> None:
        for lane in list(ownership.lanes.values()):
            lane.adopt()

    view = SubscriptionView(kafka, config, store, OffsetTranslation(kafka, config.prefix, config.dc), pages, adopt)
    stack.push_async_callback(view.close)
    services = UnitServices(kafka, pages, room, view.position, view.letters)
    make_lane = partial(DeliveryLane, config=config, services=services, view=view)
    ownership = Ownership(config, url, kafka, make_lane, lambda: config.lanes)
    routes = Routes(gate)
    DeliverApi(config, ownership, view, room).add_to(routes)
    for work in (
        pages.watch(),
        view.follow_subscriptions(),
        view.follow_topics(),
        view.health.watch(kafka, view.min_in_sync),
        watch_clocks(kafka),
    ):
        ownership.run_in_background(work)
    return Parts(ownership, routes, Limits())


async def publish(store: CompactedStore[StoredSubscription], config: DeliverConfig, now_ms: int) -> None:
    """Writes the subscriptions of the configuration that differ from what is stored.

    One that the file does not have any more rests, and keeps its positions: another host's file may have it still. It
    continues when a worker starts whose file has it. A subscription that was made by HTTP is never changed: one of its
    name in the file is an error, by name.
    """
    for name, definition in config.subscriptions.items():
        stored = store.entries.get(name)
        if stored is None:
            fresh = StoredSubscription(
                id=uuid.uuid4().hex, created_ms=now_ms, definition=definition, is_configured=True
            )
            await store.put(name, fresh)
        elif not stored.is_configured or stored.definition.order != definition.order:
            why = "its order cannot change" if stored.is_configured else "one of this name was made by HTTP"
            log.event("subscription_not_configured", subscription=name, why=f"{why}; remove it first, or rename this")
        elif stored.definition != definition or stored.left_configuration:
            found = {"definition": definition, "left_configuration": False}
            await store.put(name, stored.model_copy(update=found))
    for name, stored in list(store.entries.items()):
        if stored.is_configured and not stored.left_configuration and name not in config.subscriptions:
            log.event("subscription_left_configuration", subscription=name)
            await store.put(name, stored.model_copy(update={"left_configuration": True}))
    await store.refresh()
