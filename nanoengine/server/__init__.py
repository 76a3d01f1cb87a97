"""OpenAI-compatible HTTP over the engine. Needs the extra ``serve`` (fastapi, uvicorn, prometheus-client)."""
