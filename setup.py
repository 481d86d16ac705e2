"""The packages of the wheel; everything else about it is in pyproject.toml.

The examples are installed as `agentic_rl_examples`, because `agentic-train init` copies from them.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["proxy*", "agent_loop*", "trainer*", "harbor_sdk*"]),
        "agentic_rl_examples",
    ],
    package_dir={"agentic_rl_examples": "examples"},
)
