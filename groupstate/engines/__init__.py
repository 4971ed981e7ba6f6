"""Who generates: engines behind one protocol."""
