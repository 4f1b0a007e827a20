"""Just pushed payloads that a process keeps for pulls: bounded by the messages that they keep alive, taken once."""

from buffer_service.store.recent import RecentPayloads


def bundle(*sizes: int) -> list[memoryview]:
    """Bodies of these sizes that are views of one message."""
    message = bytes(sum(sizes))
    bodies, start = [], 0
    for size in sizes:
        bodies.append(memoryview(message)[start : start + size])
        start += size
    return bodies


def test_a_body_is_given_once() -> None:
    recent = RecentPayloads(100)
    (body,) = bundle(10)
    recent.put([("a", body)])
    assert recent.take(["b", "a"]) == [None, body]
    assert recent.take(["a"]) == [None]
    assert recent.held_bytes == 0


def test_a_message_is_counted_until_its_last_body_is_taken() -> None:
    recent = RecentPayloads(100)
    recent.put(zip("abc", bundle(20, 20, 20), strict=True))
    assert recent.held_bytes == 60
    recent.take(["a", "c"])
    assert recent.held_bytes == 60
    recent.take(["b"])
    assert recent.held_bytes == 0


def test_the_oldest_message_goes_with_all_its_bodies() -> None:
    recent = RecentPayloads(100)
    recent.put(zip("ab", bundle(30, 30), strict=True))
    recent.put(zip("cd", bundle(20, 20), strict=True))
    assert recent.held_bytes == 100
    recent.put(zip("e", bundle(1), strict=True))
    assert recent.held_bytes == 41
    assert [body is None for body in recent.take(list("abcde"))] == [True, True, False, False, False]


def test_a_body_pins_its_whole_message_and_is_counted_so() -> None:
    recent = RecentPayloads(100)
    first, _ = bundle(1, 99)
    recent.put([("a", first)])
    assert recent.held_bytes == 100
    recent.put(zip("b", bundle(1), strict=True))
    assert recent.take(["a"]) == [None]


def test_what_is_larger_than_the_bound_is_not_held() -> None:
    recent = RecentPayloads(100)
    recent.put(zip("a", bundle(101), strict=True))
    assert (recent.held_bytes, recent.take(["a"])) == (0, [None])
    none = RecentPayloads(0)
    none.put(zip("a", bundle(1), strict=True))
    assert none.take(["a"]) == [None]


def test_bodies_that_are_bytes_are_messages_of_their_own() -> None:
    recent = RecentPayloads(100)
    recent.put([("a", b"12345"), ("b", b"678")])
    assert recent.held_bytes == 8
    assert recent.take(["a", "b"]) == [b"12345", b"678"]
