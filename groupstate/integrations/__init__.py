"""groupstate in other people's stacks. Each part is imported on demand and needs what it is a part of."""
