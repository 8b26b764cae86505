"""The start of an engine: the plugin's options, the support table, memory, the model runner."""
