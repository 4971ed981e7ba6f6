"""What is kept: the event log and the payload store, behind two small protocols."""
