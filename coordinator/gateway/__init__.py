"""What stands between the HTTP edge and its callers: keys, limits, usage, stored answers, guards, files and batches."""
