"""Bounds of references to images, checked by both ends. Each check raises InvalidField naming the field."""

from collections.abc import Sequence

from buffer_wire import limits
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2 as pb


def check_reference(at: str, image: pb.ImageRef, *, resolved: bool = False) -> None:
    """Check what an image is named by; `at` names it in errors. `resolved`: its SHA-256 is known."""
    if (image.sha256 or resolved or not image.location) and not limits.SHA256.fullmatch(image.sha256):
        raise InvalidField(f"{at}.sha256", image.sha256[:64], "64 digits of lower-case hex")
    if limits.CONTROL.search(image.location) or len(image.location) > limits.MAX_LOCATION_CHARS:
        limit = f"at most {limits.MAX_LOCATION_CHARS} characters, none of them a control character"
        raise InvalidField(f"{at}.location", f"{len(image.location)} characters", limit)


def check_images(at: str, images: Sequence[pb.ImageRef], prompt_len: int, *, resolved: bool = False) -> None:
    """Check the images of a prompt of so many tokens: each by itself, and their places in the prompt."""
    if len(images) > limits.MAX_IMAGES:
        raise InvalidField(at, f"{len(images)} images", f"at most {limits.MAX_IMAGES}")
    end = 0
    for i, image in enumerate(images):
        check_reference(f"{at}[{i}]", image, resolved=resolved)
        start, stop = image.start, image.start + image.tokens
        if not end <= start < stop <= prompt_len:
            place = f"tokens [{start}, {stop})"
            raise InvalidField(f"{at}[{i}]", place, f"at least one token, from {end} on, of the prompt's {prompt_len}")
        end = stop


def check_placeholders(at: str, images: Sequence[pb.ImageRef], prompt: Sequence[int]) -> None:
    """Check that the tokens of each image in the prompt are one placeholder, repeated."""
    for i, image in enumerate(images):
        found = set(prompt[image.start : image.start + image.tokens])
        if len(found) > 1:
            place = f"{len(found)} different tokens in [{image.start}, {image.start + image.tokens})"
            raise InvalidField(f"{at}[{i}]", place, "one placeholder token, repeated")
