"""Rollout functions on simulated engines: what becomes of turns, masks, spans, failures and interruptions."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.attempts import Attempts
from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.simulated import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.simulated_answers import AnswerOptions
from rollout_workers.engine.types import GeneratedSample, PauseMode, SampleRequest
from rollout_workers.episode import Episode
from rollout_workers.episodes import Episodes
from rollout_workers.errors import EpisodeFull, SamplesFailed
from rollout_workers.functions import Rollout, load_rollout
from rollout_workers.prompts import Prompts
from rollout_workers.rollout import SingleTurn
from rollout_workers.samples import GroupProgress
from rollout_workers.slot import EngineSlot
from rollout_workers.versions import Version
from tests.workers.building import eventually, generated, lease, task, time_passes
from tests.workers.chat import END, ChatTokenizer
from tests.workers.scripted import script

PROMPT = np.array([1, 5, 6], np.int32)
Function = Callable[[Episode], Awaitable[float | None]]


async def two_turns(episode: Episode) -> float | None:
    await episode.generate()
    episode.append("tool", ids=[7, 8, 9])
    await episode.generate()
    episode.finish()
    return 0.5


class Scene:
    """One group on one simulated engine."""

    def __init__(self, function: Function, **more: Any) -> None:
        self.most = more.pop("most", 3)
        self.timeout_s = more.pop("timeout_s", 30.0)
        self.continuation: groups_pb2.Group | None = more.pop("continuation", None)
        options = {
            "tokens_per_s": more.pop("tokens_per_s", 1e4),
            "context_length": more.pop("context_length", 1_000),
            "answers": AnswerOptions(length_median=more.pop("length", 10), length_sigma=0),
        }
        self.engine = SimulatedEngine(SimulatedEngineOptions(**options, load_s=0.0, version_label="1.0"))
        self.prompts = Prompts("model", load=lambda _: ChatTokenizer())
        self.rollout = Rollout("m:f", function)
        self.task = task(**{"max_new_tokens": 500, **more})
        self.progress = GroupProgress(lease(self.task), PROMPT)

    async def build(self) -> Episodes:
        if self.continuation is not None:
            self.progress = GroupProgress(lease(self.task, attempt=2, continuation=self.continuation), PROMPT)
            assert self.progress.take_continuation() is None
        if self.task.messages:
            self.progress.prompt_ids = await self.prompts.token_ids(self.task)
        self.slot = EngineSlot("e", self.engine, await self.engine.info(), base_model=None)
        self.slot.current, self.slot.loaded = True, Version(1, 0)
        return Episodes(
            self.progress,
            self.slot,
            Attempts(self.most),
            rollout=self.rollout,
            prompts=self.prompts,
            timeout_s=self.timeout_s,
        )

    async def run(self) -> bool:
        return await asyncio.wait_for((await self.build()).run(), 30)

    def group(self) -> tuple[groups_pb2.GroupHeader, dict[str, Any]]:
        rewards = [sample.reward or 0.0 for sample in self.progress.samples]
        header, payload = self.progress.to_group(rewards, "w")
        return header, dict(read_payload(header, payload))

    def balanced(self) -> bool:
        progress = self.progress
        return progress.received + progress.resumed == progress.generated + sum(progress.discarded.values())


def says_numbers(request: Any, text: str) -> str:
    return f"answer {text.count('tool')}"


# ── what a sample becomes ────────────────────────────────────────────────────


async def test_turns_of_an_environment_are_masked_and_tiled_by_the_spans() -> None:
    scene = Scene(two_turns, group_size=2)
    assert await scene.run()
    header, columns = scene.group()
    sample = header.samples[0]
    assert [(t.role, t.start, t.end) for t in sample.turns] == [
        ("assistant", 3, 13),
        ("tool", 13, 16),
        ("assistant", 16, 26),
    ]
    assert columns["loss_mask"][:26].tolist() == [0] * 3 + [1] * 10 + [0] * 3 + [1] * 10
    assert columns["token_ids"][13:16].tolist() == [7, 8, 9]
    assert np.all(columns["logprobs"][:26][columns["loss_mask"][:26] == 0] == 0)
    assert np.all(columns["logprobs"][:26][columns["loss_mask"][:26] == 1] < 0)
    assert (sample.tokens, sample.loss_tokens, sample.reward) == (26, 20, 0.5)
    assert [(s.start, s.end) for s in sample.spans] == [(3, 26)]
    assert scene.balanced()


async def test_samples_of_a_group_run_side_by_side() -> None:
    together = asyncio.Barrier(4)

    async def rollout(episode: Episode) -> float:
        await together.wait()
        await episode.generate()
        episode.finish("length")
        return float(episode.sample_index)

    scene = Scene(rollout)
    assert await scene.run()
    header, _ = scene.group()
    assert [sample.reward for sample in header.samples] == [0.0, 1.0, 2.0, 3.0]
    assert {sample.finish_reason for sample in header.samples} == {groups_pb2.FINISH_REASON_LENGTH}


async def test_function_sees_its_task_and_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda request, text: "two")
    seen: list[Any] = []

    async def rollout(episode: Episode) -> None:
        turn = await episode.generate()
        seen.extend([episode.metadata, episode.environment, episode.prompt_ids.tolist(), episode.task.task_id])
        seen.extend([turn.text, turn.finish_reason, turn.role, len(turn.logprobs), episode.turns[0].text])
        episode.finish()

    scene = Scene(rollout, group_size=1, metadata_json='{"a": 1}', environment="sums")
    assert await scene.run()
    assert seen == [{"a": 1}, "sums", [1, 5, 6], "t1", "two", "stop", "assistant", 4, "two"]
    assert scene.progress.samples[0].reward is None


async def test_messages_follow_the_chat_template_and_nothing_generated_is_tokenized_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = script(monkeypatch, says_numbers)

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        episode.append("tool", text="4")
        episode.append("user", text="and now?")
        turn = await episode.generate()
        episode.finish()
        return float(turn.text == "answer 1")

    message = tasks_pb2.ChatMessage(role="user", content="2 + 2?")
    scene = Scene(rollout, group_size=1, messages=[message])
    assert await scene.run()
    template = ChatTokenizer().apply_chat_template(
        [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "answer 0"},
            {"role": "tool", "content": "4"},
            {"role": "user", "content": "and now?"},
        ],
        tokenize=True,
        add_generation_prompt=True,
    )
    assert inputs[1] == template
    assert scene.progress.samples[0].reward == 1.0
    # The end token is the model's own, the newline behind it the template's.
    mask = scene.progress.samples[0].mask.tolist()
    ids = scene.progress.samples[0].output_ids.tolist()
    first_end = ids.index(END)
    assert (mask[first_end], mask[first_end + 1]) == (1, 0)
    assert [note.role for note in scene.progress.samples[0].turns] == ["assistant", "tool", "assistant"]


async def test_turn_that_was_cut_is_closed_by_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = script(monkeypatch, lambda request, text: "a long answer")

    async def rollout(episode: Episode) -> None:
        turn = await episode.generate(6)
        assert turn.finish_reason == "length"
        episode.append("user", text="go on")
        await episode.generate()
        episode.finish()

    scene = Scene(rollout, group_size=1)
    assert await scene.run()
    assert inputs[1][:3] == [1, 5, 6]
    assert ChatTokenizer().decode(inputs[1][3:], skip_special_tokens=True) == "a long\nuser\ngo on\nassistant\n"
    assert inputs[1][3 + 6] == END


async def test_prompt_can_be_set_for_each_sample_before_the_first_turn() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.set_prompt(ids=[4] * (episode.sample_index + 1))
        await episode.generate()
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=3)
    assert await scene.run()
    header, columns = scene.group()
    assert [sample.prompt_len for sample in header.samples] == [1, 2, 3]
    assert columns["token_ids"][header.samples[0].tokens :][:2].tolist() == [4, 4]


# ── limits ───────────────────────────────────────────────────────────────────


async def test_new_tokens_of_all_turns_together_are_limited_by_the_task() -> None:
    async def rollout(episode: Episode) -> float:
        while True:
            await episode.generate()
            episode.append("tool", ids=[7])

    scene = Scene(rollout, group_size=1, max_new_tokens=25)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert sample.generated == 25
    assert sample.finish == "length"
    assert [note.finish for note in sample.turns if note.finish] == ["stop", "stop", "length"]


async def test_context_that_is_used_up_ends_the_sample_as_length() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        episode.append("tool", ids=[7] * 40)
        await episode.generate()
        raise AssertionError("not reached")

    scene = Scene(rollout, group_size=1, context_length=50)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert (sample.finish, len(sample), len(sample.turns)) == ("length", 10, 1)


async def test_function_may_decide_about_a_full_sample_itself() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        try:
            episode.append("tool", ids=[7] * episode.room + [7])
        except EpisodeFull:
            episode.finish("length")
            return -1.0
        return 0.0

    scene = Scene(rollout, group_size=1)
    assert await scene.run()
    assert scene.progress.samples[0].reward == -1.0


# ── functions that go wrong ──────────────────────────────────────────────────


async def test_function_that_raises_is_called_again_for_its_sample_alone() -> None:
    calls: Counter[int] = Counter()

    async def rollout(episode: Episode) -> float:
        calls[episode.sample_index] += 1
        await episode.generate()
        if episode.sample_index == 1 and calls[1] == 1:
            raise ZeroDivisionError("a bad day")
        episode.finish()
        return 1.0

    scene = Scene(rollout)
    assert await scene.run()
    assert calls == {0: 1, 1: 2, 2: 1, 3: 1}
    assert scene.progress.discarded == {"rollout_failed": 10}
    assert scene.balanced()


async def forgets_to_finish(episode: Episode) -> float:
    await episode.generate()
    return 1.0


async def never_generates(episode: Episode) -> float:
    return 1.0


async def finishes_nothing(episode: Episode) -> float:
    episode.finish()
    return 1.0


async def returns_text(episode: Episode) -> Any:
    await episode.generate()
    episode.finish()
    return "much"


async def speaks_first(episode: Episode) -> float:
    episode.append("tool", ids=[1])
    return 1.0


async def goes_on_after_the_end(episode: Episode) -> float:
    await episode.generate()
    episode.finish()
    await episode.generate()
    return 1.0


async def invents_tokens(episode: Episode) -> float:
    await episode.generate()
    episode.append("tool", ids=[99_999])
    return 1.0


async def has_no_room(episode: Episode) -> float:
    await episode.set_prompt(ids=[1] * 999)
    await episode.generate()
    episode.append("tool", text="x")
    await episode.generate()
    return 1.0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (forgets_to_finish, r"without having called episode\.finish\(\)"),
        (never_generates, r"without having called episode\.generate\(\)"),
        (finishes_nothing, r"nothing to finish: call generate\(\) first"),
        (returns_text, "it returned 'much', neither a finite number nor None"),
        (speaks_first, r"before the first generate\(\) there is only the prompt: set_prompt\(\) changes it"),
        (goes_on_after_the_end, r"generate\(\) after finish\(\)"),
        (invents_tokens, "token ids 99999 to 99999"),
    ],
)
async def test_error_says_what_the_function_did_wrong(function: Function, why: str) -> None:
    scene = Scene(function, group_size=1, most=1)
    with pytest.raises(SamplesFailed, match=f"m:f failed for sample 0: .*{why}"):
        await scene.run()
    assert scene.balanced()


async def test_prompt_that_leaves_no_room_for_an_answer_of_the_environment_ends_the_sample() -> None:
    scene = Scene(has_no_room, group_size=1, most=1)
    assert await scene.run()
    assert (scene.progress.samples[0].finish, len(scene.progress.samples[0])) == ("length", 1)


async def test_function_that_always_raises_gives_its_sample_up_and_keeps_the_siblings() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        if episode.sample_index == 2:
            raise OSError("the sandbox is gone")
        episode.finish()
        return float(episode.sample_index)

    scene = Scene(rollout)
    with pytest.raises(SamplesFailed, match=r"sample 2 was given up: .*OSError: the sandbox is gone"):
        await scene.run()
    assert scene.engine.answered == {0: 1, 1: 1, 2: 3, 3: 1}
    kept = scene.progress.to_continuation("w")

    second = Scene(two_turns, continuation=kept)
    assert await second.run()
    assert second.engine.answered == {2: 2}
    header, _ = second.group()
    assert [sample.reward for sample in header.samples] == [0.0, 1.0, 0.5, 3.0]
    assert second.balanced()


async def test_function_that_takes_too_long_is_cancelled_and_counted() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        await asyncio.get_running_loop().create_future()
        return 1.0

    scene = Scene(rollout, group_size=1, most=1, timeout_s=0.1)
    with pytest.raises(SamplesFailed, match=r"was not finished in 0\.1 s: rollout function m:f was cancelled"):
        await scene.run()


async def test_swallowed_engine_failure_fails_the_sample_all_the_same() -> None:
    async def rollout(episode: Episode) -> float:
        try:
            await episode.generate()
        except Exception:  # noqa: BLE001 - what the test is about
            return 0.0
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=1, most=2)
    scene.engine.fail_samples(0, 9)
    with pytest.raises(SamplesFailed, match="a fault was injected"):
        await scene.run()
    assert scene.engine.answered == {0: 2}


async def test_engine_that_fails_once_is_not_noticed_by_the_function() -> None:
    calls: Counter[int] = Counter()

    async def rollout(episode: Episode) -> float:
        calls[episode.sample_index] += 1
        return (await two_turns(episode)) or 0.0

    scene = Scene(rollout)
    scene.engine.fail_samples(1, 1)
    assert await scene.run()
    assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    assert scene.engine.answered == {0: 2, 1: 3, 2: 2, 3: 2}


class Breaking(SimulatedEngine):
    """Its first call breaks off, with the first tokens of every sample; sample 1 was just finished."""

    broken = False

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        if self.broken:
            return await super().generate(requests, deadline_s=deadline_s)
        self.broken = True
        error = EngineUnavailable("e", "generating", "connection reset")
        error.partial = tuple(
            generated(r.sample_index, [50, 51, 52], ("1.0", 0, 3), finish="stop" if r.sample_index == 1 else "abort")
            for r in requests
        )
        raise error


@pytest.mark.parametrize("single_turn", [True, False])
async def test_tokens_that_came_before_a_connection_broke_are_kept(single_turn: bool) -> None:
    scene = Scene(two_turns, group_size=2 if single_turn else 1)
    scene.engine.__class__ = Breaking
    making: SingleTurn | Episodes = await scene.build()
    if single_turn:
        making = SingleTurn(scene.progress, scene.slot, Attempts(3), timeout_s=20)
    running = asyncio.create_task(making.run())
    await scene.slot.changes.until(lambda: scene.slot.suspect)
    # What the guard does when the engine answers its probe.
    scene.slot.suspect = False
    scene.slot.changes.notify()
    assert await asyncio.wait_for(running, 20)
    assert scene.progress.samples[0].output_ids[:3].tolist() == [50, 51, 52]
    assert len(scene.progress.samples[0].output_ids) > 10
    if single_turn:
        assert scene.progress.samples[1].output_ids.tolist() == [50, 51, 52]
    assert scene.progress.discarded == {}
    assert scene.balanced()


async def test_two_calls_at_once_are_refused() -> None:
    async def rollout(episode: Episode) -> float:
        await asyncio.gather(episode.generate(), episode.generate())
        return 1.0

    with pytest.raises(SamplesFailed, match=r"generate\(\) while generate\(\) is under way"):
        await Scene(rollout, group_size=1, most=1).run()


# ── weights that change under way ────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_versions_of_every_turn_are_kept_in_every_pause_mode(mode: PauseMode, tmp_path: Any) -> None:
    loaded = asyncio.Event()
    first, second = asyncio.Event(), asyncio.Event()

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        first.set()
        await loaded.wait()
        episode.append("tool", ids=[7, 8])
        second.set()
        await episode.generate()
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=1, tokens_per_s=100.0, length=50)
    running = asyncio.create_task((await scene.build()).run())
    engine, slot = scene.engine, scene.slot

    async def reload(label: str) -> None:
        await engine.pause(mode)
        await engine.load_files(tmp_path, label)
        slot.loaded = Version.parse(label) or slot.loaded
        await engine.resume()

    await eventually(lambda: bool(engine._decoding))
    await time_passes(0.1)
    await reload("1.1")
    await asyncio.wait_for(first.wait(), 10)
    await reload("1.2")
    loaded.set()
    await asyncio.wait_for(second.wait(), 10)
    await eventually(lambda: bool(engine._decoding))
    await time_passes(0.1)
    await reload("1.3")
    assert await asyncio.wait_for(running, 20)
    header, columns = scene.group()
    sample = header.samples[0]
    spans = [(span.version.version, span.start, span.end) for span in sample.spans]
    assert [version for version, _, _ in spans] == [0, 1, 2, 3]
    # The environment's two tokens carry the version of the token before them.
    turn_end = sample.turns[0].end
    assert spans[1][2] == turn_end + 2 == sample.turns[1].end
    assert columns["loss_mask"][turn_end : turn_end + 2].tolist() == [0, 0]
    assert scene.balanced()


# ── interruptions ────────────────────────────────────────────────────────────


async def interrupted(scene: Scene, when: Callable[[], bool]) -> groups_pb2.Group | None:
    episodes = await scene.build()
    running = asyncio.create_task(episodes.run())
    await eventually(when)
    await episodes.stop()
    assert not await asyncio.wait_for(running, 10)
    assert scene.balanced()
    return scene.progress.to_continuation("w")


async def waits_in_a_tool(episode: Episode) -> float:
    """Sample 0 is finished at once, the others are in their tool for ever."""
    await episode.generate()
    if episode.sample_index:
        episode.append("tool", ids=[7])
        await asyncio.get_running_loop().create_future()
    episode.finish()
    return 2.0


async def test_interrupted_samples_start_anew_and_finished_siblings_are_kept() -> None:
    first = Scene(waits_in_a_tool)
    kept = await interrupted(first, lambda: sum(len(s.turns) for s in first.progress.samples) == 7)
    assert kept is not None
    assert first.progress.discarded == {"not_resumable": 30}
    second = Scene(two_turns, continuation=kept)
    assert await second.run()
    assert second.engine.answered == {1: 2, 2: 2, 3: 2}
    header, _ = second.group()
    assert [sample.reward for sample in header.samples] == [2.0, 0.5, 0.5, 0.5]
    assert [len(sample.turns) for sample in header.samples] == [1, 3, 3, 3]


class Resumable:
    """Three turns with a tool between them; goes on from the turns that it finds."""

    resumable = True

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, episode: Episode) -> float:
        self.found.append([turn.role for turn in episode.turns])
        while sum(turn.role == "assistant" for turn in episode.turns) < 3:
            if episode.turns and episode.turns[-1].role == "assistant":
                await self.hold.wait()
                episode.append("tool", ids=[7])
            await episode.generate()
        episode.finish()
        return 1.0


async def test_resumable_function_goes_on_in_the_middle_of_a_turn() -> None:
    function = Resumable()
    first = Scene(function, group_size=1, tokens_per_s=200.0, length=40)

    def in_second_turn() -> bool:
        return any(len(d.request.input_ids) > 40 for d in first.engine._decoding.values())

    async def later() -> groups_pb2.Group | None:
        episodes = await first.build()
        running = asyncio.create_task(episodes.run())
        await eventually(in_second_turn)
        await time_passes(0.1)
        await episodes.stop()
        assert not await asyncio.wait_for(running, 10)
        return first.progress.to_continuation("w")

    kept = await later()
    assert kept is not None
    before = first.progress.samples[0]
    assert 41 < len(before) < 81
    assert first.progress.discarded == {}

    second = Scene(function, group_size=1, length=40, continuation=kept)
    assert await second.run()
    assert function.found == [[], ["assistant", "tool"]]
    after = second.progress.samples[0]
    assert after.output_ids[: len(before)].tolist() == before.output_ids.tolist()
    assert [note.role for note in after.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert after.turns[0].finish == "stop"
    assert second.balanced()
    assert second.progress.resumed == before.generated


async def test_resumable_function_goes_on_between_turns() -> None:
    function = Resumable()
    function.hold.clear()
    first = Scene(function, group_size=2)
    kept = await interrupted(first, lambda: sum(len(s.turns) for s in first.progress.samples) == 2)
    function.hold.set()
    function.found.clear()
    second = Scene(function, group_size=2, continuation=kept)
    assert await second.run()
    assert function.found == [["assistant"], ["assistant"]]
    assert second.engine.answered == {0: 2, 1: 2}


async def test_quarantine_ends_the_functions() -> None:
    scene = Scene(waits_in_a_tool)
    running = asyncio.create_task((await scene.build()).run())
    await eventually(lambda: sum(len(s.turns) for s in scene.progress.samples) == 7)
    scene.slot.quarantined = True
    scene.slot.changes.notify()
    assert not await asyncio.wait_for(running, 10)
    assert scene.progress.unfinished == [1, 2, 3]


async def test_lost_engine_keeps_the_turns_of_a_resumable_function() -> None:
    function = Resumable()
    function.hold.clear()
    scene = Scene(function, group_size=1)
    running = asyncio.create_task((await scene.build()).run())
    await eventually(lambda: len(scene.progress.samples[0].turns) == 1)
    await scene.engine.die()
    function.hold.set()
    await scene.slot.changes.until(lambda: scene.slot.suspect)
    scene.slot.reachable = False
    scene.slot.changes.notify()
    with pytest.raises(SamplesFailed, match="it died") as caught:
        await asyncio.wait_for(running, 10)
    assert isinstance(caught.value.errors[0], EngineUnavailable)
    assert [note.role for note in scene.progress.samples[0].turns] == ["assistant", "tool"]


async def test_single_turn_worker_does_not_go_on_with_the_turns_of_a_function() -> None:
    function = Resumable()
    function.hold.clear()
    first = Scene(function, group_size=1)
    kept = await interrupted(first, lambda: len(first.progress.samples[0].turns) == 1)
    second = Scene(function, group_size=1, continuation=kept)
    await second.build()
    assert await SingleTurn(second.progress, second.slot, Attempts(1), timeout_s=10).run()
    assert second.progress.discarded == {"another_function": 10}
    assert second.progress.samples[0].turns == []


# ── loading ──────────────────────────────────────────────────────────────────


def test_function_is_loaded_by_name() -> None:
    assert load_rollout("tests.workers.test_rollout_functions:two_turns").function is two_turns


def plain(episode: Episode) -> float:
    return 0.0


def test_plain_function_is_refused() -> None:
    with pytest.raises(InvalidField, match="a coroutine function"):
        load_rollout("tests.workers.test_rollout_functions:plain")
