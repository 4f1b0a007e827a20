"""Wire contract, version 1: generated beside its .proto files by `make proto`."""
