"""Engines behind HTTP: the parts of `groupstate.engines.openai`."""
