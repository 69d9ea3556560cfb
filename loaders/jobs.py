"""Many topics into many tables: a job whose path holds ``{topic}`` is one job for each topic. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from logferry.gateway.contract.chunk import split_topic
from logferry.loaders.config import TOPIC, TableJob
from logferry.loaders.errors import ConfigError
from logferry.loaders.storage.ledger import TablePaths


def expand(job: TableJob, topics: Iterable[str]) -> list[TableJob]:
    """The jobs that a template stands for. ``topics``: what its patterns mean now, with their data centres.

    The topics of one name go into one table, whatever data centre they come from.
    """
    by_name: dict[str, list[str]] = {}
    for topic in sorted(set(topics)):
        by_name.setdefault(split_topic(topic)[1], []).append(topic)
    path = str(job.path)
    return [
        TableJob.model_validate(
            {**job.model_dump(exclude_defaults=True), "path": path.replace(TOPIC, name), "topics": found}
        )
        for name, found in by_name.items()
    ]


def check_apart(jobs: Sequence[TableJob]) -> None:
    """No folder may belong to two tables. Raises ConfigError."""
    taken: dict[str, str] = {}
    for job in jobs:
        for path in TablePaths.of(job.path).every:
            other = taken.setdefault(str(path), str(job.path))
            if other != str(job.path):
                raise ConfigError(f"{path} would belong to two tables, {other} and {job.path}")
