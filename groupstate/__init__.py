"""Prompt groups of an RL post-training run as explicit state machines over a durable event log."""

__version__ = "0.1.0"
