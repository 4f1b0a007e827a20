"""Slots of a cluster: a key's slot says which of its shards the key lies on."""

from binascii import crc_hqx

SLOTS = 16_384


def slot_of(key: str) -> int:
    """Slot of a key: CRC16 (XMODEM) of its hash tag, or of the whole key where it has none, modulo SLOTS.

    A hash tag is what stands in the first braces, unless that is nothing.
    """
    _, _, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return crc_hqx((tag if closed and tag else key).encode(), 0) % SLOTS
