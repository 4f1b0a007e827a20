"""Streams of the contract, one file each."""
