"""Scenarios: a YAML file becomes one frozen Scenario. Only this room has defaults and validates what a user wrote."""
