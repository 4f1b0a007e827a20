"""The whole loop live, in a setting that the simulator can play too: real service, store, worker and trainer client.

Only the engine is simulated (it keeps the timing of slots, without a model), and a training step is a sleep.
"""
