"""Settings that rpc processes need, as plain values that the supervisor has checked.

Importing pydantic once more would take more than a quarter of the time in which such a process starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcSettings:
    """Fields of `buffer_service.settings.Settings` by the same names; their meanings and bounds are there."""

    tokens_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    admin_client_ca: Path | None
    payload_store: str = field(repr=False)
    store_ca: Path | None
    max_message_bytes: int
    max_group_bytes: int
    max_streams: int
    max_token_streams: int
    max_token_rpcs: int
    max_token_rpcs_per_s: int
    max_connections: int
    connection_age_s: float
    blocked_bytes: int
    max_run_groups: int
    max_run_tokens: int
    max_run_bytes: int
    recent_bytes: int
    direct_payloads: bool | None
    direct_from_bytes: int
    payload_listen: str
    payload_address: str
    payload_writer: str = field(repr=False)
    payload_reader: str = field(repr=False)
    drain_grace_s: float
    log_level: str
    log_format: str

    @property
    def most_group_bytes(self) -> int:
        """Largest payload of a group, whichever way it goes."""
        return max(self.max_group_bytes, self.max_message_bytes)

    def to_values(self) -> dict[str, object]:
        """Settings as values that JSON has."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_values`."""
        paths = [each.name for each in fields(cls) if each.type == Path | None]
        return cls(**{**values, **{name: Path(values[name]) for name in paths if values[name] is not None}})
