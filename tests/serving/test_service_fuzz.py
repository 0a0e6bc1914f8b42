"""A hundred damaged requests; `scripts/fuzz_service.py` sends as many as you like."""

from __future__ import annotations

from contextlib import closing

from fuzz.service_campaign import Campaign
from serving.conftest import Serving
from serving.servers import Running
from ttapca.serving.http_server import DrainingServer, listen


def test_damaged_requests_are_refused_and_change_nothing(serving: Serving) -> None:
    service = serving().service
    server = Running(DrainingServer(service), listen("127.0.0.1", 0))
    with closing(Campaign(server.http, service.pool)) as campaign:
        findings = campaign.run(100)
    server.end()
    assert findings.faults == []
    assert sum(findings.statuses.values()) == 100
    assert {status // 100 for _, status in findings.statuses} == {2, 4}
    assert len({kind for kind, _ in findings.statuses}) == 7
