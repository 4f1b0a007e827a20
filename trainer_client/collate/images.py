"""Inputs of a vision model for collated samples, computed from the images that their groups refer to.

Groups carry references alone; the trainer's processor makes `pixel_values` and the like of the images. That is done
once for each image, however many samples share it, and kept for the next steps.
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from buffer_wire.errors import InvalidField
from buffer_wire.images.reading import ImageRules, check_image, read_location
from trainer_client.batch import Group
from trainer_client.collate.facts import Collated, torch_for
from trainer_client.collate.packed import PackedBatch
from trainer_client.collate.padded import PaddedBatch
from trainer_client.tasks import ImageRef

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_client.client.operations import ServiceClient

KEPT_BYTES = 1 << 30
"""Bytes of processed images that are kept."""

Processor: TypeAlias = Callable[[bytes], "Mapping[str, Tensor]"]
"""Processor of one encoded image: the model's inputs for it, tensors to be joined along their first axis."""


def reader(client: "ServiceClient", run_id: str, rules: ImageRules | None = None) -> Callable[[ImageRef], bytes]:
    """Make a reader of the images of a run's groups: blobs, and locations by `rules`.

    It raises UnknownBlob, ImageRefused (also where the bytes are others than the engine saw), ImageUnavailable.
    """

    def read(image: ImageRef) -> bytes:
        where = image.location
        data = read_location(where, rules or ImageRules()) if where else client.read_blob(run_id, image.sha256)
        check_image(data, where or image.sha256, image.sha256)
        return data

    return read


def processor_of(image_processor: Any) -> Processor:  # noqa: ANN401 - of transformers
    """Make a Processor of an image processor of transformers, which takes images as Pillow has them, in RGB."""

    def process(data: bytes) -> "Mapping[str, Tensor]":
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            made = image_processor(images=[image.convert("RGB")], return_tensors="pt")
        return dict(made)

    return process


class ImageInputs:
    """Inputs for the images of collated samples. `read` gives the bytes of an image, `process` what is made of them.

        inputs = ImageInputs(reader(client, "math"), processor_of(AutoImageProcessor.from_pretrained(path)))
        batch = collate(pulled)
        model(input_ids=batch.token_ids, attention_mask=batch.attention_mask, **inputs(batch, pulled.groups))

    The processor has to be that of the engine's model: it makes as many features as the prompt has placeholders.
    """

    def __init__(self, read: Callable[[ImageRef], bytes], process: Processor) -> None:
        self._read = read
        self._process = process
        self._kept: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        self._kept_bytes = 0

    def __call__(self, batch: Collated, groups: Sequence[Group]) -> "dict[str, Tensor]":
        """Make the inputs of a collated batch, padded or packed, or of a micro-batch of one.

        `groups`: those that were collated. Of I images of all samples, sample after sample, each in the order of its
        prompt, what the processor makes is joined: for Qwen-VL `pixel_values` float32 [patches, values a patch] and
        `image_grid_thw` int64 [I, 3]. `mm_token_type_ids` int32, of the shape of token_ids: 1 for placeholders of
        images. Nothing where no sample has an image. Raises what `read` and the processor raise.
        """
        torch = torch_for("collate")
        images = [groups[i].images for i in batch.group_index.tolist()]
        if not any(images):
            return {}
        made = [self._made(image) for of_sample in images for image in of_sample]
        joined = {name: torch.cat([inputs[name] for inputs in made]) for name in made[0]}
        kinds = torch.zeros(batch.token_ids.shape, dtype=torch.int32)  # type: ignore[attr-defined]
        flat, starts = kinds.view(-1), _starts(batch)
        for start, of_sample in zip(starts, images, strict=True):
            for image in of_sample:
                flat[start + image.start : start + image.start + image.tokens] = 1
        return {**joined, "mm_token_type_ids": kinds}

    def _made(self, image: ImageRef) -> "Mapping[str, Tensor]":
        known = self._kept.get(image.sha256)
        if known is not None:
            self._kept.move_to_end(image.sha256)
            return known
        made = self._process(self._read(image))
        self._kept[image.sha256] = made
        self._kept_bytes += _bytes(made)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])
        return made


def _bytes(made: "Mapping[str, Tensor]") -> int:
    return sum(tensor.element_size() * tensor.nelement() for tensor in made.values())


def _starts(batch: Collated) -> list[int]:
    """Place of each sample's first token in the flattened tensor of tokens."""
    if isinstance(batch, PackedBatch):
        return batch.cu_seqlens.tolist()[: len(batch.lengths)]
    if not isinstance(batch, PaddedBatch):
        raise InvalidField("batch", type(batch).__name__, "a PaddedBatch or a PackedBatch")
    width = batch.token_ids.shape[1]
    first = batch.attention_mask.int().argmax(dim=1).tolist()
    return [i * width + at for i, at in enumerate(first)]
