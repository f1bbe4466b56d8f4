"""Replay: the decoder's cache management over a trace, without a model and without bytes.

A researcher's room: one layer's scores go past once, and every setting (threshold, eviction, cap, pool, rule) keeps
maps of its own and is counted. Knows traces, pools and policies; knows no model, no engine and no accelerator. `run`
makes the counts, `summary` says what they mean, `cost` what they would take on some machine.
"""
