"""Slots of keys, beside redis-py's own."""

import random

from redis.crc import key_slot

from buffer_wire.resp.slots import SLOTS, slot_of


def test_every_key_has_the_slot_that_a_cluster_gives_it() -> None:
    drawn = random.Random(1)
    keys = ["".join(drawn.choices("a{}é:0", k=drawn.randrange(12))) for _ in range(20_000)]
    for key in ["123456789", "{user}.a", "{}a", "a{b}{c}", "a{{b}}", "{a", "a}b{", "", *keys]:
        assert slot_of(key) == key_slot(key.encode()), key
    assert slot_of("123456789") == 0x31C3 % SLOTS
