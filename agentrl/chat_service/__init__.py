"""OpenAI-compatible chat services: their wire format, and a client. Policies and environments may talk to one."""
