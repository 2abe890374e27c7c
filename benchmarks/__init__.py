"""Load generation, metrics and reports; speaks HTTP only, to any OpenAI endpoint."""
