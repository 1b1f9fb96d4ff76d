"""The reservation that comes before a hand-over: grants at one worker, requests at the other."""
