"""A fake gateway for the tests of programs that use `logferry.client`: no Kafka, nothing to install."""

from logferry.client.testing.gateway import FakeGateway as FakeGateway
