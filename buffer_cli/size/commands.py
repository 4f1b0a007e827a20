"""`rollout-buffer size` and its options."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import JsonOption

_fleet = partial(typer.Option, rich_help_panel="Engines and what they make")
_run = partial(typer.Option, rich_help_panel="What the run keeps")
_machines = partial(typer.Option, rich_help_panel="Machines of the store")


@dataclass(frozen=True)
class FleetOptions:
    """Options of the engines, of their groups and of the run."""

    gpus: Annotated[int, _fleet(help="GPUs that generate.")]
    tokens_per_s: Annotated[float, _fleet(help="Tokens that one GPU generates a second.")]
    bytes_per_token: Annotated[
        float, _fleet(help="Of a payload: 9 for ids, logprobs and mask, and what extra columns take.")
    ] = 9.0
    length: Annotated[float, _fleet(metavar="TOKENS", help="Mean sample, prompt included.")] = 2_000.0
    group_size: Annotated[int, _fleet(help="Samples of a group.")] = 8
    gpus_per_engine: Annotated[int, _fleet(help="GPUs of one engine.")] = 1
    engines_per_worker: Annotated[int, _fleet(help="Engines of one worker.")] = 1
    groups_per_engine: Annotated[int, _fleet(help="Groups in flight on an engine.")] = 16
    groups_per_batch: Annotated[int, _run(metavar="N", help="Groups of a train step.")] = 512
    queue_factor: Annotated[float, _run(metavar="q", help="Batches that the queue has room for.")] = 1.0
    retained_steps: Annotated[
        int, _run(help="Steps kept for a replay: those between two checkpoints, or retained_steps of the policy.")
    ] = 64


@dataclass(frozen=True)
class MachineOptions:
    """Options of the store's machines."""

    memory_gb: Annotated[float, _machines(help="Memory of each.")] = 64.0
    network_gbps: Annotated[float, _machines(help="Network of each, in Gbit/s each way.")] = 25.0
    store_replicas: Annotated[int, _machines(help="Replicas of each primary.")] = 1


@runs("buffer_cli.size.show:run")
def size(fleet: FleetOptions, machines: MachineOptions, as_json: JsonOption = False) -> None:
    """Size the store and the service for a fleet: shards, replicas, memory, and what gives out first.

    Computed from measured costs of two slow cores, whose sources it names; cores are planned to be 60 % busy.

    Example: rollout-buffer size --gpus 4096 --tokens-per-s 2000 --bytes-per-token 393 --retained-steps 4
    """
