"""KEDA's contract of external scalers: generated beside its .proto file by `make proto`."""
