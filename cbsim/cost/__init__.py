"""Cost models: functions from a plan to seconds, without state."""
