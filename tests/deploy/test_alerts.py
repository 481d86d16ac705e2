"""The alert rules name verdicts that there are, by the metric that the proxy of a run exports."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from proxy.run_files.verdict import Word

ALERTS = Path(__file__).parents[2] / "k8s" / "alerts.yaml"
GOOD = {Word.LEARNING, Word.TOO_EARLY}


def test_every_verdict_that_needs_somebody_has_one_alert() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    named: list[str] = []
    for rule in group["rules"]:
        found = re.fullmatch(r'agentic_proxy_run_verdict\{verdict=~"(.*)"\} == 1', rule["expr"])
        assert found is not None
        named += found[1].split("|")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    assert sorted(named) == sorted(word.value for word in Word if word not in GOOD)
