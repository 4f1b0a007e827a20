"""Keys of payloads: what they say, whose they are, and how many are asked for at once."""

import time
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


def test_a_key_tells_when_its_payload_was_handed_over() -> None:
    before = time.time_ns() // 1_000_000
    key = keys.payload_key("r", keys.new_nonce(), 0, 12)
    made = keys.made_ms(key)
    assert made is not None
    assert before <= made <= time.time_ns() // 1_000_000
    assert len({keys.new_nonce() for _ in range(1_000)}) == 1_000


def test_a_nonce_of_a_clients_own_tells_no_time() -> None:
    for nonce in (bytes(16), b"\xff" * 16):
        assert keys.made_ms(keys.payload_key("r", nonce, 0, 12)) is None


GOOD = keys.payload_key("r", bytes(16), 1, 12)
IN_PARTS = keys.payload_key("r", bytes(16), 1, (8 << 20) + 1, 5)


def test_a_payload_over_8_mib_lies_in_parts_whose_keys_and_sizes_its_key_says() -> None:
    assert [keys.part_count(size) for size in (1, 8 << 20, (8 << 20) + 1, 10 << 20, (10 << 20) + 1)] == [0, 0, 5, 5, 6]
    sizes = [*4 * [2 << 20], 1]
    assert keys.part_keys(IN_PARTS) == [(f"{IN_PARTS}.{index}", size) for index, size in enumerate(sizes)]
    assert keys.part_keys(GOOD) == [(GOOD, 12)]
    assert keys.all_part_keys([GOOD, IN_PARTS]) == [GOOD, *(f"{IN_PARTS}.{index}" for index in range(5))]
    assert (keys.size_of(IN_PARTS), keys.parts_of(IN_PARTS), keys.parts_of(GOOD)) == ((8 << 20) + 1, 5, 0)
    assert keys.is_key_of("r", IN_PARTS)
    # A client that knows no parts writes as much under one key.
    assert keys.is_key_of("r", IN_PARTS.removesuffix(":5"))


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
        GOOD + ":1",
        IN_PARTS.replace(":5", ":4"),
        IN_PARTS.replace(":5", ":05"),
        IN_PARTS + ":5",
        IN_PARTS + ".0",
        "rb:run:r",
        "",
    ],
)
def test_another_key_is_not_that_of_a_payload_of_the_run(key: str) -> None:
    assert keys.is_key_of("r", GOOD)
    assert not keys.is_key_of("r", key)
