"""Publishers: they bring a trainer's weights to the engines as files, by value, as adapters, or by a broadcast.

A session imports the parts that publishers have in common. Each publisher is imported at its first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buffer_wire.weights.door import WeightsDoor
    from trainer_client.publish.adapters import AdapterPublisher
    from trainer_client.publish.collective.publisher import CollectivePublisher
    from trainer_client.publish.files import FilesPublisher
    from trainer_client.publish.ranks import PublishFailed
    from trainer_client.publish.sharded import ShardedWeights
    from trainer_client.publish.tensors import TensorsPublisher

__all__ = [
    "AdapterPublisher",
    "CollectivePublisher",
    "FilesPublisher",
    "PublishFailed",
    "ShardedWeights",
    "TensorsPublisher",
    "WeightsDoor",
]

_HOMES = {
    "AdapterPublisher": "trainer_client.publish.adapters",
    "CollectivePublisher": "trainer_client.publish.collective.publisher",
    "FilesPublisher": "trainer_client.publish.files",
    "PublishFailed": "trainer_client.publish.ranks",
    "ShardedWeights": "trainer_client.publish.sharded",
    "TensorsPublisher": "trainer_client.publish.tensors",
    "WeightsDoor": "buffer_wire.weights.door",
}

if not TYPE_CHECKING:  # A type checker would take every name for one that there is.

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
