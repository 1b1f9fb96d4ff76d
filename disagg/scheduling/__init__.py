"""The worker's decisions: scheduler, batches, hand-overs; sans-IO."""
