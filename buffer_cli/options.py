"""Options that commands of several folders have."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from buffer_wire.connection.access import Access

_access = partial(typer.Option, rich_help_panel="Access")


@dataclass(frozen=True)
class ServiceOptions:
    """Options with which a command reaches the service: its address, a token file, and TLS.

    A token itself is no option, for command lines are seen by everybody on the machine; RB_TOKEN may hold one.
    """

    address: Annotated[str, typer.Option("--address", envvar="RB_ADDRESS", help="host:port of the service.")] = (
        "127.0.0.1:50051"
    )
    token_file: Annotated[
        Path | None, _access(envvar="RB_TOKEN_FILE", help="File with the token, where the service asks.")
    ] = None
    tls_ca: Annotated[
        str | None, _access(envvar="RB_TLS_CA", help='PEM file of who signed its certificate, or "system".')
    ] = None
    tls_cert: Annotated[
        Path | None, _access(envvar="RB_TLS_CLIENT_CERT", help="PEM file of a certificate of one's own.")
    ] = None
    tls_key: Annotated[Path | None, _access(envvar="RB_TLS_CLIENT_KEY", help="PEM file of its key.")] = None
    tls_server_name: Annotated[
        str | None, _access(envvar="RB_TLS_SERVER_NAME", help="Name in its certificate, if not the address's host.")
    ] = None

    @property
    def access(self) -> Access:
        """Access by these options; what they leave out is taken from the environment."""
        return Access(
            token_file=self.token_file or "",
            tls_ca=self.tls_ca or "",
            tls_cert=self.tls_cert or "",
            tls_key=self.tls_key or "",
            tls_server_name=self.tls_server_name or "",
        )


_weights = partial(typer.Option, rich_help_panel="Weights")


@dataclass(frozen=True)
class WeightsOptions:
    """Options of whoever fetches weights, and may serve them: token, TLS, mirrors' cap.

    As with the service, a token itself is no option; RB_WEIGHTS_TOKEN may hold one.
    """

    weights_token_file: Annotated[
        Path | None,
        _weights(
            envvar="RB_WEIGHTS_TOKEN_FILE",
            help="File with the token of the weights: sent to who serves them over https, asked of who reads here.",
        ),
    ] = None
    weights_tls_ca: Annotated[
        str | None,
        _weights(
            envvar="RB_WEIGHTS_TLS_CA",
            help="PEM file of who signed the certificates of those who serve weights. Default: the system's.",
        ),
    ] = None
    weights_tls_cert: Annotated[
        Path | None,
        _weights(envvar="RB_WEIGHTS_TLS_CERT", help="PEM file of the certificate under which weights are served here."),
    ] = None
    weights_tls_key: Annotated[Path | None, _weights(envvar="RB_WEIGHTS_TLS_KEY", help="PEM file of its key.")] = None
    weights_max_mbps: Annotated[
        float, _weights(help="Most megabits a second of all downloads of weights; 0: no limit.")
    ] = 0.0

    @property
    def access(self) -> Access:
        """Access to those who serve weights; what it leaves out is taken from the environment."""
        return Access(token_file=self.weights_token_file or "", tls_ca=self.weights_tls_ca or "")


@dataclass(frozen=True)
class CallOptions(ServiceOptions):
    """Options of a command that calls the service and waits for the answers."""

    timeout_s: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.")] = 10.0


RunOption = Annotated[str | None, typer.Option("--run", help="May be left out where there is only one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
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
