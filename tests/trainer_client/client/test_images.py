"""Images of tasks in the client: written as blobs once, named in tasks, read back by whoever trains."""

import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from buffer_wire.errors import InvalidField, UnknownBlob
from buffer_wire.images.reading import ImageRefused, ImageRules
from tests.support.service import ServiceProcess, running_service
from trainer_client import AsyncBufferClient, BufferClient, ImageRef, SamplingParams, Submission, Task
from trainer_client.client import call
from trainer_client.collate.images import reader
from trainer_client.tasks import blobs_of


def png(colour: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 2), (colour, 0, 0)).save(out, "PNG")
    return out.getvalue()


def task(*images: ImageRef, **fields: Any) -> Task:
    values = {"prompt_token_ids": [1, 7, 7, 2], "images": images, **fields}
    return Task(group_size=2, sampling=SamplingParams(max_new_tokens=4), **values)


def told(*parts: dict[str, object]) -> Task:
    return task(prompt_token_ids=(), messages=[{"role": "user", "content": list(parts)}])


IMAGE = ImageRef.of(png(), start=1, tokens=2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service"), rpc_processes=1) as running:
        yield running


@pytest.fixture
async def asyncio_client(service: ServiceProcess) -> AsyncIterator[AsyncBufferClient]:
    async with AsyncBufferClient(service.address) as client:
        yield client


def submission(cursor: int, *tasks: Task) -> Submission:
    return Submission(term=1, expected_cursor=cursor, cursor=cursor + len(tasks), tasks=tasks)


def test_a_run_that_is_made_anew_gets_its_images_anew(service: ServiceProcess) -> None:
    with BufferClient(service.address) as client:
        for _ in range(2):
            client.create_run("anew")
            term = client.resume("anew").term
            client.submit_tasks("anew", replace(submission(0, task(IMAGE)), term=term))
            assert client.read_blob("anew", IMAGE.sha256) == png()
            client.delete_run("anew")


def test_images_are_written_once_before_the_tasks_that_name_them(service: ServiceProcess) -> None:
    with BufferClient(service.address) as client:
        client.create_run("once")
        other = ImageRef.of(png(1))
        client.submit_tasks("once", submission(0, task(IMAGE), task(IMAGE), told({"type": "image", "image": other})))
        # Written again it would be refused: its hash is another one.
        client.submit_tasks("once", submission(3, replace(task(IMAGE), images=[replace(IMAGE, data=b"other")])))
        read = reader(client, "once")
        assert read(IMAGE) == png()
        assert read(other) == png(1)
        with pytest.raises(UnknownBlob):
            client.read_blob("once", sha256(b"other").hexdigest())


def test_a_client_remembers_a_bounded_number_of_images_and_writes_the_others_again(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "MOST_MADE", 2)
    images = [ImageRef.of(png(colour), start=1, tokens=2) for colour in range(3)]
    with BufferClient(service.address) as client:
        for run_id in ("few", "others"):
            client.create_run(run_id)
        client.submit_tasks("others", submission(0, task(images[0])))
        for at, image in enumerate([*images, *images]):
            client.submit_tasks("few", submission(at, task(image)))
            assert len(client._made._names) <= 2
        assert [client.read_blob("few", image.sha256) for image in images] == [png(colour) for colour in range(3)]
        assert client.run("few").blob_bytes == sum(len(png(colour)) for colour in range(3))
        client.delete_run("few")
        assert client._made._names == {}


async def test_the_asyncio_client_writes_them_too(asyncio_client: AsyncBufferClient) -> None:
    await asyncio_client.create_run("asyncio")
    await asyncio_client.submit_tasks("asyncio", submission(0, task(IMAGE)))
    assert await asyncio_client.read_blob("asyncio", IMAGE.sha256) == png()
    await asyncio_client.evaluate("asyncio", [task(ImageRef.of(png(2), start=1, tokens=2))], term=1)
    assert await asyncio_client.read_blob("asyncio", ImageRef.of(png(2)).sha256) == png(2)


def test_the_bytes_travel_in_no_task() -> None:
    wire = task(IMAGE).to_wire()
    assert (wire.images[0].sha256, wire.images[0].start, wire.images[0].tokens) == (IMAGE.sha256, 1, 2)
    assert wire.ByteSize() < 150
    assert blobs_of([task(IMAGE), task(IMAGE), task(ImageRef(location="a.png"))]) == {IMAGE.sha256: png()}


@pytest.mark.parametrize(
    "wrong", [{"type": "image_url", "image_url": "a"}, {"type": "image", "image": "a.png"}, {"type": "text"}]
)
def test_other_parts_are_refused(wrong: dict[str, object]) -> None:
    from trainer_client.tasks import tasks_to_wire

    with pytest.raises(InvalidField, match="tasks"):
        tasks_to_wire([told(wrong)])


def test_what_is_trained_on_is_what_the_engine_saw(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    read = reader(None, "r", ImageRules(root=tmp_path))  # type: ignore[arg-type]
    image = ImageRef(sha256=IMAGE.sha256, location="a.png")
    assert read(image) == png()
    (tmp_path / "a.png").write_bytes(png(1))
    with pytest.raises(ImageRefused, match="in place of"):
        read(image)
