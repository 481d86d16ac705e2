"""What becomes of each type of item, block and tool that the official APIs have.

The tables are read by people, by the documentation, and by a test that takes the types from the
installed SDKs: it fails when one is new, and when the dialects do something else than is said here.
"""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """What becomes of a part of a request."""

    UNDERSTOOD = "understood"
    """The model gets what it says."""
    SHOWN = "shown as text"
    """The model sees a short text in its place, and an event says so."""
    SILENT = "says nothing"
    """It is for the provider or the agent; the model gets nothing."""
    FUNCTION = "a function"
    """A tool that the model can call, and that the agent runs."""
    LEFT_OUT = "left out"
    """A tool that only a provider can run. If a request has no others, it is refused."""


def _table(**types: str) -> dict[str, Fate]:
    return {name: Fate[fate] for fate, names in types.items() for name in names.split()}


RESPONSES_ITEMS = _table(
    UNDERSTOOD="message function_call function_call_output custom_tool_call custom_tool_call_output"
    " reasoning item_reference local_shell_call local_shell_call_output shell_call"
    " shell_call_output apply_patch_call apply_patch_call_output computer_call tool_search_call"
    " tool_search_output additional_tools agent_message compaction_trigger",
    SHOWN="file_search_call web_search_call code_interpreter_call image_generation_call"
    " computer_call_output mcp_list_tools mcp_approval_request mcp_approval_response mcp_call"
    " program program_output configuration_update compaction compaction_summary"
    " context_compaction",
    SILENT="ghost_snapshot",
)
"""Items of Responses. A compaction that this proxy has made is understood, and a screenshot is what
a computer's output shows as text."""
RESPONSES_CONTENT = _table(
    UNDERSTOOD="input_text output_text refusal", SHOWN="input_image input_file"
)
RESPONSES_TOOLS = _table(
    FUNCTION="function custom namespace local_shell shell apply_patch tool_search computer"
    " computer_use_preview",
    LEFT_OUT="web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11"
    " file_search code_interpreter image_generation mcp programmatic_tool_calling",
)
"""A shell in a container of the provider, and a tool search that it runs, are left out."""
MESSAGES_BLOCKS = _table(
    UNDERSTOOD="text tool_use tool_result tool_reference search_result thinking",
    SHOWN="image document server_tool_use web_search_tool_result web_fetch_tool_result"
    " code_execution_tool_result bash_code_execution_tool_result"
    " text_editor_code_execution_tool_result tool_search_tool_result container_upload"
    " advisor_tool_result mcp_tool_use mcp_tool_result mcp_tool_listing tool_addition tool_removal"
    " fallback browser_state compaction",
    SILENT="redacted_thinking",
)
"""Blocks of Messages. A document of text, and a compaction with text, are understood."""
MESSAGES_TOOLS = _table(
    FUNCTION="custom bash_20241022 bash_20250124 text_editor_20241022 text_editor_20250124"
    " text_editor_20250429 text_editor_20250728 memory_20250818 computer_20241022"
    " computer_20250124 computer_20251124",
    LEFT_OUT="web_search_20250305 web_search_20260209 web_search_20260318 web_fetch_20250910"
    " web_fetch_20260209 web_fetch_20260309 web_fetch_20260318 code_execution_20250522"
    " code_execution_20250825 code_execution_20260120 code_execution_20260521 advisor_20260301"
    " tool_search_tool_bm25_20251119 tool_search_tool_bm25 tool_search_tool_regex_20251119"
    " tool_search_tool_regex mcp_toolset computer_toolset_20260801 browser_toolset_20260801",
)
"""The toolsets of August 2026 are run by the agent, but their schemas are not published."""
CHAT_CONTENT = _table(
    UNDERSTOOD="text refusal thinking", SHOWN="image_url input_audio file", SILENT=""
)
CHAT_TOOLS = _table(FUNCTION="function custom")
