"""Engine kind `vllm`: vLLM's OpenAI-compatible server."""
