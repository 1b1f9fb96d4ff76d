"""The model on one device: a stateless shell around torch and transformers."""
