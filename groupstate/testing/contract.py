"""What all contracts have in common."""


class Contract:
    """Tests that a subclass inherits. They are async where what they test is: run them with pytest-asyncio, in its mode
    `auto`, or in mode `strict` with the plugin `groupstate.testing.fixtures`."""
