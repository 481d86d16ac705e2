"""`agentic-proxy policy`: what a person says about a policy that is learned from sessions."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from proxy.admin_key import client_key, key_file
from proxy.client import ProxyClientError
from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.extras.learn.client import LearnClient
from proxy.machine.port import http_url


def policy(arguments: Namespace) -> int:
    """Prints the policy's adapters, after the order if one is given."""
    config = load_config(arguments.config)
    url = arguments.url or config.public_url or http_url(config.host, config.port)
    key = None if config.admin_key is None else config.admin_key.get_secret_value()
    file = key_file(config)
    if key is None and arguments.url is None and file.is_file():
        key = file.read_text(encoding="utf-8").split()[0]
    print(asyncio.run(_said(arguments, LearnClient(url, key or client_key(url)))))
    return 0


async def _said(arguments: Namespace, client: LearnClient) -> str:
    async with client:
        try:
            if arguments.action == "show":
                return described(arguments.name, await client.state(arguments.name))
            return described(arguments.name, await client.order(arguments.name, arguments.action))
        except ProxyClientError as error:
            raise ConfigurationError(str(error)) from error


def described(name: str, state: dict[str, Any]) -> str:
    """Example: `work: stable 3, canary 5 for 50 % of new sessions; open sessions: work-3 2`"""
    canary = "no canary"
    if state["canary"] is not None:
        share = f"{100 * state['share']:.0f} %"
        canary = f"canary {state['canary']} for {share} of new sessions"
    words = [f"{name}: stable {state['stable']}, {canary}"]
    if state["frozen"]:
        words.append("frozen")
    if state["order"]:
        words.append(f"{state['order']} ordered; the learner does the rest")
    if state["open"]:
        counts = ", ".join(f"{each} {count}" for each, count in sorted(state["open"].items()))
        words.append(f"open sessions: {counts}")
    return "; ".join(words)
