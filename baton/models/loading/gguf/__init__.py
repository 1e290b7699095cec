"""Serves GGUF files: makes a directory in Hugging Face's form of their metadata; callers use `view.model_directory`."""
