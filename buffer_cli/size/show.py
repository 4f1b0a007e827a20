"""`rollout-buffer size`: the sizing as a table or as JSON, with the sources of its costs."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from buffer_cli.output import print_json
from buffer_cli.size import costs
from buffer_cli.size.commands import FleetOptions, MachineOptions
from buffer_cli.size.sizing import RPC_PROCESSES, Fleet, Machines, Sizing, size


def run(fleet: FleetOptions, machines: MachineOptions, *, as_json: bool) -> None:
    """Print the sizing."""
    sized = size(Fleet(**asdict(fleet)), Machines(**asdict(machines)))
    if as_json:
        print_json(_values(sized))
        return
    console = Console(highlight=False)
    table = Table(show_header=False, title=f"{fleet.gpus:,} GPUs, {fleet.tokens_per_s:,g} tokens/s each")
    for name, value in _rows(sized):
        table.add_row(name, value)
    console.print(table)
    console.print(_verdict(sized))
    files = sorted({source.partition(" ")[0] for source in _SOURCES})
    console.print(f"costs as in bench/results: {', '.join(files)}")


_SOURCES = sorted(
    {call.source for call in costs.CALLS.values()}
    | {way.source for way in costs.WAYS.values()}
    | {one.source for one in costs.EACH.values()}
)


def _rows(sized: Sizing) -> list[tuple[str, str]]:
    fleet = sized.fleet
    loads = ", ".join(f"{load.name} {load.needed:.2f}" for load in sized.payloads)
    return [
        ("engines", f"{fleet.engines:,}"),
        ("groups", f"{fleet.groups_per_s:,.1f} a second of {_bytes(fleet.group_bytes)}, {_bytes(fleet.bytes_per_s)}/s"),
        ("payloads go", "directly between clients and store" if sized.direct else "through the service"),
        ("payloads held", f"{_bytes(sized.held_bytes)} in {fleet.held_groups:,.0f} groups"),
        ("decisions", f"{sized.decision_cores:.2f} cores of one store, {_bytes(sized.index_bytes)}"),
        ("loads of payloads", f"{loads}; 1 is what one primary is planned with"),
        ("payload shards", f"{sized.shards} primaries" if sized.shards else "none: the one store has them too"),
        ("service", f"{sized.service_cores:.1f} cores, {sized.connections:,} connections"),
        ("rpc processes", f"{sized.rpc_processes}, {RPC_PROCESSES} a replica"),
        ("replicas", f"{sized.replicas} with {_bytes(sized.replica_bytes)} each"),
        ("gives out first", sized.limit),
    ]


def _verdict(sized: Sizing) -> str:
    if sized.fits:
        return f"one run of such groups has its decisions made for up to {sized.largest_gpus:,} GPUs"
    return (
        f"the decisions of one run are too many: they suffice for {sized.largest_gpus:,} GPUs. Have several runs on "
        "stores of their own, or larger groups"
    )


def _values(sized: Sizing) -> dict[str, Any]:
    return {
        "engines": sized.fleet.engines,
        "groups_per_s": sized.fleet.groups_per_s,
        "group_bytes": sized.fleet.group_bytes,
        "bytes_per_s": sized.fleet.bytes_per_s,
        "direct": sized.direct,
        "held_bytes": sized.held_bytes,
        "index": {load.name: load.needed for load in sized.index},
        "decision_cores": sized.decision_cores,
        "index_bytes": sized.index_bytes,
        "payloads": {load.name: load.needed for load in sized.payloads},
        "shards": sized.shards,
        "service_cores": sized.service_cores,
        "connections": sized.connections,
        "rpc_processes": sized.rpc_processes,
        "replicas": sized.replicas,
        "replica_bytes": sized.replica_bytes,
        "fits": sized.fits,
        "limit": sized.limit,
        "largest_gpus": sized.largest_gpus,
        "sources": _SOURCES,
    }


def _bytes(count: float) -> str:
    for unit, size_of in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size_of:
            return f"{count / size_of:.3g} {unit}"
    return f"{count / 1e3:.3g} KB"
