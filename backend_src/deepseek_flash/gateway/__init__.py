"""The front door for clients that speak OpenAI's or Anthropic's API.

vLLM's own routes over an ``EngineClient`` whose engine is Triton: protocols, chat templates, tool
and reasoning parsers are the library's. No model weights are in this process.
"""
