"""Keys of payloads. A key ends in the payload's size, so that replies can be portioned before they are asked for."""

import secrets


def new_payload_key(run_id: str, size_bytes: int) -> str:
    """A key of its own for one payload: 128 random bits."""
    return f"rb:p:{run_id}:{secrets.token_hex(16)}:{size_bytes}"
