"""What is true: pure functions and values. No await, clock, randomness, files or logging in here."""
