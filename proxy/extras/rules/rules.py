"""Search rules: a search with a name, and what happens to sessions with a turn that matches it.

Rules come from the configuration (`rules`), or were saved from the page; the latter only mark.
Invariant: a rule's name is unique; a configured rule hides a saved one of the same name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator, with_config
from typing_extensions import TypedDict

from proxy.errors import RequestError
from proxy.http.valid_json import CLOSED
from proxy.records import ForkCause, RuleAction
from proxy.search.terms import SearchTerms
from proxy.settings.section import Common, Section
from proxy.store.browser import Browser, SavedRule

MAX_SAVED = 50
"""Rules that can be saved from the page; each is matched with every turn."""
RuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,63}$")]


class RuleQuery(Section):
    """What a turn must have, all of it, as in the view *Search*."""

    text: str = ""
    """Text that was sent or answered, whatever the case."""
    regex: Common[str] = ""
    """In place of `text`: a regular expression."""
    tool: Common[str] = ""
    """The name of a tool that is called."""
    cause: ForkCause | None = None
    """The cause of the turn's fork."""
    edits_tests: Common[bool] = False
    """Whether a tool call changes a file of tests: an editing tool with a test's path, or a shell
    command that writes to one."""
    answers_only: bool = False
    """Whether only the model's answer counts, not what the agent sent. A rule that ends trials or
    zeroes rewards should set it, or the text of a task may match."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            self.terms()
        except RequestError as error:
            raise ValueError(error.message) from None
        return self

    def terms(self) -> SearchTerms:
        return SearchTerms.of(
            self.text,
            self.regex,
            self.tool,
            self.cause,
            edits_tests=self.edits_tests,
            answers_only=self.answers_only,
        )


class RuleConfig(Section):
    """A search rule. It marks the sessions with a turn that matches it."""

    name: Common[RuleName]
    """The rule's name in marks, in metrics and in the reward's parts: letters, digits and `._-`."""
    query: RuleQuery
    """What a turn must have."""
    action: Common[RuleAction] = RuleAction.MARK
    """What happens besides the mark: `mark`: nothing; `end`: the session is completed, so that the
    trial ends (truncated); `zero_reward`: the trial's reward is 0."""


def check_names(rules: list[RuleConfig]) -> list[RuleConfig]:
    names = [rule.name for rule in rules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two rules have the name {twice!r}; rename one")
    return rules


Rules = Annotated[list[RuleConfig], AfterValidator(check_names)]


@dataclass(frozen=True, slots=True)
class ActiveRule:
    """A rule that is ready to be matched."""

    name: str
    action: RuleAction
    terms: SearchTerms

    @classmethod
    def of(cls, rule: RuleConfig) -> ActiveRule:
        return cls(rule.name, rule.action, rule.query.terms())


@with_config(CLOSED)
class RuleJson(TypedDict):
    """A search rule. `query` has the terms that are set (`rules` in the configuration)."""

    name: str
    query: dict[str, Any]
    action: RuleAction
    configured: bool


async def saved_rules(browser: Browser) -> list[RuleConfig]:
    """The rules that were saved from the page. One that this version cannot read is left out."""
    found = []
    for saved in await browser.saved_rules():
        try:
            query = RuleQuery.model_validate_json(saved.query)
        except ValidationError:
            continue
        found.append(RuleConfig(name=saved.name, query=query))
    return found


async def save_rule(browser: Browser, given: dict[str, Any]) -> None:
    """Saves a rule that marks sessions.

    Raises:
        RequestError: the name or the query cannot be used, the name is taken (409), or there are
            too many rules.
    """
    try:
        rule = RuleConfig.model_validate({name: given.get(name) for name in ("name", "query")})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise RequestError(f"{field}: {first['msg']}", param=field) from None
    if len(await browser.saved_rules()) >= MAX_SAVED:
        raise RequestError(f"{MAX_SAVED} rules are saved, no more can be; remove one", status=409)
    query = rule.query.model_dump_json(exclude_defaults=True).encode()
    if not await browser.save_rule(SavedRule(rule.name, query, time.time())):
        raise RequestError(f"name: a rule {rule.name!r} exists; choose another", status=409)


def rule_json(rule: RuleConfig, *, configured: bool = False) -> RuleJson:
    """A rule for the page."""
    query = rule.query.model_dump(mode="json", exclude_defaults=True)
    return {"name": rule.name, "query": query, "action": rule.action, "configured": configured}
