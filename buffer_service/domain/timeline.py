"""Versions ahead of the published one."""


def next_train_version(published_version: int, unpublished_steps: int, batches_per_publish: int) -> int:
    """Estimate of the version that will train on the next unassembled step.

    `unpublished_steps`: steps assembled since the last publish's commit point. Every batches_per_publish of them raise
    the version by one before the next step trains.
    """
    return published_version + unpublished_steps // batches_per_publish
