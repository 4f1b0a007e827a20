"""Real verifiers environments through the worker: their prompts, tools and rewards, our engine's tokens.

Needs the extra `verifiers` (make test-verifiers).
"""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verifiers")

from buffer_wire.errors import InvalidField
from buffer_wire.layout import read_payload
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated import engine as simulated
from rollout_workers.engine.simulated.answers import Answer, AnswerOptions
from rollout_workers.engine.types import SampleRequest
from rollout_workers.functions import rollout_of
from tests.support.sglang_python import sglang_python
from tests.support.tiny_model import write_random_model
from tests.workers.building import eventually, options, task, time_passes, weight_files
from tests.workers.fake_service import FakeService
from tests.workers.process import worker_process
from tests.workers.working import all_done, given_back, working

ENVIRONMENTS = Path(__file__).parent / "verifiers_environments"
QUICK = SimulatedOptions(tokens_per_s=5_000.0, vocab_size=400)
RENDERER = {"renderer": {"name": "qwen3", "enable_thinking": False}}

# Libraries of verifiers, not of ours, and none of them within its reach.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    path = os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Made once a process, and a test has an event loop of its own.
    monkeypatch.setattr("renderers.client._max_prompt_len_lock", asyncio.Lock())


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen's special tokens around bytes, so that the tokenizer of a real model need not be there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>"]
    specials += ["</tool_response>", "<think>", "</think>"]
    model = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": specials})
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    return str(path)


class Model:
    """Answers in text, by the text that it is given, ended by <|im_end|>."""

    def __init__(self, path: str, says: Any) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.says = says
        self.read: list[str] = []

    def __call__(self, request: SampleRequest, _: AnswerOptions) -> Answer:
        self.read.append(self.tokenizer.decode(request.input_ids.tolist()))
        ids = self.tokenizer.encode(self.says(self.read[-1], request.sample_index) + "<|im_end|>")
        cut = np.array(ids[: request.max_new_tokens], np.int32)
        return Answer(
            cut,
            -cut.astype(np.float32) / np.float32(1_000) - np.float32(0.001),
            "stop" if len(cut) == len(ids) else "length",
        )


def calls_the_tool(text: str, index: int) -> str:
    """Sample 0 asks the calculator and believes it, the others guess."""
    if index:
        return "20"
    if "<tool_response>" in text:
        return text.split("<tool_response>\n")[1].split("\n", maxsplit=1)[0]
    question = text.split("<|im_start|>user\n")[1].split("=", maxsplit=1)[0]
    arguments = dict(zip("ab", map(int, question.split("*")), strict=True))
    call = {"name": "calculator_multiply", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def of(environment: str, tokenizer_path: str, **args: Any) -> dict[str, Any]:
    """Options of a worker for this environment."""
    return {
        "reward": "",
        "environment": f"verifiers:{environment}",
        "environment_args": json.dumps({**RENDERER, **args}),
        "tokenizer": tokenizer_path,
        "simulated": QUICK,
        # Libraries that take long to import, in the worker and in each tool server.
        "limit_s": 200.0,
    }


def verifiers_task(task_id: str, index: int, **more: Any) -> Any:
    return task(task_id, metadata_json=json.dumps({"index": index}), **{"max_new_tokens": 200, **more})


async def test_single_turn_environment_gives_prompts_and_rewards(
    fake: FakeService, tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tokenizer_path, lambda text, index: "4" if index else "2")
    monkeypatch.setattr(simulated, "answer_to", model)
    await fake.submit(verifiers_task("one", 1), verifiers_task("two", 2))
    async with working(fake, tmp_path, from_options=True, **of("sums-v1", tokenizer_path)):
        await fake.until(all_done(fake), timeout_s=150)
    rewards = {i: [s.reward for s in group.header.samples] for i, group in fake.results().items()}
    assert rewards == {"one": [1.0, 0.0, 0.0, 0.0], "two": [0.0, 1.0, 1.0, 1.0]}
    prompt = "<|im_start|>system\nAnswer with a number.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n"
    assert any(text.startswith(prompt) for text in model.read)
    group = fake.results()["one"]
    columns = read_payload(group.header, group.payload)
    sample = group.header.samples[0]
    ids = columns["token_ids"][: sample.tokens].tolist()
    assert model.tokenizer.decode(ids[: sample.prompt_len]) in model.read
    assert model.tokenizer.decode(ids[sample.prompt_len :]) == "2<|im_end|>"
    assert columns["loss_mask"][: sample.tokens].tolist() == [0] * sample.prompt_len + [1] * 2
    assert [turn.role for turn in sample.turns] == ["assistant"]


async def test_tool_environment_becomes_one_sample_with_the_tools_tokens_masked(
    fake: FakeService, tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tokenizer_path, calls_the_tool)
    monkeypatch.setattr(simulated, "answer_to", model)
    await fake.submit(verifiers_task("t", 2, group_size=2))
    async with working(fake, tmp_path, from_options=True, **of("calculator-v1", tokenizer_path)):
        await fake.until(all_done(fake), timeout_s=150)
    group = fake.results()["t"]
    used, guessed = group.header.samples
    assert (used.reward, guessed.reward) == (1.5, 0.0)
    assert [turn.role for turn in used.turns] == ["assistant", "tool", "assistant"]
    columns = read_payload(group.header, group.payload)
    ids, mask = columns["token_ids"][: used.tokens], columns["loss_mask"][: used.tokens].astype(bool)
    written = model.tokenizer.decode(ids[mask].tolist())
    call = '{"name": "calculator_multiply", "arguments": {"a": 5, "b": 7}}'
    assert written == f"<tool_call>\n{call}\n</tool_call><|im_end|>35<|im_end|>"
    tool = used.turns[1]
    assert "<tool_response>\n35\n</tool_response>" in model.tokenizer.decode(ids[tool.start : tool.end].tolist())
    assert np.all(columns["logprobs"][: used.tokens][~mask] == 0)
    assert np.allclose(columns["logprobs"][: used.tokens][mask], -ids[mask] / 1_000 - 0.001)
    # What the model read is what is trained on.
    assert model.tokenizer.decode(ids[: used.turns[2].start].tolist()) in model.read


async def test_game_that_verifiers_ships_is_played_turn_by_turn(
    fake: FakeService, tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wordle of TextArena: a role named player, the game as the user, a reward that the environment records."""
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("textarena")
    _dictionary(tmp_path / "nltk_data")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)

    def guesses(text: str, index: int) -> str:
        """Sample 0 knows the words, sample 1 knows none."""
        tried = sum(word in text for word in WORDS)
        return f"[{WORDS[tried]}]" if index == 0 else "[zzzzz]"

    model = Model(tokenizer_path, guesses)
    monkeypatch.setattr(simulated, "answer_to", model)
    await fake.submit(verifiers_task("t", 0, group_size=2, max_new_tokens=400))
    made = of("textarena", tokenizer_path, taskset={"game": "Wordle-v0"})
    async with working(fake, tmp_path, from_options=True, **made):
        await fake.until(all_done(fake), timeout_s=150)
    group = fake.results()["t"]
    won, lost = group.header.samples
    assert won.reward == 1.0
    assert lost.reward < 1.0
    roles = [turn.role for turn in won.turns]
    assert roles == ["assistant", *["user", "assistant"] * (len(roles) // 2)]
    assert len(lost.turns) > 1
    columns = read_payload(group.header, group.payload)
    ids, mask = columns["token_ids"][: won.tokens], columns["loss_mask"][: won.tokens].astype(bool)
    said = model.tokenizer.decode(ids[mask].tolist())
    assert said == "".join(f"[{word}]<|im_end|>" for word in WORDS[: len(roles) // 2 + 1])


async def test_versions_of_an_environments_turns_are_kept(
    fake: FakeService, tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "answer_to", Model(tokenizer_path, lambda text, index: "x" * 60))
    await fake.submit(verifiers_task("t", 0, group_size=2))
    made = {**of("sums-v1", tokenizer_path), "simulated": SimulatedOptions(tokens_per_s=40.0, vocab_size=400)}
    async with working(fake, tmp_path, from_options=True, pause_mode="abort", **made) as running:
        await eventually(lambda: len(running.engine._decoding) == 2, 60)
        await time_passes(0.5)
        await fake.publish(1, 1, _manifest(tmp_path))
        await fake.until(all_done(fake), timeout_s=150)
        assert running.worker.slots[0].reloads == 1
    for sample in fake.results()["t"].header.samples:
        assert [span.version.version for span in sample.spans] == [0, 1]


async def test_stopped_worker_hands_the_environments_task_back(
    fake: FakeService, tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "answer_to", Model(tokenizer_path, lambda text, index: "x" * 190))
    await fake.submit(verifiers_task("t", 0, group_size=2))
    slow = {**of("sums-v1", tokenizer_path), "simulated": SimulatedOptions(tokens_per_s=20.0, vocab_size=400)}
    async with working(fake, tmp_path, from_options=True, **slow) as first:
        await eventually(lambda: len(first.engine._decoding) == 2, 60)
        await time_passes(0.5)
        await first.end()
    assert len(fake.returns) == len(given_back(fake, fake.returns[0].kind)) == 1
    async with working(fake, tmp_path, worker_id="w2", from_options=True, **of("sums-v1", tokenizer_path)):
        await fake.until(all_done(fake), timeout_s=150)


@pytest.mark.engine
async def test_environment_plays_on_a_real_engine(fake: FakeService, tmp_path: Path, tokenizer_path: str) -> None:
    model = write_random_model(tmp_path / "model")
    shutil.copytree(tokenizer_path, model, dirs_exist_ok=True)
    flags = (
        "--launch", str(model), "--sglang-python", str(sglang_python()), "--ready-timeout-s", "200", "--reward", "",
        "--environment", "verifiers:sums-v1", "--environment-args", json.dumps(RENDERER), "--lease-wait-s", "2",
    )  # fmt: skip
    await fake.submit(*(verifiers_task(f"t{i}", i, max_new_tokens=24) for i in range(4)))
    with worker_process(fake.address, "r", tmp_path, *flags) as worker:
        await fake.until(all_done(fake), timeout_s=240)
        assert await asyncio.to_thread(worker.stop) == 0
    for group in fake.results().values():
        columns = read_payload(group.header, group.payload)
        at = 0
        for sample in group.header.samples:
            prompt = slice(at, at + sample.prompt_len)
            response = slice(at + sample.prompt_len, at + sample.tokens)
            assert columns["loss_mask"][response].all()
            assert not columns["loss_mask"][prompt].any()
            assert max(columns["logprobs"][response].tolist()) < 0
            assert sample.reward in {0.0, 1.0}
            assert [turn.role for turn in sample.turns] == ["assistant"]
            at += sample.tokens


async def test_errors_of_the_environment_are_told(
    fake: FakeService, tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "answer_to", Model(tokenizer_path, lambda text, index: "2"))
    await fake.submit(verifiers_task("far", 99), task("none", max_new_tokens=20))
    made = {**of("sums-v1", tokenizer_path), "max_sample_attempts": 1}
    async with working(fake, tmp_path, from_options=True, **made):
        await fake.until(lambda: len(fake.returns) == 2, timeout_s=60)
    errors = {returned.lease_id.split("/")[0]: returned.error for returned in fake.returns}
    assert "the taskset has 5 tasks, there is none at index 99" in errors["far"]
    assert "KeyError: 'index'" in errors["none"]


def test_environment_that_is_not_there_is_refused(tmp_path: Path, tokenizer_path: str) -> None:
    made = of("no-such-environment", tokenizer_path)
    del made["limit_s"]
    named = options("127.0.0.1:1", tmp_path, **made)
    with pytest.raises(InvalidField, match="no-such-environment"):
        rollout_of(named)


WORDS = ("vinyl", "quirk", "jumbo")


def _dictionary(path: Path) -> None:
    """Dictionary in place of the corpora that nltk would download: three words, all of them nouns."""
    (path / "corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (path / "corpora/words" / name).write_text("\n".join(WORDS) + "\n")
    tagger = path / "taggers/averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    content = {"weights": {}, "tagdict": dict.fromkeys(WORDS, "NN"), "classes": ["NN"]}
    for kind, value in content.items():
        (tagger / f"averaged_perceptron_tagger_eng.{kind}.json").write_text(json.dumps(value))


def _manifest(tmp_path: Path) -> Any:
    from rollout_buffer.v1 import weights_pb2

    return weights_pb2.WeightManifest(files=weight_files(tmp_path / "v1", {"model": b"1"}))
