"""The version, where everything can import it."""

VERSION = "0.1.0"
