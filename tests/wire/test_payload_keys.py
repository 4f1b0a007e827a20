"""Keys of payloads: what they say, whose they are, and how many are asked for at once."""

from typing import TYPE_CHECKING

import pytest
from xxhash import xxh3_64_intdigest

from buffer_wire.payloads import keys

if TYPE_CHECKING:
    from buffer_wire.codec import Buffer


def test_a_checksum_is_the_same_of_a_payload_whole_and_in_pieces() -> None:
    payload = bytes(range(256)) * 400
    pieces: list[Buffer] = [payload[:1], b"", memoryview(payload)[1:70_000], payload[70_000:]]
    assert keys.payload_checksum(*pieces) == keys.payload_checksum(payload) == xxh3_64_intdigest(payload)
    assert keys.payload_checksum() == keys.payload_checksum(b"")


def test_checksums_are_those_that_clients_in_other_languages_compute() -> None:
    # The first is the known answer of XXH3-64 for no bytes at all.
    assert keys.payload_checksum(b"") == 0x2D06800538D394C2
    assert keys.payload_checksum(b"payload") == 0x32FE61F05B2D8D7B
    assert keys.group_checksum(b"header", 0x32FE61F05B2D8D7B) == 0x8D6BB4ADD0687B7B


def test_what_is_asked_for_at_once_stays_below_its_limit() -> None:
    named = [keys.payload_key("r", keys.new_nonce(), 0, size) for size in (1 << 20, 3 << 20, 1, 5 << 20, 2, 3)]
    assert keys.portions(named) == [named[:2], named[2:3], named[3:4], named[4:]]
    assert keys.portions([]) == []
    assert keys.PORTION_BYTES == 4 << 20


GOOD = keys.payload_key("r", bytes(16), 1, 12)


@pytest.mark.parametrize(
    "key",
    [
        GOOD.replace(":r:", ":other:"),
        GOOD + "x",
        GOOD + "\r\n",
        GOOD.replace(":12", ":012"),
        GOOD.replace(":12", ":0"),
        GOOD.replace(":12", f":{1 << 31}"),
        GOOD.replace(":12", ":99999999999999"),
        "rb:run:r",
        "",
    ],
)
def test_another_key_is_not_that_of_a_payload_of_the_run(key: str) -> None:
    assert keys.is_key_of("r", GOOD)
    assert not keys.is_key_of("r", key)
