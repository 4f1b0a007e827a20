"""Inference engines behind one small interface: real SGLang over HTTP, and a simulated one for tests and planning."""
