"""Kernels: they know arrays, never caches."""
