"""The tool that every framework's agent gets."""

import subprocess


def run_command(command: str, weight: float) -> str:
    """Runs a shell command.

    Args:
        command: what to run
        weight: any number
    """
    assert isinstance(weight, int | float), weight
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, errors="replace"
    ).stdout
