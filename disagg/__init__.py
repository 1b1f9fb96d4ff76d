"""disagg: prefill/decode disaggregation for hybrid-attention language models."""
