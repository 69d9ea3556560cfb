"""The labels of a node's pods, from its kubelet: a hint for attributes, without which everything runs all the same.

A thread asks for all pods of the node, when a pod comes up that is not known, and every `EVERY_S` besides. The labels
of a pod that is gone are kept for its last lines; one that is made again under its name is another one, by its uid.
Whatever fails is logged once, and tried again.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from logferry.client.events import log_event
from logferry.client.transport.cluster import read_token
from logferry.client.transport.connections import Connections, Dialer, NoResponse
from logferry.gateway.contract.names import MAX_ATTRIBUTE_VALUE_BYTES, MAX_ATTRIBUTES

EVERY_S = 300.0
LEAST_PAUSE_S = 1.0
FAILED_PAUSE_S = 30.0
MISSED_S = 30.0  # where a pod has a log and is not in the answer
MISSED_TRIES = 10  # so often; afterwards it is taken for gone
WAIT_S = 2.0  # so long the first lines of an unknown pod wait for its labels
LARGEST_ANSWER_BYTES = 16 << 20
MOST_PODS = 4000
MOST_LABELS = 32
OF_CHUNK = 8  # so many attributes a chunk adds, at most
_HASH = "kubernetes.io/config.hash"
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9._-]")

Pod = tuple[str, str, str]  # namespace, name and uid; without uid whichever has the name


class HasAttributes(Protocol):
    attributes: dict[str, str]


class KubeletSettings(NamedTuple):
    url: str
    token_file: str | None = None
    ca_file: str | None = None


def label_attributes(labels: dict[str, str]) -> dict[str, str]:
    """``app.kubernetes.io/name`` becomes ``label.app.kubernetes.io_name``. The first `MOST_LABELS`, by name."""
    found: dict[str, str] = {}
    for key in sorted(labels)[:MOST_LABELS]:
        name = "label." + _NOT_IN_A_NAME.sub("_", key.lower())
        value = str(labels[key]).encode()[:MAX_ATTRIBUTE_VALUE_BYTES].decode(errors="ignore")
        found.setdefault(name[:64], value)
    return found


def with_labels(labels: Mapping[str, str], attributes: Mapping[str, str]) -> dict[str, str]:
    """As many of the labels as a chunk has room for."""
    found = dict(attributes)
    for name, value in labels.items():
        if name in found or len(found) < MAX_ATTRIBUTES - OF_CHUNK:
            found[name] = value
    return found


def labels_of_pods(document: Any) -> dict[Pod, dict[str, str]]:
    """Of a PodList. Raises ValueError."""
    try:
        found = {}
        for pod in document["items"]:
            facts = pod["metadata"]
            # The folder of a static pod has the hash of its file in place of the uid that the API knows.
            uids = {"", str(facts.get("uid", "")), str((facts.get("annotations") or {}).get(_HASH, ""))}
            labels = label_attributes(dict(facts.get("labels") or {}))
            found.update({(str(facts["namespace"]), str(facts["name"]), uid): labels for uid in uids})
        return found
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"not a list of pods: {type(error).__name__} {error}") from None


class PodLabels:
    """Token and authority are read for each request, because both are renewed."""

    def __init__(self, kubelet: KubeletSettings) -> None:
        self._url = kubelet.url.rstrip("/") + "/pods"
        self._token_file = kubelet.token_file
        self._ca_file = kubelet.ca_file
        self._known: dict[Pod, dict[str, str]] = {}
        self._missed: dict[Pod, float] = {}  # since when its labels are asked for
        self._asked = threading.Event()
        self._over = threading.Event()
        self._works = True
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        self._thread.start()

    def label(self, source: HasAttributes, now: float) -> bool:
        """Gives it the labels of the pod that it names. False: they are asked for, and worth a short wait."""
        attributes = source.attributes
        namespace, pod, uid = (attributes.get(name, "") for name in ("namespace", "pod", "pod_uid"))
        key = namespace, pod, uid
        found = self._known.get(key)
        if found is not None:
            self._missed.pop(key, None)
            source.attributes = with_labels(found, attributes)  # another one: batches that were cut have theirs
        elif namespace and pod and key not in self._missed:
            self._missed[key] = now
            while len(self._missed) > MOST_PODS:
                self._missed.pop(next(iter(self._missed)))
            self._asked.set()
        return not self._works or now - self._missed.get(key, -math.inf) >= WAIT_S

    def close(self) -> None:
        self._over.set()
        self._asked.set()

    def _run(self) -> None:
        tries = 0
        while not self._over.is_set():
            tries = 1 if self._asked.is_set() else tries + 1
            self._asked.clear()
            self._ask()
            self._over.wait(LEAST_PAUSE_S if self._works else FAILED_PAUSE_S)
            if self._works:
                self._asked.wait(MISSED_S if self._missed and tries < MISSED_TRIES else EVERY_S)

    def _ask(self) -> None:
        headers = {"User-Agent": "logferry-push", "Accept": "application/json"}
        try:
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {read_token(self._token_file)}"
            connections = Connections(10.0, Dialer(self._ca_file), LARGEST_ANSWER_BYTES)
            reply = connections.exchange(self._url, headers, None, "GET")
            connections.close()
            if reply.status != 200:
                raise ValueError(f"status {reply.status}: {reply.body[:200].decode(errors='replace')}")
            pods = labels_of_pods(json.loads(reply.body))
        except (NoResponse, OSError, ValueError, RecursionError) as error:
            if self._works:
                log_event("kubelet-unusable", url=self._url, reason=error)
            self._works = False
            return
        self._works = True
        known = {**{key: labels for key, labels in self._known.items() if key not in pods}, **pods}
        while len(known) > MOST_PODS:
            known.pop(next(iter(known)))
        self._known = known
