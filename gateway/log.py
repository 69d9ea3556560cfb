"""The log of gateway and mirror: one JSON line per event on standard error, and the table of all events.

A line holds the time (UTC), the level, the event's name and its facts. ERROR means that an operator must act.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

# Every event by its level. What each means and what to do: ops/docs/reference/log-events.md, held equal by a test.
_BY_LEVEL: Final = {
    "info": """
        worker_started worker_stopping worker_stopped configuration_reloaded certificates_reloaded state_topic_created
        staging_topic_created staging_topic_grown
        lanes_assigned lanes_changed lane_open lane_revoked session_reader_gone graphite_back clocks_agree
        link_recovered target_created target_grown target_altered history_pruned partition_resumed partition_accepted
        delivery_replayed
        keeper_acts keeper_stands_by keeper_act keeper_finding_over
    """,
    "warning": """
        kafka_unreachable open_file_limit_low lane_failed group_view_failed group_membership_failed marker_written
        session_ended library_message
        session_leave_failed topics_not_visible graphite_unreachable link_waits
        clock_differs many_sources_silent broker_settings_hidden topics_created_by_use
        positions_not_carried history_not_pruned partition_refused transaction_not_ended session_partition_damaged
        session_partition_leaderless
        token_expires admin_log_failed issuer_unreachable quota_usage_failed
        tokens_unencrypted consumer_shared target_not_altered copy_begins_later transaction_open
        delivery_set_aside staging_not_freed subscription_left_configuration
        keeper_finding keeper_act_failed keeper_look_failed keeper_fenced
    """,
    "error": """
        worker_died refused_to_start cannot_listen kafka_away configuration_not_reloaded request_failed
        partition_stopped lane_stopped broker_too_weak
        delivery_stopped delivery_failed subscription_not_configured subscription_orphaned
    """,
}
EVENTS: Final[dict[str, str]] = {name: level for level, names in _BY_LEVEL.items() for name in names.split()}


def event(name: str, **facts: Any) -> None:
    """Writes the line of an event of `EVENTS`; any other name is a KeyError, so that no test lets it pass."""
    level = EVENTS[name]
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    line = json.dumps({"time": stamp, "level": level, "event": name, **facts}, ensure_ascii=False, default=str)
    print(line, file=sys.stderr, flush=True)
