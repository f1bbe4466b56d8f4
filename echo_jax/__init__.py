"""echo_jax: lossless KV-cache offload for natively sparse attention."""
