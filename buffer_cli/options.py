"""Options that commands of several folders have."""

from typing import Annotated

import typer

SERVICE = "127.0.0.1:50051"

AddressOption = Annotated[str, typer.Option("--address", envvar="RB_ADDRESS", help="host:port of the service.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
TimeoutOption = Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.")]
PresetOption = Annotated[
    str,
    typer.Option(
        metavar="PRESET",
        help="Named policy that unset fields start from: sync, one_step_off, miles, miles_docs, areal(4), prime_rl, "
        "queue_drop(2), queue_max(4), streaming(4).",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="A field of the policy, repeatable: batch_groups=64, order=lifo, environments.math.share=3; "
        "none unsets it. `rollout-buffer config policy` lists the fields.",
    ),
]
