"""How a trainer's weights get to the engines: as files, as tensors by value, or broadcast to them."""

from trainer_client.publish.collective.publisher import CollectivePublisher
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.ranks import PublishFailed
from trainer_client.publish.sharded import ShardedWeights
from trainer_client.publish.tensors import TensorsPublisher

__all__ = ["CollectivePublisher", "FilesPublisher", "PublishFailed", "ShardedWeights", "TensorsPublisher"]
