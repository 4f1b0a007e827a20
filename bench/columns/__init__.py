"""Routed experts of a large model, from SGLang's wire through worker and store to the trainer's tensors."""
