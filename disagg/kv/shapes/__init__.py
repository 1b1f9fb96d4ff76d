"""From a model's layers to groups, block geometry and what memory holds; see the README."""
