"""Agents of users that call the policy themselves, over OpenAI's protocol."""
