"""What a broker must take, before a worker serves."""

from __future__ import annotations

import pytest
from logferry.gateway.errors import WeakKafka
from logferry.gateway.kafka.produce_request import BrokerAbilities
from logferry.gateway.service.preflight import check_abilities

_ENOUGH = BrokerAbilities(produce=13, end_txn=5, transactions=2)


def test_a_broker_of_this_age_is_taken() -> None:
    check_abilities({"a:9092": _ENOUGH, "b:9092": BrokerAbilities(14, 6, 3)})


@pytest.mark.parametrize("field", BrokerAbilities._fields)
def test_an_older_broker_is_refused_by_its_address(field: str) -> None:
    old = _ENOUGH._replace(**{field: getattr(_ENOUGH, field) - 1})
    with pytest.raises(WeakKafka, match=r"b:9092.*transaction\.version"):
        check_abilities({"a:9092": _ENOUGH, "b:9092": old})
