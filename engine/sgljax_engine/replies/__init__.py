"""Replies of chat models as text: their thoughts, content and tool calls, by response templates."""
