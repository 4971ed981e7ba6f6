"""What a log tells: functions from records to values. Nothing here prints, and nothing writes a log."""
