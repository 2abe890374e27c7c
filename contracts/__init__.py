"""The nouns that cross a process: config, requests, messages, tickets, errors, the wire codec, the metrics table."""
