"""`python -m echo_jax`: the command line."""

from echo_jax.cli.main import run

run()
