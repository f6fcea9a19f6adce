"""What is asked: a YAML file becomes one frozen Scenario; the only defaults, the only validation."""
