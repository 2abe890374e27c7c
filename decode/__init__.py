"""The decode phase: reserves blocks, runs the continuous batch, writes answers token by token."""
