"""Tests of the places from which a service may be reached, by what it asks of its callers."""

from typing import Any

import pytest
from pydantic import ValidationError

from buffer_service.settings import Settings

TOKENS = {"tokens_file": "tokens.jsonl"}
TLS = {"tls_cert": "tls.crt", "tls_key": "tls.key"}
OPEN = [
    {"listen": "0.0.0.0:1"},
    {"admin": "[::]:1"},
    {"listen": "buffer.example:1"},
    {"payload_listen": "10.0.0.1:1"},
]


@pytest.mark.parametrize("address", OPEN, ids=str)
@pytest.mark.parametrize(
    ("doors", "why"),
    [({}, "asked for a token"), (TLS, "asked for a token"), (TOKENS, "plain text"), (TOKENS | TLS, None)],
    ids=str,
)
def test_an_open_address_needs_tokens_and_tls(address: dict[str, Any], doors: dict[str, Any], why: str | None) -> None:
    Settings(**address, **doors, insecure=True)
    if why is None:
        Settings(**address, **doors)
        return
    with pytest.raises(ValidationError, match=f"{why}.*--insecure"):
        Settings(**address, **doors)


@pytest.mark.parametrize("doors", [{}, TLS, TOKENS, TOKENS | TLS], ids=str)
def test_loopback_needs_nothing(doors: dict[str, Any]) -> None:
    Settings(listen="127.0.0.1:1", admin="[::1]:1", **doors)


@pytest.mark.parametrize(
    ("doors", "why"),
    [
        ({"tls_cert": "a"}, "go together"),
        ({"tls_key": "a"}, "go together"),
        ({"tls_client_ca": "a"}, "tls_client_ca.*tls_cert"),
        ({"admin_client_ca": "a"}, "admin_client_ca.*tls_cert"),
        ({"store": "redis://s", "store_ca": "a"}, "store_ca.*rediss"),
        ({"store": "redis://s", "payload_listen": "127.0.0.1:1"}, "payload_listen.*embedded"),
        ({"payload_listen": "127.0.0.1:0"}, "payload_listen.*port"),
        ({"payload_listen": "0.0.0.0:1", "insecure": True}, "payload_listen.*payload_address"),
        ({"payload_address": "s:1"}, "payload_address.*payload_listen"),
        ({"store": "redis://s", "payload_address": "store..svc:1"}, "payload_address.*no host"),
        ({"store": "redis://s", "payload_address": f"{64 * 'x'}.svc:1"}, "payload_address.*no host"),
        ({"store": "redis://s", "payload_address": "store:0"}, "payload_address.*port"),
        ({"payload_listen": ".svc:1", "insecure": True}, "payload_listen.*no host"),
        ({"payload_writer": "w:x", "payload_reader": "r:x"}, "payload_writer.*external"),
        ({"store": "redis://s", "payload_writer": "w:x"}, "set both"),
        ({"store": "redis://s", "payload_writer": "w:x", "payload_reader": "r"}, "set both"),
    ],
    ids=str,
)
def test_halves_are_refused(doors: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Settings(**doors)
