"""The engine over transformers' model code; the embedded default."""
