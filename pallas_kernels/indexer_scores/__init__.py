"""Index scores over paged keys. README.md says what is computed, how, and what bounds it."""
