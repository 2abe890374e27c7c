"""The OpenAI surface, admission, placement and the flow of one request."""
