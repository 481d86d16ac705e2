"""Conversations independent of the dialect, and the comparison of conversations.

`messages` holds the conversation, `json_values` compares JSON values however they are written, and
`message_keys` computes the digests by which the proxy finds the turn that a conversation continues.
"""

from proxy.conversation.json_values import parsed_arguments
from proxy.conversation.message_keys import ConversationKey, Key, RawKey
from proxy.conversation.messages import Conversation, Message, Role, ToolCall

__all__ = [
    "Conversation",
    "ConversationKey",
    "Key",
    "Message",
    "RawKey",
    "Role",
    "ToolCall",
    "parsed_arguments",
]
