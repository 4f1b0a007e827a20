"""The RPCs of the contract: parse, call the store, encode. Errors are translated by the interceptor."""
