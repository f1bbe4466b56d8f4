"""Index scores, and records fetched from the host while they are made. README.md says what, how, and what bounds it."""
