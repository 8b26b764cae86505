"""From the engine arguments to a configuration that vLLM accepts and the plugin supports."""
