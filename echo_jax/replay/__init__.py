"""Replay: the decoder's cache management over a trace, without a model and without bytes.

A researcher's room: one layer's scores go past once, and every setting (threshold, eviction, cap, pool, rule) keeps
maps of its own and is counted. Knows traces, pools and policies; knows no model, no engine and no accelerator. `run`
makes the counts, `summary` says what they mean, `cost` what they would take on some machine.

One thing differs from a served request: a replay begins with a request's first decode step, so its threshold has no
history there, while the decoder's has the prompt's.
"""
