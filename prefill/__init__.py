"""The prefill phase: reads prompts, publishes their KV, draws the first token."""
