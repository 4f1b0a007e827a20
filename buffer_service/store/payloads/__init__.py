"""Payloads: where their bytes lie, behind one protocol, beside the index that decides."""
