"""Block-sparse attention of prompts and of decodes."""
