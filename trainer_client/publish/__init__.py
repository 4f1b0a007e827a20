"""Where a trainer puts its weights so that the engines can load them."""

from trainer_client.publish.files import FilesPublisher

__all__ = ["FilesPublisher"]
