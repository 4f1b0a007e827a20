"""Shares of environments: stride scheduling of batches and of leases, each by itself."""

from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule
from tests.oracle.behaviour.world import World, shares


def fill(world: World, count: int, *environments: str) -> None:
    for environment in environments:
        for index in range(count):
            world.push(f"{environment}{index}", environment=environment)


def drawn(world: World, batches: int = 1) -> str:
    """Environments, by initial, of the groups that batches draw: one after another, for batches of one group."""
    return "".join(world.names()[0][0] for _ in range(batches))


def submit(world: World, count: int, *environments: str) -> None:
    for environment in environments:
        world.submit(*(f"{environment}{index}" for index in range(count)), environment=environment)


def leased(world: World, count: int) -> str:
    return "".join(grant.task_id[0] for grant in world.lease(count).grants)


def test_batches_are_divided_by_shares_in_the_exact_order_of_strides() -> None:
    world = World(batch_groups=1, max_queued_groups=99, environments=shares(a=3, b=2, c=1))
    fill(world, 12, "c", "b", "a")
    assert drawn(world, 12) == "abcabaabcaba"


def test_the_division_goes_on_from_batch_to_batch() -> None:
    world = World(batch_groups=2, max_queued_groups=99, environments=shares(a=3, b=1))
    fill(world, 8, "a", "b")
    names = [name[0] for _ in range(6) for name in world.names()]
    assert (names.count("a"), names.count("b")) == (8, 4), "a had no more than eight"
    assert sorted(names[:8]) == ["a"] * 6 + ["b"] * 2


def test_within_an_environment_the_order_decides() -> None:
    world = World(batch_groups=4, max_queued_groups=9, environments=shares(a=1), order="lifo")
    fill(world, 4, "a", "b")
    assert sorted(world.names()) == ["a2/0", "a3/0", "b2/0", "b3/0"]


def test_stalest_first_holds_within_an_environment_also_after_a_resume() -> None:
    world = World(batch_groups=1, max_queued_groups=9, environments=shares(a=1), order="stalest_first")
    world.train(1, head=9)
    for name, head in (("a1", 7), ("a2", 9), ("a3", 8), ("a4", 1)):
        world.push(name, head=head, environment="a")
    assert world.names(train_version=9) == ["a4/0"]
    world.resume(1)
    world.push("a5", environment="a")
    assert [world.names(train_version=9)[0] for _ in range(4)] == ["a5/0", "a1/0", "a2/0", "a3/0"]


def test_an_environment_without_a_share_has_one() -> None:
    world = World(batch_groups=1, max_queued_groups=99, environments=shares(a=2))
    fill(world, 6, "a", "b")
    assert drawn(world, 6) == "abaaba"


def test_a_rule_without_a_share_divides_nothing() -> None:
    world = World(batch_groups=1, max_queued_groups=9, environments=(EnvironmentRule(environment="b", priority=9),))
    fill(world, 2, "a", "b")
    assert drawn(world, 4) == "aabb"


def test_what_an_environment_cannot_use_goes_to_the_others() -> None:
    world = World(batch_groups=4, max_queued_groups=9, environments=shares(a=9, b=1))
    fill(world, 4, "b")
    assert world.batch().total_groups == 4


def test_share_zero_gets_something_only_when_nobody_else_has_any() -> None:
    world = World(batch_groups=1, max_queued_groups=9, environments=shares(z=0, y=0))
    fill(world, 2, "z", "y", "a")
    assert drawn(world, 6) == "aazzyy"


def test_share_zero_takes_no_turns() -> None:
    world = World(batch_groups=1, max_queued_groups=99, environments=shares(z=0, a=1, b=1))
    fill(world, 3, "z")
    assert drawn(world, 3) == "zzz"
    fill(world, 2, "a", "b")
    assert drawn(world, 4) == "abab"


def test_shares_change_live_as_a_curriculum_does() -> None:
    world = World(batch_groups=1, max_queued_groups=99, environments=shares(easy=1, hard=0))
    fill(world, 20, "easy", "hard")
    assert drawn(world, 4) == "eeee"
    world.change(environments=shares(easy=1, hard=1))
    assert drawn(world, 4) == "hehe", "hard starts from the virtual time"
    world.change(environments=shares(easy=0, hard=1))
    assert drawn(world, 4) == "hhhh"


def test_without_shares_the_turns_are_forgotten() -> None:
    world = World(batch_groups=1, max_queued_groups=99, environments=shares(a=1, b=1))
    fill(world, 9, "a", "b")
    assert drawn(world, 1) == "a"
    world.change(environments=())
    world.change(environments=shares(a=1, b=1))
    assert drawn(world, 1) == "a", "as at the start"


def test_leases_are_divided_by_shares_apart_from_batches() -> None:
    world = World(batch_groups=1, max_queued_groups=99, environments=shares(a=3, b=2, c=1))
    submit(world, 12, "c", "b", "a")
    fill(world, 2, "x", "y")
    drawn(world, 2)
    assert leased(world, 6) == "abcaba"
    assert leased(world, 6) == "abcaba"


def test_tasks_that_back_off_have_no_turn() -> None:
    world = World(environments=shares(a=1, b=1), retry_backoff_ms=100)
    submit(world, 1, "a")
    world.fail(world.lease_one().lease_id)
    submit(world, 3, "b")
    assert leased(world, 2) == "bb"
    world.now += 100
    assert leased(world, 2) == "ab", "it starts from the virtual time"


def test_share_zero_is_leased_by_the_order_of_pending_tasks() -> None:
    world = World(environments=shares(y=0, z=0))
    world.submit("z", environment="z")
    world.submit("y", environment="y", priority=1)
    world.submit("m", environment="m")
    assert leased(world, 3) == "myz"


def test_a_repeated_lease_request_takes_no_turn() -> None:
    world = World(environments=shares(a=1, b=1))
    submit(world, 4, "a", "b")
    world.lease(request_id="again")
    world.lease(request_id="again")
    assert leased(world, 1) == "b"


def test_a_recycled_task_is_leased_in_the_environment_it_was_submitted_with() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle", environments=shares(a=1, b=1))
    submit(world, 1, "a")
    world.push(world.lease_one(), environment="other")
    assert isinstance(world.pull(train_version=1), ops.Short)
    submit(world, 2, "b")
    assert leased(world, 3) == "bab", "a had its turn"
