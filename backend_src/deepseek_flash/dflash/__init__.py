"""DFlash: the cache of verified continuations. Pure torch; knows neither vLLM nor Triton."""
