"""Other rules over what a run recorded: what arrived and when is kept, what the rules do with it is played anew."""
