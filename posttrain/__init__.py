"""Post-training of transformer language models."""
