"""Images of prompts in the worker: what may be read, how it is sent, and what becomes of it."""

import asyncio
import base64
import io
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from buffer_wire.errors import InvalidField, UnknownBlob
from buffer_wire.images.reading import (
    ImageRefused,
    ImageRules,
    ImageUnavailable,
    check_image,
    is_public,
    read_location,
)
from rollout_buffer.v1 import tasks_pb2
from rollout_buffer.v1.groups_pb2 import ImageRef
from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineMalformed, EngineRejected
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import GeneratedSample, PromptImage, SampleRequest
from rollout_workers.errors import PromptRefused
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.images import Images, expanded, references_of
from rollout_workers.generation.prompts import Prompts, messages_of
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.rollout import SingleTurn
from rollout_workers.versions import Version
from tests.engine.against_fake import QUICK, connected
from tests.engine.fake_sglang import FakeSglang, answer, ok
from tests.workers.building import generated, lease, task

PAD = 9
PROMPT = np.array([1, PAD, PAD, PAD, 2, PAD, PAD, 3], np.int32)
"""Two images of 3 and of 2 placeholders."""
PLACES = ((1, 3), (5, 2))


def png(width: int = 4, height: int = 2, colour: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(out, "PNG")
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


# ── what may be read ──


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "below").mkdir(parents=True)
    (tmp_path / "root" / "below" / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png(colour=1))
    (tmp_path / "root" / "out.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(tmp_path / "root" / "pipe")
    return tmp_path / "root"


def test_a_path_below_the_root_is_read(root: Path) -> None:
    rules = ImageRules(root=root)
    assert read_location("below/a.png", rules) == png()
    assert read_location(str(root / "below" / "a.png"), rules) == png()


@pytest.mark.parametrize("location", ["../secret.png", "out.png", "pipe", "below", "gone.png", "/etc/passwd", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused_alike(root: Path, location: str) -> None:
    with pytest.raises(ImageRefused, match="no readable file below the root"):
        read_location(location, ImageRules(root=root))
    with pytest.raises(ImageRefused, match="unless a root"):
        read_location(location, ImageRules())


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://example.org/a.png",
        "http://user:word@example.org/a.png",
        "http:///a.png",
        "http://[::1/a.png",
        "http://127.0.0.1:1/a.png",
        "http://localhost:1/a.png",
        "http://[::1]:1/a.png",
        "http://[::ffff:127.0.0.1]:1/a.png",
        "http://2130706433:1/a.png",
        "http://169.254.169.254/latest/meta-data",
    ],
)
def test_urls_that_lead_to_private_addresses_or_are_odd_are_refused(location: str) -> None:
    with pytest.raises(ImageRefused):
        read_location(location, ImageRules(root=Path("/")))


@contextmanager
def said_by_a_server(reply: bytes, drip_s: float = 0.0) -> Iterator[str]:
    """A URL whose server says this to whoever asks, byte for byte with `drip_s`, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            asked, _ = server.accept()
            with asked, suppress(OSError):
                asked.recv(4_096)
                for part in [reply] if not drip_s else [reply[i : i + 1] for i in range(len(reply))]:
                    asked.sendall(part)
                    time.sleep(drip_s)

        answering = threading.Thread(target=answer)
        answering.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
    answering.join()


def reply_of(body: bytes, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode() + body


def test_an_image_whose_server_hangs_up_in_its_middle_is_not_there() -> None:
    rules = ImageRules(hosts=frozenset({"127.0.0.1"}))
    with said_by_a_server(reply_of(png(), len(png()))) as url:
        assert read_location(url, rules) == png()
    with said_by_a_server(reply_of(png(), len(png()) + 1)) as url, pytest.raises(ImageUnavailable, match="hung up"):
        read_location(url, rules)


@pytest.mark.parametrize("reply", [reply_of(b"x" * 100, 100), b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100])
def test_a_server_that_drips_has_no_more_time_than_others(reply: bytes) -> None:
    rules = ImageRules(hosts=frozenset({"127.0.0.1"}), timeout_s=0.2)
    began = time.monotonic()
    with said_by_a_server(reply, drip_s=0.05) as url, pytest.raises(ImageUnavailable, match=r"within 0\.2 s"):
        read_location(url, rules)
    assert time.monotonic() - began < 3


def test_a_trusted_host_may_be_written_in_any_case() -> None:
    with said_by_a_server(reply_of(png(), len(png()))) as url:
        named = url.replace("127.0.0.1", "localhost")
        assert read_location(named, ImageRules(hosts=frozenset({"LocalHost"}))) == png()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2606:4700::1111", True),
    ],
)
def test_addresses_that_anybody_reaches(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (b"<svg/>", "no image of"),
        (png()[:20], "no image of"),
        (png(6_000, 6_000), "6000 x 6000 pixels"),
    ],
)
def test_what_is_no_image_or_a_bomb_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ImageRefused, match=why):
        check_image(data, "a.png")


def test_another_image_than_was_named_is_refused() -> None:
    assert check_image(png(), "a.png", digest_of(png())) == digest_of(png())
    with pytest.raises(ImageRefused, match="in place of"):
        check_image(png(), "a.png", digest_of(png(colour=1)))


# ── resolved once ──


class Blobs:
    """Blobs of a run, and how often they were read."""

    def __init__(self, *blobs: bytes) -> None:
        self.by_digest = {digest_of(blob): blob for blob in blobs}
        self.reads = 0

    async def read(self, digest: str) -> bytes:
        self.reads += 1
        await asyncio.sleep(0)
        if digest not in self.by_digest:
            raise UnknownBlob("r", digest)
        return self.by_digest[digest]


async def test_a_blob_is_read_once_however_many_groups_share_it(tmp_path: Path) -> None:
    blobs = Blobs(png())
    images = Images(tmp_path / "images", blobs.read, ImageRules())
    reference = ImageRef(sha256=digest_of(png()), start=1, tokens=3)
    found = await asyncio.gather(*(images.resolve("t", [reference] * 2) for _ in range(8)))
    assert blobs.reads == 1
    (one, two) = found[0]
    assert one == two == PromptImage(digest_of(png()), "", tmp_path / "images" / digest_of(png()), 1, 3)
    assert one.path.read_bytes() == png()
    again = Images(tmp_path / "images", blobs.read, ImageRules())
    await again.resolve("t", [reference])
    assert blobs.reads == 1


async def test_a_path_without_a_hash_gets_it(root: Path, tmp_path: Path) -> None:
    images = Images(tmp_path / "images", Blobs().read, ImageRules(root=root))
    (image,) = await images.resolve("t", [ImageRef(location="below/a.png")])
    assert (image.sha256, image.location) == (digest_of(png()), "below/a.png")
    (root / "below" / "a.png").write_bytes(png(colour=7))
    assert (await images.resolve("t", [ImageRef(location="below/a.png")]))[0] == image


async def test_locations_that_were_read_long_ago_are_read_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.generation.images.MOST_LOCATIONS", 1)
    images = Images(tmp_path / "images", Blobs().read, ImageRules(root=root))
    (root / "b.png").write_bytes(png(colour=2))
    await images.resolve("t", [ImageRef(location="below/a.png")])
    (root / "below" / "a.png").write_bytes(png(colour=3))
    (same,) = await images.resolve("t", [ImageRef(location="below/a.png")])
    await images.resolve("t", [ImageRef(location="b.png")])
    (anew,) = await images.resolve("t", [ImageRef(location="below/a.png")])
    assert (same.sha256, anew.sha256) == (digest_of(png()), digest_of(png(colour=3)))


async def test_what_cannot_be_read_fails_the_task_by_name(tmp_path: Path) -> None:
    images = Images(tmp_path / "images", Blobs().read, ImageRules())
    for reference in (ImageRef(sha256="0" * 64), ImageRef(location="http://127.0.0.1:1/")):
        with pytest.raises(PromptRefused, match=r"no blob|not public"):
            await images.resolve("t", [reference])
    assert not (tmp_path / "images").exists()


async def test_images_of_a_prompt_have_a_bound_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.generation.images.MOST_PROMPT_BYTES", 2 * len(png()) - 1)
    blobs = Blobs(png(), png(colour=1))
    images = Images(tmp_path / "images", blobs.read, ImageRules())
    with pytest.raises(PromptRefused, match="are allowed together"):
        await images.resolve("t", [ImageRef(sha256=digest) for digest in blobs.by_digest])


async def test_images_that_were_not_used_for_long_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.generation.images.MOST_BYTES", 1)
    blobs = Blobs(*(png(colour=colour) for colour in range(3)))
    images = Images(tmp_path / "images", blobs.read, ImageRules())
    idle, used, new = (ImageRef(sha256=digest) for digest in blobs.by_digest)
    for image in await images.resolve("t", [idle, used]):
        os.utime(image.path, (0, 0))
    await images.resolve("t", [used])
    await images.resolve("t", [new])
    assert {path.name for path in (tmp_path / "images").iterdir()} == {used.sha256, new.sha256}
    await images.resolve("t", [idle])
    assert blobs.reads == 4


async def test_an_image_that_goes_while_it_is_asked_for_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = Blobs(png())
    images = Images(tmp_path / "images", blobs.read, ImageRules())
    wanted = [ImageRef(sha256=digest_of(png()))]
    (image,) = await images.resolve("t", wanted)
    utime = os.utime

    def used_too_late(path: Path) -> None:
        utime(path)
        monkeypatch.setattr(os, "utime", utime)
        path.unlink()

    monkeypatch.setattr(os, "utime", used_too_late)
    assert await images.resolve("t", wanted) == [image]
    assert (image.path.is_file(), blobs.reads) == (True, 2)


async def test_images_that_others_write_or_delete_meanwhile_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Images(tmp_path / "images", Blobs(png()).read, ImageRules())
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / ".half").write_bytes(b"")
    listdir = os.listdir

    def gone(path: Path) -> list[str]:
        found = listdir(path)
        (tmp_path / "images" / ".half").unlink()
        return found

    monkeypatch.setattr(os, "listdir", gone)
    assert len(await images.resolve("t", [ImageRef(sha256=digest_of(png()))])) == 1


# ── placed ──


def test_images_of_messages_are_found_in_order_and_told_to_the_template() -> None:
    reference = ImageRef(sha256="0" * 64)
    parts = [tasks_pb2.ContentPart(image=reference), tasks_pb2.ContentPart(text="what is it?")]
    told = task(messages=[tasks_pb2.ChatMessage(role="user", parts=parts)])
    assert references_of(told) == [reference]
    assert messages_of(told) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    ]


def test_placeholders_are_expanded_to_as_many_as_the_model_sees(tmp_path: Path) -> None:
    images = [PromptImage(str(i) * 64, "", tmp_path, 0, 0) for i in range(2)]
    ids, placed = expanded("t", np.array([1, PAD, 2, PAD, 3], np.int32), PAD, [3, 2], images)
    assert ids.tolist() == PROMPT.tolist()
    assert [(image.start, image.tokens) for image in placed] == list(PLACES)
    with pytest.raises(PromptRefused, match="1 placeholders for 2 images"):
        expanded("t", np.array([1, PAD], np.int32), PAD, [3, 2], images)


class Processor:
    """A processor of transformers as the worker asks it: an image has a token for each pixel of its height."""

    image_token_id = PAD

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> Any:
        return SimpleNamespace(num_image_tokens=[height for height, _ in image_sizes])


class Tokenizer:
    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        return [1, PAD, 2, PAD, 3]


async def test_images_of_messages_take_as_many_tokens_as_the_processor_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = [Processor(), object()]
    monkeypatch.setattr("rollout_workers.generation.prompts._load_processor", lambda _: loaded.pop(0))
    blobs = Blobs(png(4, 3), png(4, 2))
    references = [ImageRef(sha256=digest) for digest in blobs.by_digest]
    parts = [tasks_pb2.ContentPart(image=reference) for reference in references]
    told = task(messages=[tasks_pb2.ChatMessage(role="user", parts=parts)])
    found = await Images(tmp_path / "images", blobs.read, ImageRules()).resolve("t", references_of(told))
    ids, placed = await Prompts("model", load=lambda _: Tokenizer()).with_images(told, found)  # type: ignore[arg-type, return-value]
    assert ids.tolist() == PROMPT.tolist()
    assert [(image.start, image.tokens) for image in placed] == list(PLACES)
    with pytest.raises(PromptRefused, match="submit prompt_token_ids"):
        await Prompts("model", load=lambda _: Tokenizer()).with_images(told, found)  # type: ignore[arg-type, return-value]


# ── sent, and heard ──


@pytest.fixture
def images(tmp_path: Path) -> tuple[PromptImage, ...]:
    made = []
    for i, (start, tokens) in enumerate(PLACES):
        path = tmp_path / f"a b{i}"
        path.write_bytes(png(colour=i))
        made.append(PromptImage(digest_of(png(colour=i)), "", path, start, tokens))
    return tuple(made)


class Seeing(FakeSglang):
    """A server that expands placeholders as SGLang does: `counts` of them for each image."""

    def __init__(self, *, sees: bool = True, counts: tuple[int, ...] = (3, 2)) -> None:
        super().__init__()
        self.counts = counts
        self.sees = sees
        self.handlers["/generate"] = self._see
        self.handlers["/model_info"] = self._say

    async def _say(self, _body: Any) -> Any:
        return ok({"model_path": "/m", "weight_version": self.version, "has_image_understanding": self.sees})

    async def _see(self, body: Any) -> Any:
        if body.get("token_ids_logprob"):
            return await FakeSglang._generate(self, body)
        entries = []
        for rid, ids, data in zip(body["rid"], body["input_ids"], body["image_data"], strict=True):
            assert ids.count(PAD) == len(data)
            seen = len(ids) - len(data) + sum(self.counts)
            entries.append(answer(rid, [7, 8], prompt_tokens=seen))
        return ok(entries)


def request(images: tuple[PromptImage, ...], *behind: int) -> SampleRequest:
    ids = np.concatenate([PROMPT, np.array(behind, np.int32)])
    return SampleRequest(sample_index=0, input_ids=ids, max_new_tokens=2, images=images)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_server_is_sent_a_placeholder_and_the_image_and_what_was_made(
    images: tuple[PromptImage, ...], stream: bool
) -> None:
    async with Seeing() as fake, connected(fake, replace(QUICK, stream=stream)) as engine:
        made = await engine.generate([request(images), request(images, 7, 8)])
        (body,) = fake.received["/generate"]
    assert [sample.output_ids.tolist() for sample in made] == [[7, 8]] * 2
    assert body["input_ids"] == [[1, PAD, 2, PAD, 3], [1, PAD, 2, PAD, 3, 7, 8]]
    # What the server keeps of an image is that of one version of the weights, and shared by the samples.
    first, second = body["mm_hashes"]
    assert first == second
    assert len(set(first)) == 2
    encoded = [base64.b64decode(each.partition(",")[2]) for each in body["image_data"][0]]
    assert encoded == [png(colour=0), png(colour=1)]
    assert [set(each["logit_bias"]) for each in body["sampling_params"]] == [{str(PAD)}] * 2


async def test_a_server_that_sees_the_files_is_told_their_names(images: tuple[PromptImage, ...]) -> None:
    async with Seeing() as fake, connected(fake, replace(QUICK, sees_files=True)) as engine:
        await engine.generate([request(images)])
        (body,) = fake.received["/generate"]
    assert body["image_data"] == [[f"file://{image.path}".replace(" ", "%20") for image in images]]


async def test_an_answer_to_other_input_tokens_than_those_trained_is_not_used(images: tuple[PromptImage, ...]) -> None:
    async with Seeing(counts=(3, 3)) as fake, connected(fake, QUICK) as engine:
        with pytest.raises(EngineMalformed, match="the server saw 9 input tokens in place of 8"):
            await engine.generate([request(images)])


async def test_a_model_without_eyes_is_sent_nothing(images: tuple[PromptImage, ...]) -> None:
    async with Seeing(sees=False) as fake, connected(fake, ServerOptions(control_timeout_s=2)) as engine:
        with pytest.raises(InvalidField, match="takes no images"):
            engine.check_sampling(request(images))
        with pytest.raises(InvalidField, match="takes no images"):
            await engine.generate([request(images)])
        assert fake.received["/generate"] == []


# ── kept ──


def progress(images: tuple[PromptImage, ...], **more: Any) -> GroupProgress:
    return GroupProgress(lease(task(group_size=2, prompt_token_ids=PROMPT.tolist()), **more), PROMPT, images=images)


def test_a_group_and_a_partial_rollout_carry_the_references_once(images: tuple[PromptImage, ...]) -> None:
    first = progress(images)
    first.samples[0].append(generated(0, [4, 5]), lambda _: Version(1, 0))
    first.samples[1].append(generated(1, [6], finish="abort"), lambda _: Version(1, 0))
    partial = first.to_partial_rollout("w")
    assert partial is not None
    assert [image.sha256 for image in partial.header.images] == [image.sha256 for image in images]
    second = progress(images, partial_rollout=partial)
    assert second.take_partial_rollout() is None
    second.samples[1].append(generated(1, [6]), lambda _: Version(1, 0))
    header, payload = second.to_group([0.0, 1.0], "w")
    assert [(image.start, image.tokens) for image in header.images] == list(PLACES)
    assert sum(map(len, payload)) < 300


def test_a_partial_rollout_of_other_images_is_not_gone_on_with(images: tuple[PromptImage, ...]) -> None:
    first = progress(images)
    first.samples[0].append(generated(0, [4, 5]), lambda _: Version(1, 0))
    changed = (replace(images[0], sha256="0" * 64), images[1])
    second = progress(changed, partial_rollout=first.to_partial_rollout("w"))
    assert second.take_partial_rollout() == "its images are not the task's"


def test_a_placeholder_among_generated_tokens_and_a_prompt_without_the_images_are_odd(
    images: tuple[PromptImage, ...],
) -> None:
    one = progress(images)
    assert one.odd_tokens(generated(0, [4, 5])) == ""
    assert "placeholder of images 9" in one.odd_tokens(generated(0, [4, PAD]))
    assert one.with_images(request(())).images == images
    with pytest.raises(InvalidField, match="begins as the task's does"):
        one.with_images(replace(request(()), input_ids=PROMPT[1:]))


class Forgetful(SimulatedEngine):
    """Fails a call that goes on from what was made, as a server may with images."""

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        if any(len(one.input_ids) > len(PROMPT) for one in requests):
            raise EngineRejected("e", "generating", 400, "its text has other tokens")
        return await super().generate(requests, deadline_s=deadline_s)


async def test_a_sample_that_cannot_go_on_with_its_images_begins_anew(images: tuple[PromptImage, ...]) -> None:
    engine = Forgetful(SimulatedEngineOptions(tokens_per_s=1e4, version_label="1.0"))
    slot = EngineSlot("e", engine, await engine.info(), base_model=None)
    slot.adopt(Version(1, 0))
    begun = progress(images)
    begun.samples[0].append(generated(0, [4, 5], finish="abort"), lambda _: Version(1, 0))
    assert await asyncio.wait_for(SingleTurn(begun, slot, Attempts(3), timeout_s=30.0).run(), 30)
    assert begun.discarded == {"images_refused": 2}
