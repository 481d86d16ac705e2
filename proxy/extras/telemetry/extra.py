"""The extra `telemetry`: each recorded turn is a span of OpenTelemetry (`spans`)."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Self

from proxy.config import ProxyConfig
from proxy.conversation.messages import load_answer
from proxy.extra import Core, Extra
from proxy.extras.telemetry.spans import (
    SECONDS,
    TOKENS,
    Telemetry,
    TelemetryConfig,
    TimedSpan,
    plain_text,
    trial_context,
)
from proxy.records import FinishReason, Turn, TurnStatus

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

WAITING_TOOLS = 4096
"""Number of answers with tool calls whose results are awaited."""


class TurnTelemetry(Extra):
    """Sends each recorded turn as a span, and its durations and tokens as metrics."""

    @classmethod
    def of(cls, config: ProxyConfig) -> Self | None:
        section: TelemetryConfig = config.telemetry
        return None if section.endpoint is None else cls()

    async def open(self, core: Core) -> None:
        config = core.config
        names = [info.name for info in core.router.infos]
        self._telemetry = telemetry = Telemetry(config.telemetry.endpoint, "agentic-proxy", {})
        self._model = config.model_name
        """The model's name in metrics, in which an agent's own names would be too many."""
        self._providers = dict(zip(names, (e.kind for e in config.engines), strict=False))
        """Kinds of engines by their names."""
        self._in_trial = config.run is not None
        """Whether a trainer sends the spans of trials, of which those of calls are parts."""
        self._tools: OrderedDict[tuple[str, int], tuple[float, list[tuple[str, str]]]] = (
            OrderedDict()
        )
        """Session and turn → when it ended, and the id and the name of each of its tool calls."""
        self._duration = telemetry.histogram(
            "gen_ai.client.operation.duration", "s", "Duration of calls", SECONDS
        )
        self._first_token = telemetry.histogram(
            "gen_ai.server.time_to_first_token", "s", "Time to the first token", SECONDS
        )
        self._usage = telemetry.histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens of calls", TOKENS
        )

    def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
        end = turn.started_at + (turn.duration_s or 0.0)
        self._send_tools(turn)
        if turn.finish_reason is FinishReason.TOOL_CALLS:
            calls = [(call.id, call.name) for call in load_answer(turn.answer).tool_calls]
            self._tools[turn.session_id, turn.index] = (end, calls)
            while len(self._tools) > WAITING_TOOLS:
                self._tools.popitem(last=False)
        operation = "text_completion" if turn.dialect == "completions" else "chat"
        error = "cut" if turn.status is TurnStatus.CUT else None
        labels = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": self._providers.get(turn.engine, "vllm"),
            "gen_ai.request.model": self._model,
            **({} if error is None else {"error.type": error}),
        }
        requested = plain_text(model) or self._model
        attributes = {**labels, "gen_ai.request.model": requested, **_call_attributes(turn)}
        attributes["gen_ai.response.model"] = turn.policy or self._model
        span = TimedSpan(
            f"{operation} {requested}",
            turn.started_at,
            end,
            attributes,
            None if error is None else "the answer was cut",
            is_client=True,
        )
        self._send(span, turn)
        self._duration(turn.duration_s or 0.0, labels)
        if turn.first_token_s is not None:
            self._first_token(turn.first_token_s, labels)
        self._usage(turn.prompt_tokens, {**labels, "gen_ai.token.type": "input"})
        self._usage(len(turn.sampled_ids), {**labels, "gen_ai.token.type": "output"})

    async def close(self) -> None:
        """Sends what is left, for at most `CLOSE_S`."""
        await asyncio.to_thread(self._telemetry.close)

    def _send_tools(self, turn: Turn) -> None:
        """The tools whose results the turn is the first to bring."""
        if turn.parent is None:
            return
        began, calls = self._tools.pop((turn.session_id, turn.parent), (0.0, []))
        for call_id, name in calls:
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": plain_text(name),
                "gen_ai.tool.call.id": plain_text(call_id),
                "gen_ai.tool.type": "function",
                "gen_ai.conversation.id": plain_text(turn.session_id),
            }
            name = f"execute_tool {plain_text(name)}"
            self._send(TimedSpan(name, began, turn.started_at, attributes), turn)

    def _send(self, span: TimedSpan, turn: Turn) -> None:
        trial = trial_context(turn.session_id)
        if self._in_trial:
            self._telemetry.send(span, parent=trial)
        else:
            # Without a parent: the spans of a session are one trace with several roots.
            self._telemetry.send(span, context=_in_trace(trial))


def _in_trace(trial: SpanContext) -> SpanContext:
    """A new span in the trace of a trial."""
    from opentelemetry.trace import SpanContext

    span_id = int.from_bytes(os.urandom(8)) or 1
    return SpanContext(trial.trace_id, span_id, is_remote=False, trace_flags=trial.trace_flags)


def _call_attributes(turn: Turn) -> dict[str, Any]:
    finish = turn.finish_reason
    sampling = turn.sampling
    return {
        "gen_ai.conversation.id": plain_text(turn.session_id),
        "gen_ai.agent.id": None if turn.agent_id is None else plain_text(turn.agent_id),
        "gen_ai.response.id": f"{plain_text(turn.session_id)}#{turn.index}",
        "gen_ai.response.finish_reasons": None if finish is None else [finish.value],
        "gen_ai.usage.input_tokens": turn.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": turn.shared_tokens,
        "gen_ai.usage.output_tokens": len(turn.sampled_ids),
        "gen_ai.request.temperature": sampling.get("temperature"),
        "gen_ai.request.top_p": sampling.get("top_p"),
        "gen_ai.request.max_tokens": sampling.get("max_tokens"),
        "gen_ai.request.seed": sampling.get("seed"),
        "gen_ai.response.time_to_first_chunk": turn.first_token_s,
        "agentic.engine": turn.engine or None,
        "agentic.turn": turn.index,
        "agentic.fork": None if turn.fork_cause is None else turn.fork_cause.value,
        "agentic.policy.versions": [span.version for span in turn.versions],
    }
