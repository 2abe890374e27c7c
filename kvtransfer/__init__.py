"""Moves KV blocks between two engines, receiver-granted; knows pages and peers, not models."""
