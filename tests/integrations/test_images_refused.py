"""Groups with images in integrations that would train without them: refused by name, never trained."""

from collections.abc import Callable

import pytest

from buffer_wire.errors import InvalidField
from examples.miles import stand_in
from tests.integrations.prime_rl_trainer import group_of
from trainer_client import ImageRef
from trainer_client.batch import Group
from trainer_client.integrations.miles.contract import MILES, SLIME
from trainer_client.integrations.miles.conversion import Converter
from trainer_client.integrations.prime_rl import Packing, pack
from trainer_client.integrations.trl_tasks import row_of


def to_miles(group: Group) -> object:
    return Converter(MILES, stand_in.arguments(), stand_in.Tokenizer()).samples(group)


def to_slime(group: Group) -> object:
    return Converter(SLIME, stand_in.arguments(), stand_in.Tokenizer()).samples(group)


def to_prime_rl(group: Group) -> object:
    return pack([group], Packing(seq_len=64))


def to_trl(group: Group) -> object:
    return row_of(group, [{"prompt": "a"}])


@pytest.mark.parametrize("integration", [to_miles, to_slime, to_prime_rl, to_trl])
def test_images_are_refused(integration: Callable[[Group], object]) -> None:
    group = group_of(1, 0, lengths=(3, 4))
    group.header.images.append(ImageRef(sha256="0" * 64, tokens=1).to_wire())
    with pytest.raises(InvalidField, match="1 images"):
        integration(group)
