"""Room in memory for messages: who waits for it, who gets it, and that all of it comes back."""

import asyncio

import pytest

from buffer_service.rpc.flow.room import Expected, GaveWay, Room, Share
from buffer_wire.errors import NotReady


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_came_first_is_served_first_and_a_small_one_does_not_overtake() -> None:
    room = Room(100)
    held = await room.take(60)
    async with asyncio.TaskGroup() as tasks:
        large, small = tasks.create_task(room.take(50)), tasks.create_task(room.take(10))
        await settled()
        assert room.waiting == 2
        held.resize(40)
    assert room.used_bytes == 100
    for share in (held, large.result(), small.result()):
        share.close()
        share.close()
    assert room.used_bytes == 0


async def test_what_is_larger_than_all_the_room_is_let_in_alone() -> None:
    room = Room(100)
    with await room.take(1) as small:
        large = asyncio.create_task(room.take(500))
        await settled()
        assert not large.done()
        small.close()
        with await large:
            assert room.free_bytes == 0
    assert room.used_bytes == 0


async def test_who_gives_up_lets_the_next_one_in() -> None:
    room = Room(100)
    with await room.take(60):
        first, second = asyncio.create_task(room.take(90)), asyncio.create_task(room.take(40))
        await settled()
        first.cancel()
        with await second:
            assert room.used_bytes == 100
    assert (room.used_bytes, room.waiting) == (0, 0)


async def test_room_that_comes_to_one_who_is_just_being_cancelled_comes_back() -> None:
    room = Room(100)
    held = await room.take(100)
    waiting = asyncio.create_task(room.take(100))
    await settled()
    held.close()
    assert room.used_bytes == 100, "it has the room, and does not know yet"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert room.used_bytes == 0


async def test_a_wait_for_room_ends_and_says_what_it_waited_for() -> None:
    room = Room(100)
    with await room.take(100):
        with pytest.raises(NotReady, match=r"100 bytes.*blocked_bytes"):
            await room.take(1, longest_s=0)
        assert room.waiting == 0


async def silent(room: Room, share: Share, patience_s: float) -> None:
    with share:
        async with room.of_client(share, patience_s):
            await asyncio.get_running_loop().create_future()


async def test_silent_clients_give_way_the_longest_first_and_no_more_than_needed() -> None:
    room = Room(100)
    clients = [asyncio.create_task(silent(room, await room.take(25), patience)) for patience in (3_600, 0, 0, 0)]
    await settled()
    assert room.used_bytes == 100
    with await room.take(45):
        assert [client.done() for client in clients] == [False, True, True, False]
        for client in clients[1:3]:
            with pytest.raises(GaveWay, match="25 bytes"):
                await client
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert room.used_bytes == 0


async def test_nobody_has_to_give_way_where_there_is_room() -> None:
    room = Room(100)
    client = asyncio.create_task(silent(room, await room.take(50), 0))
    await settled()
    with await room.take(50):
        await settled()
        assert not client.done()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client


async def test_who_holds_no_room_has_none_to_give() -> None:
    room = Room(100)
    clients = [asyncio.create_task(silent(room, await room.take(size), 0)) for size in (0, 100)]
    await settled()
    with await room.take(50):
        assert [client.done() for client in clients] == [False, True]
    clients[0].cancel()
    await asyncio.gather(*clients, return_exceptions=True)


def test_the_next_message_is_taken_for_as_large_as_the_largest_of_late() -> None:
    expected = Expected(100, remembered=2)
    expected.saw(10)
    assert expected.size == 100
    expected.saw(20)
    assert expected.size == 20
    expected.saw(5)
    expected.saw(6)
    assert expected.size == 6


async def test_what_is_not_needed_yet_leaves_half_of_the_room_to_those_who_come() -> None:
    room = Room(100)
    with await room.take(30):
        assert room.take_spare(21) is None
        share = room.take_spare(20)
        assert share is not None
        share.close()
    assert room.used_bytes == 0
