"""Measurements: one file per question, the rows recorded (results/), and the claims held against them."""
