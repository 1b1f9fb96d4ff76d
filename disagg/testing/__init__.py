"""What others need to test against: scripted workers and a simulated fleet, without I/O."""
