"""Agents that talk to the model by OpenAI's or Anthropic's API, as rollout functions (docs/agents.md)."""
