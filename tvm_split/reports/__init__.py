"""What a deployment did, beside what was predicted of it."""
