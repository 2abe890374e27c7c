"""Text on one side, token ids on the other.

Torch-free: the coordinator uses this package without an engine.
"""
