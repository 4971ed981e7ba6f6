"""What joins a run to other people's software. Each is imported by name, on demand."""
