"""deepseek-flash: lossless acceleration of vLLM behind an NVIDIA Triton ensemble."""

__version__ = "0.1.0"
