"""The blocks of one worker: who holds them, what they contain, which are free; see the README."""
