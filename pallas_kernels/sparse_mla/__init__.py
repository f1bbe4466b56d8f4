"""Sparse MLA over slots. README.md says what is computed, how, and what bounds it."""
