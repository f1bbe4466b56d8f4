"""The command line, `echo-jax`: one module a command, each with the dataclass of its options and an `execute`."""
