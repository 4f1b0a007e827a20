"""`python -m buffer_cli` is `rollout-buffer`."""

from buffer_cli.main import app

app()
