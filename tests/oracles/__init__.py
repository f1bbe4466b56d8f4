"""The oracles: what the library should answer, said again in plain Python and NumPy.

They know the rules the library promises and nothing else: no jax, no import from `echo_jax` or `pallas_kernels`,
no idea borrowed from them. They are exact, slow and dull, and they check their own state. One file per room.
"""
