"""What pyproject.toml cannot say: the scenarios lie at the top, and go into the package when it is installed."""

from setuptools import find_packages, setup

DATA = {
    "cbsim.scenarios": "scenarios",
    "cbsim.scenarios.models": "scenarios/models",
    "cbsim.scenarios.hardware": "scenarios/hardware",
    "cbsim.scenarios.lengths": "scenarios/lengths",
}
setup(packages=[*find_packages(include=["cbsim*", "cbengine*", "analysis*"]), *DATA], package_dir=DATA)
